"""``training.json`` of a version, ``hotrow compare``, ``hotrow train --from`` and ``hotrow check --against``."""

import hashlib
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.cli.main import main
from serving.features import read_definition, vocabulary_values
from tests.training.command.running import hotrow_train

ROWS = 200
FEATURES = {
    "format": 1,
    "features": [
        {"name": "user", "kind": "vocabulary", "values": ["u0", "u1", "u2"]},
        {"name": "stars", "kind": "vocabulary", "type": "integer", "values": [1, 2]},
        {"name": "seen", "kind": "vocabulary", "values": ["u0", "u1", "u2"], "shares": "user", "list": {"most": 4}},
        {"name": "price", "kind": "dense", "missing": 0},
    ],
}


def clicks(users):
    rng = np.random.default_rng(0)
    return {
        "clicked": rng.integers(0, 2, ROWS),
        "user": [f"u{user}" for user in rng.integers(0, users, ROWS)],
        "stars": rng.integers(1, users, ROWS),
        "seen": [["u1", "x"]] * ROWS,
        "price": rng.random(ROWS),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    for name, users in (("old", 3), ("new", 6)):
        rows = clicks(users)
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
    late = pa.table(clicks(6)).slice(0, ROWS - 20)
    rare = pa.table({**clicks(6), "user": ["late"] * ROWS}).slice(0, 20)
    pq.write_table(pa.concat_tables([late, rare]), folder / "new.parquet")
    (folder / "features.json").write_text(json.dumps(FEATURES))
    options = ["--features", str(folder / "features.json"), "--label", "clicked", "--embedding-dim", "4"]
    assert train(folder, "old", *options, "--name", "m", "--epochs", "2") == 0
    assert train(folder, "new", "--from", str(folder / "models" / "m")) == 0
    return folder


def train(folder, data, *options):
    output = ["--output", str(folder / "models"), "--batch-size", "50"]
    return hotrow_train(["--data", str(folder / f"{data}.parquet"), *output, *options])


def definition(version):
    return {feature.name: feature for feature in read_definition(version / "features.json").features}


def test_a_version_says_how_it_was_trained(trained):
    record = json.loads((trained / "models" / "m" / "1" / "training.json").read_text())
    content = (trained / "old.parquet").read_bytes()
    assert record["data"]["sha256"] == {"data": hashlib.sha256(content).hexdigest()}
    assert (record["data"]["rows"], record["data"]["evaluation_rows"]) == (180, 20)
    assert record["arguments"]["model"] == "dcn"
    assert (record["arguments"]["epochs"], record["arguments"]["label"]) == (2, ["clicked"])
    assert record["versions"].keys() >= {"python", "torch", "numpy"}
    assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2]
    assert record["epoch"] in (1, 2)
    assert record["epochs"][0].keys() >= {"loss", "auc", "log_loss", "base_log_loss", "calibration"}


def test_a_version_of_a_version_has_its_network_and_label(trained):
    record = json.loads((trained / "models" / "m" / "2" / "training.json").read_text())
    assert (record["arguments"]["model"], record["arguments"]["label"]) == ("dcn", ["clicked"])
    assert [*record["epochs"][0]["auc"]] == ["clicked"]
    assert train(trained, "new", "--from", str(trained / "models" / "m" / "2"), "--name", "third") == 0


def test_secrets_of_a_log_are_not_written(trained):
    options = ["--checkpoint", str(trained / "saved"), "--publish", f"file://{trained}/log?password=secret"]
    train(trained, "new", "--from", str(trained / "models" / "m" / "1"), "--name", "published", *options)
    for path in (trained / "models").glob("published/*/training.json"):
        assert "secret" not in path.read_text()


def test_vocabularies_grow_at_the_end_with_the_training_rows(trained):
    old, new = (definition(trained / "models" / "m" / version) for version in ("1", "2"))
    users = vocabulary_values(new["user"])
    assert users[:3] == ["u0", "u1", "u2"]
    assert sorted(users[3:]) == ["u3", "u4", "u5", "x"]  # "late" is in the evaluation's rows only
    assert users[3] == "x"  # the most frequent
    stars = vocabulary_values(new["stars"])
    assert (stars[:2], sorted(stars[2:])) == (["1", "2"], ["3", "4", "5"])
    for name in old:
        assert (old[name].slot, old[name].offset) == (new[name].slot, new[name].offset)
    with hotrow.load_model(trained / "models" / "m" / "1") as one, hotrow.load_model(trained / "models" / "m") as two:
        values = {"user": ["u1", "u5"], "seen": [["u2"], ["x"]], "stars": [2, 5]}
        keys = [session.read(values).joined.keys.reshape(2, 3) for session in (one, two)]
        assert (keys[0][0] == keys[1][0]).all()
        assert (keys[0][1] != keys[1][1]).all()


def test_training_goes_on_from_the_rows_and_the_network(trained, capsys):
    """With a tiny learning rate the new version answers as the old one."""
    options = ["--from", str(trained / "models" / "m" / "1"), "--name", "same", "--learning-rate", "1e-12"]
    assert train(trained, "new", *options) == 0
    assert "vocabulary of user: 4 new values" in capsys.readouterr().out
    values = {"user": ["u0", "u1"], "stars": [2, 1], "price": [0.5, 1.5]}
    found = []
    for name in ("m/1", "same"):
        with hotrow.load_model(trained / "models" / name) as session:
            found.append(session.predict(values))
    assert np.allclose(*found, atol=1e-6)


def test_what_clients_must_change_is_listed(trained, tmp_path, capsys):
    old, new = trained / "models" / "m" / "1", trained / "models" / "m" / "2"
    assert main(["check", str(new), "--against", str(old)]) == 0
    assert capsys.readouterr().out == "from m version 1 to m version 2\nclients need not change anything\n"
    shutil.copytree(new, tmp_path / "m" / "3")
    changed = tmp_path / "m" / "3"
    (changed / "manifest.json").unlink()
    document = json.loads((changed / "features.json").read_text())
    user, stars, seen, price = document["features"]
    user["name"], seen["shares"] = "member", "member"
    stars["unit"], stars["offset"] = "day", stars["offset"] + 9
    seen["list"]["most"] = 3
    del price["missing"]
    document["features"].append({"name": "age", "kind": "dense"})
    (changed / "features.json").write_text(json.dumps(document))
    graph = json.loads((changed / "graph.json").read_text())
    graph["layers"][0]["dense"] |= {"dense_dim": 2, "names": ["price", "age"]}
    (changed / "graph.json").write_text(json.dumps(graph))
    assert main(["check", str(changed), "--against", str(old)]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    of_keys = [line.removeprefix("for requests with keys: ") for line in lines if "for requests with keys" in line]
    slot = "sparse_embedding1"
    assert of_keys == [
        "send 2 dense numbers; the old version has 1",
        f"send the keys of member in the slot {slot}[0]; the old version has those of user there",
        f"compute the keys of the slot {slot}[1] with the new definition: they have changed",
    ]
    assert [line for line in lines if "for requests with keys" not in line] == [
        "from m version 1 to m version 3",
        "leave out user: the new version has no such feature",
        "send member, text: it is new and counts as missing until you send it",
        "send stars as an integer in day; the old version takes an integer",
        "send at most 3 values of seen",
        "always send price: it is now required",
        "send age, a number: it is new and required",
    ]


def test_two_versions_are_shown_side_by_side(trained, capsys):
    first, second = trained / "models" / "m" / "1", trained / "models" / "m"
    assert main(["compare", str(first), str(second), "--plot", str(trained / "c.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["m/1", "m/2"]
    [log_loss] = [line.split() for line in lines if line.startswith("log loss")]
    assert (log_loss[:3], len(log_loss)) == (["log", "loss", "clicked"], 5)
    assert ["--epochs", "2", "1"] in [line.split() for line in lines]
    assert any(line.startswith("sha256 of data") for line in lines)
    assert (trained / "c.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["compare", "models/m", "models"],
            "models: there is no training.json; only `hotrow train` writes this file",
        ),
        (["compare", "models/m", "absent"], "absent: no such folder"),
        (["train", "--data", "new.parquet", "--output", "o", "--from", "models"], "models: there is no training.json"),
        (["check", "models/m", "--against", "absent"], "absent: "),
        (["train", "--data", "old.npz", "--output", "o", "--from", "models/m"], "old.npz: "),
        (["train", "--data", "none.parquet", "--output", "o", "--from", "models/m"], "none.parquet: no samples"),
    ],
)
def test_anything_that_is_not_a_trained_version_is_refused(trained, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(trained)
    pq.write_table(pa.table(clicks(3)).slice(0, 0), "none.parquet")
    assert main(arguments) == 1
    assert text in capsys.readouterr().err


def test_a_record_of_an_earlier_version_is_compared(trained, tmp_path, capsys):
    record = json.loads((trained / "models" / "m" / "1" / "training.json").read_text())
    for epoch in record["epochs"]:
        del epoch["evaluation_loss"], epoch["ones"]
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert main(["compare", str(tmp_path), str(trained / "models" / "m"), "--plot", str(tmp_path / "c.svg")]) == 0
    assert "evaluation, clicked" in (tmp_path / "c.svg").read_text()


def test_a_record_without_a_figure_is_refused(trained, tmp_path, capsys):
    record = json.loads((trained / "models" / "m" / "1" / "training.json").read_text())
    del record["epochs"][1]["calibration"]
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert main(["compare", str(tmp_path), str(trained / "models" / "m")]) == 1
    assert "training.json: epochs[1].calibration: " in capsys.readouterr().err


def test_a_damaged_version_is_refused(trained, tmp_path, capsys):
    shutil.copytree(trained / "models" / "m" / "1", tmp_path / "m" / "1")
    (tmp_path / "m" / "1" / "dense.model").write_bytes(b"")
    assert train(trained, "new", "--from", str(tmp_path / "m")) == 1
    assert "dense.model: expected" in capsys.readouterr().err


def test_a_model_of_keys_is_trained_further(tmp_path, capsys):
    arrays = {"click": [1, 0] * 20, "purchase": [0, 1] * 20, "dense": np.ones((40, 2)), "history": [[4]] * 40}
    np.savez(tmp_path / "a.npz", **arrays, profile=[[17, 1 << 40, 2 << 40], [18, (1 << 40) + 5, -1]] * 20)
    options = ["--data", str(tmp_path / "a.npz"), "--output", str(tmp_path / "models"), "--learning-rate", "1e-12"]
    assert hotrow_train([*options, "--model", "mmoe"]) == 0
    assert hotrow_train([*options, "--from", str(tmp_path / "models" / "mmoe")]) == 0
    assert hotrow_train([*options, "--from", str(tmp_path / "models" / "mmoe"), "--label", "click"]) == 1
    assert "mmoe/2: the version takes keys, not raw features; leave out --label" in capsys.readouterr().err
    one, two = (tmp_path / "models" / "mmoe" / version / "sparse_embedding_profile" for version in ("1", "2"))
    first, second = (dict(zip(*rows_of(folder), strict=True)) for folder in (one, two))
    assert first.keys() == second.keys()
    assert all(np.allclose(first[key], second[key], atol=1e-6) for key in first)


def rows_of(folder):
    keys = np.fromfile(folder / "key", np.int64).tolist()
    return keys, np.fromfile(folder / "emb_vector", np.float32).reshape(len(keys), -1)
