"""``hotrow train --features``: raw columns in, and a model that answers the same raw values."""

import json
import re
import shutil
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.cli.main import main
from serving.config import VersionPolicy
from serving.errors import ConfigError, FeatureValueError, RequestError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.training.command.running import hotrow_train
from training.built_in import built_in_graphs
from training.data.opening import open_data
from training.features import FeatureFile, RawFeatures
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_dense, export_model

ROWS = 600
FEATURES = {
    "format": 1,
    "features": [
        {"name": "user", "kind": "hash", "buckets": 500},
        {"name": "country", "kind": "vocabulary", "vocabulary": "country.txt"},
        {"name": "tags", "kind": "hash", "buckets": 20, "list": {"separator": "|", "most": 3, "keep": "first"}},
        {"name": "age", "kind": "bucketize", "type": "integer", "boundaries": [18, 40], "missing": 30},
        {"name": "both", "kind": "cross", "of": ["country", "age"], "buckets": 50},
        {"name": "price", "kind": "dense", "log1p": True, "missing": 0},
    ],
}


def clicks():
    """Users whose number is odd click."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 60, ROWS)
    tags = [list(rng.choice(["a", "b", "c"], size, replace=False)) for size in rng.integers(0, 4, ROWS)]
    return {
        "clicked": users % 2,
        "user": [f"u{user}" for user in users],
        "country": pa.array(rng.choice(["de", "日本", None, "xx"], ROWS)),
        "tags": tags,
        "age": [int(age) if age > 12 else None for age in rng.integers(10, 70, ROWS)],
        "price": [float(np.float32(price)) if price > 1 else None for price in rng.gamma(2, 3, ROWS)],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    rows = clicks()
    pq.write_table(pa.table(rows), folder / "clicks.parquet", row_group_size=250)
    pa_csv.write_csv(pa.table({**rows, "tags": ["|".join(tags) for tags in rows["tags"]]}), folder / "clicks.csv")
    (folder / "country.txt").write_text("de\n日本\n", encoding="utf-8")
    (folder / "features.json").write_text(json.dumps(FEATURES))
    return folder


def train(data, output, *more, file="clicks.parquet", features="features.json"):
    paths = ["--data", str(data / file), "--output", str(output)]
    paths += [] if features is None else ["--features", str(data / features)]
    return hotrow_train([*paths, "--label", "clicked", "--batch-size", "60", *more])


@pytest.fixture(scope="module")
def models(data):
    assert train(data, data / "models", "--epochs", "12") == 0
    return data / "models"


def test_a_model_learns_from_raw_columns_and_answers_them(models, data):
    with hotrow.load_model(models / "dcn") as session:
        table = pq.read_table(data / "clicks.parquet")
        clicked = table["clicked"].to_numpy().astype(bool)
        answers = session.predict(table.drop_columns(["clicked"]))[:, 0]
        assert answers[clicked].mean() > 0.8 > 0.2 > answers[~clicked].mean()
        assert session.predict(table.drop_columns(["clicked"]).to_pydict())[:, 0].tobytes() == answers.tobytes()


def test_hotrow_check_reads_the_definition(models, tmp_path, capsys):
    assert main(["check", str(models)]) == 0
    assert "vocabulary of country" in capsys.readouterr().out
    shutil.copytree(models / "dcn", tmp_path / "dcn")
    version = tmp_path / "dcn" / "1"
    (version / "manifest.json").unlink()
    (version / "feature1.vocabulary").write_bytes(b"HRVOCAB1 damaged")
    assert main(["check", str(tmp_path)]) == 1
    assert "expected a vocabulary of Hotrow" in capsys.readouterr().err
    text = (version / "features.json").read_text()
    (version / "features.json").write_text(text.replace("buckets", "bukets", 1))
    assert main(["check", str(tmp_path)]) == 1
    assert "features[0].bukets: unknown key; did you mean 'buckets'?" in capsys.readouterr().err


def test_csv_gives_the_same_model(models, data, tmp_path):
    assert train(data, tmp_path, "--epochs", "12", file="clicks.csv") == 0
    for name in ("dense.model", "sparse_embedding1/key", "sparse_embedding1/emb_vector", "features.json"):
        assert (tmp_path / "dcn" / "1" / name).read_bytes() == (models / "dcn" / "1" / name).read_bytes()


def test_requests_have_raw_values_or_keys(models, data):
    rows = pq.read_table(data / "clicks.parquet").drop_columns(["clicked"]).slice(0, 3).to_pylist()
    with ModelRepository(models) as repository, hotrow.load_model(models / "dcn") as session:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        answer = client.post("/predict/dcn", json={"samples": rows}).json()
        expected = session.predict({name: [row[name] for row in rows] for name in rows[0]})
        assert np.array(answer["predictions"], np.float32).tolist() == expected.tolist()
        batch = session.read({name: [row[name] for row in rows] for name in rows[0]})
        keys, row_ptrs = batch.joined.keys, batch.joined.row_ptrs
        bags = [bag.tolist() for bag in np.split(keys, row_ptrs[1:-1])]
        samples = [{"dense": batch.dense[at].tolist(), "keys": bags[5 * at : 5 * at + 5]} for at in range(3)]
        with pytest.raises(RequestError, match="a request has keys or raw features"):
            session.predict({"user": ["u1"]}, keys)
        by_key = client.post("/predict/dcn", json={"samples": samples}).json()
        assert by_key["predictions"] == answer["predictions"]
        mixed = client.post("/predict/dcn", json={"samples": [rows[0], samples[1]]})
        assert mixed.status_code == 400
        assert "samples[1]: has keys, but samples[0] has raw features" in mixed.json()["error"]
        wrong = client.post("/predict/dcn", json={"samples": [rows[0], {**rows[1], "pricee": 1}]})
        assert wrong.json()["error"].startswith("samples[1].pricee: is not a feature; did you mean 'price'?")
        wrong = client.post("/predict/dcn", json={"samples": [rows[0], {**rows[1], "age": 1.5}]})
        assert wrong.json()["error"].startswith("samples[1].age: expected an integer, got 1.5")
        unknown = sum(row["country"] == "xx" for row in rows)
        where = 'feature="country",model="dcn",state="unknown",version="1"'
        lines = [line for line in client.get("/metrics").text.splitlines() if "vocabulary_values_total{" in line]
        assert f"hotrow_vocabulary_values_total{{{where}}} {float(unknown)}" in lines


@pytest.mark.parametrize("model", ["dcn_v2", "deepfm", "dlrm", "mmoe", "wdl"])
def test_networks_follow_the_features(data, tmp_path, model):
    assert train(data, tmp_path, "--model", model, "--embedding-dim", "6", "--hidden", "9,8,7") == 0
    graph = json.loads((tmp_path / model / "1" / "graph.json").read_text())
    widths = [layer["fc_param"]["num_output"] for layer in graph["layers"] if "fc_param" in layer]
    before = {"dlrm": [64, 6], "mmoe": [128, 4]}.get(model, [])
    assert widths == [*before, 9, 8, 7, 1]
    with hotrow.load_model(tmp_path / model) as session:
        assert [table.slots for table in session.config.tables] == [5]
        assert session.config.tables[0].dim == (7 if model in ("deepfm", "wdl") else 6)
        assert session.predict({"user": ["u1"], "price": [2.5]}).shape == (1, 1)


def test_mmoe_has_a_task_for_each_label(data, tmp_path, capsys):
    table = pq.read_table(data / "clicks.parquet")
    for name in ("bought", "experts1"):
        table = table.append_column(name, table["clicked"])
    pq.write_table(table, data / "tasks.parquet")
    labels = ["--label", "bought", "--label", "experts1"]
    assert train(data, tmp_path, "--model", "mmoe", *labels, file="tasks.parquet") == 0
    assert re.search(r"AUC clicked [\d.]+, bought [\d.]+, experts1 ", capsys.readouterr().out)
    with hotrow.load_model(tmp_path / "mmoe") as session:
        assert session.predict({"user": ["u1"], "price": [2.5]}).shape == (1, 3)


def test_ncf_takes_two_features_with_keys(data, tmp_path):
    two = {"format": 1, "features": FEATURES["features"][:2]}
    (data / "two.json").write_text(json.dumps(two))
    options = ["--model", "ncf", "--embedding-dim", "6", "--hidden", "5"]
    assert train(data, tmp_path, *options, features="two.json") == 0
    with hotrow.load_model(tmp_path / "ncf") as session:
        assert [(table.slots, table.dim) for table in session.config.tables] == [(1, 9), (1, 9)]
        assert session.predict({"user": ["u1"], "country": ["de"]}).shape == (1, 1)


SEQUENCES = {
    "format": 1,
    "features": [
        {"name": "user", "kind": "hash", "buckets": 50},
        {"name": "item", "kind": "vocabulary", "values": ["a", "b", "c"]},
        {"name": "tags", "kind": "vocabulary", "values": ["a", "b", "c"], "shares": "item"},
        {"name": "price", "kind": "dense", "missing": 0},
    ],
}
SEQUENCES["features"][2]["list"] = {"separator": "|", "most": 3, "keep": "last"}


@pytest.mark.parametrize(
    ("network", "left_out", "places"),
    [
        ("din", ("user", "price"), ["sparse_embedding_item1[1]", "sparse_embedding_item1[0]"]),
        ("bst", (), ["sparse_embedding_item1[0]", "sparse_embedding_item1[1]"]),
    ],
)
def test_a_history_has_a_position_for_each_value(data, tmp_path, network, left_out, places):
    features = [one for one in SEQUENCES["features"] if one["name"] not in left_out]
    (tmp_path / "f.json").write_text(json.dumps({**SEQUENCES, "features": features}))
    table = pq.read_table(data / "clicks.parquet").append_column("item", pa.array(["a", "b", None] * (ROWS // 3)))
    pq.write_table(table, tmp_path / "items.parquet")
    options = ["--model", network, "--embedding-dim", "6", "--hidden", "9,8"]
    assert train(tmp_path, tmp_path / "models", *options, file="items.parquet", features="f.json") == 0
    version = tmp_path / "models" / network / "1"
    slots = {load["name"]: load.get("slot") for load in json.loads((version / "features.json").read_text())["features"]}
    assert [slots["item"], slots["tags"]] == places
    with hotrow.load_model(version) as session:
        values = {"item": ["a", None], "tags": [["b", "a", "b", "c"], ["c"]]}
        batch = session.read(values)
        target, history = (0, (1, 2, 3)) if network == "bst" else (3, (0, 1, 2))
        sizes = np.diff(batch.tables[-1].row_ptrs).reshape(2, 4)
        assert sizes[:, target].tolist() == [1, 0]
        assert sizes[:, history].tolist() == [[1, 1, 1], [1, 0, 0]]
        of_target = batch.tables[-1].keys[0 if network == "bst" else 3]
        assert sorted(set(batch.tables[-1].keys.tolist())) == [1, 2, 3]
        assert of_target == 1  # the first value of the vocabulary
        answers = session.predict(values)
        again = session.predict({name: given[::-1] for name, given in values.items()})
        assert np.allclose(answers, again[::-1], atol=1e-6)
    assert train(tmp_path, tmp_path / "models", "--from", str(version), file="items.parquet", features=None) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"list": {"separator": "|"}}, "features[2].list.most: required, because din reads a history position by"),
        ({"slot": "sparse_embedding_item1[0:2]"}, "the model has no slot 'user'"),
    ],
)
def test_a_history_that_cannot_be_read_is_refused(data, tmp_path, capsys, change, text):
    features = json.loads(json.dumps(SEQUENCES))
    features["features"][2] |= change
    (data / "wrong_history.json").write_text(json.dumps(features))
    assert train(data, tmp_path, "--model", "din", features="wrong_history.json") == 1
    assert text in capsys.readouterr().err


def test_rows_have_a_size_that_follows_the_features(data, tmp_path, capsys):
    assert train(data, tmp_path, "--model", "auto") == 0
    assert "rows of 16 floats\n" in capsys.readouterr().out
    with hotrow.load_model(tmp_path / "dcn") as session:
        assert session.config.tables[0].dim == 16


def test_a_network_without_dense_features(data, tmp_path):
    features = {**FEATURES, "features": [one for one in FEATURES["features"] if one["kind"] != "dense"]}
    (data / "keys_only.json").write_text(json.dumps(features))
    assert train(data, tmp_path, features="keys_only.json") == 0
    with hotrow.load_model(tmp_path / "dcn") as session:
        assert session.predict({"user": ["u1"]}).shape == (1, 1)


def test_a_graph_of_your_own_names_the_slots(data, tmp_path):
    graph = json.loads(built_in_graphs()["ncf"].read_text())
    (tmp_path / "mine.json").write_text(json.dumps(graph))
    features = [
        {"name": "user", "kind": "hash", "slot": "sparse_embedding_user"},
        {"name": "country", "kind": "hash", "slot": "sparse_embedding_item"},
    ]
    (data / "mine.json").write_text(json.dumps({"format": 1, "features": features}))
    assert train(data, tmp_path / "models", "--model", str(tmp_path / "mine.json"), features="mine.json") == 0
    with hotrow.load_model(tmp_path / "models" / "mine") as session:
        answer = session.predict({"user": ["u1", "u2"], "country": ["de", None]})
        assert answer.shape == (2, 1)


def test_the_names_of_the_columns_are_those_of_requests_with_keys(data, tmp_path, caplog):
    rows = {"clicked": [0, 1] * 40, "viewer": [1, 2] * 40, "film": [5, 6, 7, 8] * 20}
    pq.write_table(pa.table(rows), tmp_path / "films.parquet")
    inputs = {"label": "clicked", "user": "viewer", "item": "film"}
    (tmp_path / "columns.json").write_text(json.dumps(inputs))
    options = ["--model", "ncf", "--data", str(tmp_path / "films.parquet"), "--columns", str(tmp_path / "columns.json")]

    assert hotrow_train([*options, "--output", str(tmp_path / "models")]) == 0

    with hotrow.load_model(tmp_path / "models" / "ncf") as session:
        assert session.config.label_names == ("clicked",)
        by_name = session.predict({"film": [5, 9], "viewer": [1, 2]})
        assert by_name.tobytes() == session.predict(None, [[1, 5], [2, 9]]).tobytes()
    assert 'name: "viewer"' in (tmp_path / "models" / "ncf" / "config.pbtxt").read_text()

    (tmp_path / "columns.json").write_text(json.dumps({**inputs, "item": "keys"}))
    pq.write_table(pa.table({**rows, "keys": rows["film"]}), tmp_path / "films.parquet")
    assert hotrow_train([*options, "--output", str(tmp_path / "models")]) == 0
    assert "does not have the names of the columns: the name 'keys' is reserved" in caplog.text
    with hotrow.load_model(tmp_path / "models" / "ncf") as session:
        assert session.features is None


def test_the_sizes_of_a_graph_of_your_own_stay(data, tmp_path, capsys):
    """Also if its inputs have the sizes of a built-in network's."""
    graph = json.loads(built_in_graphs()["dcn"].read_text())
    graph["layers"][6]["fc_param"]["num_output"] = 416
    (tmp_path / "dcn.json").write_text(json.dumps(graph))
    assert train(data, tmp_path / "models", "--model", str(tmp_path / "dcn.json")) == 1
    assert "the model has no slot 'user'" in capsys.readouterr().err


def test_a_version_that_shares_tables_takes_raw_features(data, tmp_path):
    features = FeatureFile(data / "features.json", open_document("dcn"), ["clicked"])
    document = features.document
    model = CtrModel(document.graph, seed=0)
    samples = open_data(data / "clicks.csv", document, features=features)
    model.train_batch(samples, 0.01)
    export_model(model, document.document, tmp_path, "m", features=features)
    export_dense(model, document.document, tmp_path, "m", base=1)
    values = {"user": ["u1", "u2"], "tags": [["a"], []], "price": [2.5, None]}
    with ModelRepository(tmp_path, control="explicit", startup=["m"]) as repository:
        repository.load()
        repository.load_model("m", VersionPolicy.of_versions([1, 2]))
        first, second = (repository.session("m", version).predict(values) for version in ("1", "2"))
    assert first.tobytes() == second.tobytes()
    slots = [json.loads((tmp_path / "m" / version / "graph.json").read_text())["layers"][0] for version in ("1", "2")]
    assert [slot["sparse"][0]["names"] for slot in slots] == [["user", "country", "tags", "age", "both"]] * 2
    assert [slot["dense"]["names"] for slot in slots] == [["price"]] * 2


def test_training_goes_on_with_the_same_features_only(data, tmp_path, capsys):
    options = ["--checkpoint", str(tmp_path / "saved")]
    assert train(data, tmp_path / "models", *options) == 0
    assert train(data, tmp_path / "models", *options, "--resume", "--epochs", "2") == 0
    changed = json.dumps(FEATURES).replace('"buckets": 500', '"buckets": 501')
    (data / "changed.json").write_text(changed)
    capsys.readouterr()
    assert train(data, tmp_path / "models", *options, "--resume", "--epochs", "3", features="changed.json") == 1
    assert "features" in capsys.readouterr().err
    values = (data / "country.txt").read_text(encoding="utf-8")
    (data / "country.txt").write_text("日本\nde\n", encoding="utf-8")
    assert train(data, tmp_path / "models", *options, "--resume", "--epochs", "3") == 1
    (data / "country.txt").write_text(values, encoding="utf-8")
    assert "crc32_of_vocabularies" in capsys.readouterr().err


def changed_row(data, name, value):
    """Write a copy of the CSV file with another value in the third row."""
    lines = (data / "clicks.csv").read_text(encoding="utf-8").splitlines()
    fields = lines[3].split(",")
    fields[lines[0].replace('"', "").split(",").index(name)] = value
    lines[3] = ",".join(fields)
    (data / "wrong.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("clicked", "2", "wrong.csv line 4 column clicked: expected 0 or 1, found 2"),
        ("age", "old", "wrong.csv line 4 column age: expected an integer, got 'old'"),
        ("age", "17.5", "wrong.csv line 4 column age: expected an integer, got '17.5'"),
        ("price", "free", "wrong.csv line 4 column price: expected a number, got 'free'"),
        ("price", "inf", "wrong.csv line 4 column price: expected a finite number"),
        ("price", "-2", "wrong.csv line 4 column price: expected a number above -1"),
    ],
)
def test_a_wrong_value_of_a_file_is_named(data, tmp_path, capsys, name, value, text):
    changed_row(data, name, value)
    assert train(data, tmp_path, file="wrong.csv") == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "users"}, "clicks.parquet column users: missing; the file has clicked, user, "),
        ({"buckets": None}, "features[0].buckets: required, because the features share one table"),
        ({"kind": "hsh"}, "features[0].kind: input should be 'hash'"),
        (
            {"slot": "user"},
            "features that name slots, as those of a version do, belong to their own network: train the version "
            "further with --from, or take the file that it was trained with",
        ),
    ],
)
def test_a_wrong_definition_ends_the_training_before_it_begins(data, tmp_path, capsys, change, text):
    first = {key: value for key, value in {**FEATURES["features"][0], **change}.items() if value is not None}
    (data / "wrong.json").write_text(json.dumps({**FEATURES, "features": [first, *FEATURES["features"][1:]]}))
    for more in ((), ("--model", "auto")):
        assert train(data, tmp_path, *more, features="wrong.json") == 1
        assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("dcn/*"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--synthetic", "100", "--features", "f.json"], "--features and --label need --data"),
        (
            ["--data", "d.csv", "--features", "f.json", "--columns", "c.json"],
            "--columns does not go with --features or --label",
        ),
        (["--synthetic", "100", "--label", "y"], "--features and --label need --data"),
        (["--data", "d.csv", "--embedding-dim", "4"], "--embedding-dim needs --features or --label"),
        (["--data", "d.csv", "--hidden", "4"], "--hidden needs --features or --label"),
        (["--data", "d.csv", "--label", "y", "--hidden", "4,,2"], "expected a whole number from 1 to 65536, got ''"),
        (["--data", "d.csv", "--model", "auto"], "--model auto needs --features or --label"),
        (["--synthetic", "100", "--weight", "w"], "--weight needs --data"),
        (["--synthetic", "100", "--from", "m"], "--from needs --data"),
        (
            ["--data", "d.csv", "--from", "m", "--model", "dcn"],
            "--from keeps the version's network, features and loss",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, capsys, options, text):
    with pytest.raises(SystemExit):
        hotrow_train([*options, "--output", str(tmp_path)])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--label", "a"], "expected one label, got clicked, a; --model mmoe learns several"),
        (["--model", "ncf"], "the data has 5 features with keys and 1 dense; take another network"),
        (["--model", "din"], "din needs a history: a list feature that shares the keys of its target, such as "),
    ],
)
def test_options_that_do_not_fit_the_network_are_refused(data, tmp_path, capsys, options, text):
    assert train(data, tmp_path, *options) == 1
    assert re.search(re.escape(text), capsys.readouterr().err)


def test_a_label_is_no_feature(data, tmp_path, capsys):
    features = [*FEATURES["features"], {"name": "clicked", "kind": "identity", "type": "boolean", "size": 2}]
    (data / "label.json").write_text(json.dumps({"format": 1, "features": features}))
    assert train(data, tmp_path, features="label.json") == 1
    assert "label.json: features[6].name: 'clicked' is the label, which requests do not have" in capsys.readouterr().err


class Frame:
    """A frame as Arrow sees those of pandas and Polars."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("made", [lambda table: table, Frame])
def test_raw_features_of_any_frame_are_tensors_with_the_keys_of_a_version(models, data, made):
    table = pq.read_table(data / "clicks.parquet")
    batch = RawFeatures(models / "dcn" / "1" / "features.json")(made(table.slice(0, 50)))
    with hotrow.load_model(models / "dcn") as session:
        expected = session.read(table.slice(0, 50).drop_columns("clicked"))
    assert batch.dense.numpy().tobytes() == expected.dense.tobytes()
    joined, row_ptrs = expected.joined.keys, expected.joined.row_ptrs.reshape(-1)
    for number, name in enumerate(("user", "country", "tags", "age", "both")):
        keys, offsets = batch.keys[name]
        of_slot = [joined[row_ptrs[at] : row_ptrs[at + 1]].tolist() for at in range(number, 250, 5)]
        assert [keys[begin:end].tolist() for begin, end in pairwise(offsets.tolist())] == of_slot


@pytest.mark.parametrize(
    ("renamed", "text"),
    [({"user": "usr"}, "user: is not in the frame; did you mean 'usr'?"), ({"clicked": "user"}, "2 times")],
)
def test_a_frame_without_a_feature_is_refused(data, renamed, text):
    table = pq.read_table(data / "clicks.parquet")
    table = table.rename_columns([renamed.get(name, name) for name in table.column_names])
    with pytest.raises(FeatureValueError, match=re.escape(text)):
        RawFeatures(data / "features.json")(table)


def test_a_built_in_network_refuses_weights_of_keys(tmp_path):
    keys = {"name": "tags", "kind": "hash", "buckets": 9, "list": {"most": 2}}
    weights = {"name": "tags.weights", "kind": "dense", "list": {"most": 2}, "weighs": "tags"}
    path = tmp_path / "features.json"
    path.write_text(json.dumps({"format": 1, "features": [keys, weights]}))
    with pytest.raises(ConfigError, match=re.escape("features[1].weighs: no built-in network takes weights of keys")):
        FeatureFile(path, open_document("dcn"), ["clicked"])
    table = pa.table({"tags": [["a", "b"], ["c"], []], "tags.weights": [[0.5, 1.0], [2.0], []]})
    assert RawFeatures(path)(table).dense.tolist() == [[0.5, 1.0], [2.0, 0.0], [0.0, 0.0]]
