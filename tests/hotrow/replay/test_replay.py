"""``hotrow replay``: the requests of a log, answered again."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import hotrow
import hotrow.replay.document
from hotrow.replay.tables import RequestRows
from serving.cli.main import main
from serving.model.data_files import DataFiles
from serving.reading import read_batch
from serving.request_log import RequestLog, requests_of
from tests.tools.raw_model import FEATURES, write_raw_model
from tests.tools.tiny_model import NamedModel, TinyModel, flatten
from tests.tools.two_towers import write_towers

PAIRS = "request_id,request_sample"


def replayed(log, *models, options=(), folder):
    """The figures of a replay."""
    file = folder / "replay.json"
    assert main(["replay", str(log), *map(str, models), "--json", str(file), *map(str, options)]) == 0
    return json.loads(file.read_text())


def test_a_version_gives_its_own_answers_again_and_another_version_differs(models, log, rows, tmp_path, capsys):
    document = replayed(log, models / "1", models / "2", folder=tmp_path)
    same, other = document["models"]

    assert same["differences"]["largest_absolute"] == 0
    assert same["differences"]["largest"] == []
    with hotrow.load_model(models / "2") as session:
        changes = session.predict(rows.select(list(session.features.names)))[:, 0] - rows["prediction"].to_numpy()
    found = other["differences"]
    assert found["mean"] == pytest.approx(changes.mean(), abs=1e-6)
    assert found["largest_absolute"] == pytest.approx(np.abs(changes).max(), abs=1e-6)
    assert found["share_above"]["0.1"] == pytest.approx((np.abs(changes) > 0.1).mean(), abs=1e-6)
    assert sum(found["histogram"]["counts"]) == len(changes)
    at = int(np.abs(changes).argmax())
    assert found["largest"][0]["request_id"] == rows["request_id"][at].as_py()
    assert found["largest"][0]["request_sample"] == rows["request_sample"][at].as_py()
    assert document["log"] | {"path": "", "from": "", "to": "", "mean_prediction": 0} == {
        "path": "",
        "requests": 40,
        "samples": 120,
        "from": "",
        "to": "",
        "versions": {"1": 120},
        "mean_prediction": 0,
    }
    unknown = sum(country == "xx" for country in rows["country"].to_pylist())
    assert same["unknown_values"] == {"country": {"known": 120 - unknown, "unknown": unknown}}
    assert 0 < same["milliseconds"]["p50"] <= same["milliseconds"]["p99"]
    shown = capsys.readouterr().out
    assert "40 requests with 120 samples" in shown
    assert "raw version 1  raw version 2" in shown


def test_differences_are_named_by_the_values_of_features(models, rows, tmp_path):
    is_german = np.array(rows["country"].to_pylist()) == "de"
    has_tag = np.array(["b" in tags for tags in rows["tags"].to_pylist()])
    logged = rows["prediction"].to_numpy() - np.where(is_german, np.float32(0.2), 0) - np.where(has_tag, 0.1, 0)
    place = rows.column_names.index("prediction")
    pq.write_table(rows.set_column(place, "prediction", pa.array(logged, pa.float32())), tmp_path / "log.parquet")

    (model,) = replayed(tmp_path / "log.parquet", models / "1", folder=tmp_path)["models"]

    groups = model["differences"]["by_feature"]
    by_value = {(group["feature"], group["value"]): group for group in groups}
    german = by_value["country", "de"]
    assert german["samples"] == is_german.sum()
    assert german["mean_difference"] == pytest.approx(0.2 + 0.1 * has_tag[is_german].mean(), abs=1e-6)
    tagged = by_value["tags", "b"]
    assert tagged["mean_difference"] == pytest.approx(0.1 + 0.2 * is_german[has_tag].mean(), abs=1e-6)
    assert max(groups, key=lambda one: one["mean_difference"])["value"] == "de"
    prices = [group for group in groups if group["feature"] == "price"]
    assert all(price["samples"] == 30 for price in prices)  # quarters


@pytest.mark.parametrize("values", [[math.inf, 1.0], [*range(40), *[-math.inf] * 30, *[math.inf] * 50]])
def test_an_infinite_value_of_a_feature_is_named(models, rows, tmp_path, values):
    place = rows.column_names.index("price")
    prices = pa.array((values * rows.num_rows)[: rows.num_rows], pa.float32())
    of_price = {"name": "price", "kind": "bucketize", "boundaries": [1, 20]}
    others = [one | {"name": "score"} if one["kind"] == "dense" else one for one in FEATURES["features"]]
    pq.write_table(rows.set_column(place, "price", prices), tmp_path / "log.parquet")
    model = write_raw_model(tmp_path, features=FEATURES | {"features": [*others, of_price]})

    document = replayed(tmp_path / "log.parquet", model, folder=tmp_path)

    groups = [one["value"] for one in document["models"][0]["differences"]["by_feature"] if one["feature"] == "price"]
    assert any("inf" in str(value) for value in groups)
    assert not any("nan" in str(value) for value in groups)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_labels_are_joined_and_judge_the_answers(models, log, rows, tmp_path, kind):
    rng = np.random.default_rng(1)
    ones = rng.random(120) < rows["prediction"].to_numpy()
    labels = rows.select(["request_id", "request_sample"]).append_column("bought", pa.array(ones.astype(int)))
    shuffled = labels.slice(0, 100).take(pa.array(rng.permutation(100)))
    others = pa.table({"request_id": ["none", "r0"], "request_sample": [0, 7], "bought": [1, 1]})
    file = tmp_path / f"labels.{kind}"
    table = pa.concat_tables([shuffled, others.cast(shuffled.schema)])
    (pq.write_table if kind == "parquet" else pa_csv.write_csv)(table, file)

    options = ("--labels", file, "--on", PAIRS, "--label", "bought")
    document = replayed(log, models / "2", options=options, folder=tmp_path)

    scores, judged = rows["prediction"].to_numpy()[:100].astype(np.float64), ones[:100]
    pairs = scores[judged][:, None] - scores[~judged][None]
    figures = document["quality"]["bought"]
    assert figures["samples"] == document["labels"]["samples"] == 100
    assert figures["auc"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    assert figures["log_loss"] == pytest.approx(-np.log(np.where(judged, scores, 1 - scores)).mean(), abs=1e-6)
    assert len(figures["calibration"]) == 10
    assert document["models"][0]["quality"]["bought"]["auc"] != figures["auc"]


def test_labels_may_be_columns_of_the_log_and_null_is_no_label(models, rows, tmp_path):
    labels = pa.array([True, False, None] * 40)
    place = rows.column_names.index("country")
    categories = rows.set_column(place, "country", rows["country"].dictionary_encode())  # as pandas may write it
    pq.write_table(categories.append_column("clicked", labels), tmp_path / "log.parquet")

    document = replayed(tmp_path / "log.parquet", models / "1", options=("--label", "clicked"), folder=tmp_path)

    assert document["quality"]["clicked"]["samples"] == 80
    assert document["quality"]["clicked"]["ones"] == 0.5


def test_rows_whose_key_is_not_unique_are_left_out_and_counted(models, rows, tmp_path):
    ids = ["same", "same", *(f"r{number}" for number in range(118))]
    table = rows.set_column(0, "request_id", pa.array(ids))
    pq.write_table(table, tmp_path / "log.parquet")
    labels = pa.table({"request_id": ["same", *ids[2:20], "r0"], "clicked": [1] * 20})
    pq.write_table(labels, tmp_path / "labels.parquet")

    options = ("--labels", tmp_path / "labels.parquet", "--label", "clicked")
    document = replayed(tmp_path / "log.parquet", models / "1", options=options, folder=tmp_path)

    assert document["labels"]["samples"] == 17
    assert document["labels"]["ambiguous"] == 3


def test_the_stream_of_a_running_server_is_part_of_the_log(models, tmp_path, monkeypatch):
    monkeypatch.setattr("serving.request_log.writer._INTERVAL_S", 0.01)
    with hotrow.load_model(models / "1") as session, closing(RequestLog(tmp_path / "log", 1.0, 1 << 30)) as log:
        batch = session.read({"user": ["u"]})
        log.log(session, batch, session.predict_batch(batch), "a")
        while not list(tmp_path.rglob("*.arrow")) or not next(iter(log.readings())).value:
            pass
        document = replayed(tmp_path / "log" / "raw", models / "1", folder=tmp_path)

    assert document["log"]["requests"] == 1


def test_a_stream_that_becomes_a_parquet_file_after_the_folder_was_listed_is_read(models, log, tmp_path, monkeypatch):
    (file,) = log.glob("*.parquet")
    before = DataFiles((file.with_suffix(".arrow"),), {})
    monkeypatch.setattr("hotrow.replay.tables.list_data_files", lambda folder, suffixes: before)

    assert replayed(log, models / "1", folder=tmp_path)["log"]["requests"] == 40


def test_requests_with_keys_are_replayed(tmp_path):
    model = TinyModel()
    folder = model.write(tmp_path / "models")
    with hotrow.load_model(folder) as session, closing(RequestLog(tmp_path / "log", 1.0, 1 << 30)) as log:
        for seed in range(5):
            dense, bags = model.sample_requests(7, seed=seed)
            batch = read_batch(session.config, dense, *flatten(bags))
            log.log(session, batch, session.predict_batch(batch), "the same id")

    document = replayed(tmp_path / "log" / "tiny", folder, folder=tmp_path)

    assert document["log"]["requests"] == 5
    assert document["models"][0]["differences"]["largest_absolute"] == 0


def test_keys_are_not_read_as_the_raw_features_that_have_their_names(tmp_path):
    names, dense_names = ("user", "item", "id"), ("age", "price", "size")
    model = NamedModel(names=names, dense_names=dense_names)
    folder = model.write(tmp_path / "models", "named")
    features = [{"name": name, "kind": "hash", "type": "integer", "list": {}, "buckets": 9} for name in names]
    features[2]["shares"] = "item"
    features += [{"name": name, "kind": "dense", "log1p": True, "clip": [0, 1]} for name in dense_names]
    (folder / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    (folder / "manifest.json").unlink()
    with hotrow.load_model(folder) as session, closing(RequestLog(tmp_path / "log", 1.0, 1 << 30)) as log:
        dense, bags = model.sample_requests(7)
        batch = read_batch(session.config, dense, *flatten(bags))
        log.log(session, batch, session.predict_batch(batch), "k")

    document = replayed(tmp_path / "log" / "named.keys", folder, folder=tmp_path)

    assert document["models"][0]["differences"]["largest_absolute"] == 0


def test_a_request_that_a_version_refuses_is_counted_and_the_others_are_answered(rows, tmp_path, capsys):
    folder = write_raw_model(tmp_path / "models", max_batchsize=2)
    place = rows.column_names.index("seen")
    table = rows.set_column(place, "seen", pa.array([[5000] if row == 2 else [1] for row in range(rows.num_rows)]))
    pq.write_table(table.slice(0, 9), tmp_path / "log.parquet")

    (model,) = replayed(tmp_path / "log.parquet", folder, folder=tmp_path)["models"]

    assert model["refused"]["requests"] == 1
    assert model["differences"]["samples"] == 6
    assert "refused 1 requests; the first is request r0: seen of sample 2: value 0: " in capsys.readouterr().out


def test_requests_with_many_candidates_get_the_same_bits_again(tmp_path):
    folder = write_raw_model(tmp_path / "models", max_batchsize=8)
    with hotrow.load_model(folder) as session, closing(RequestLog(tmp_path / "log", 1.0, 1 << 30)) as log:
        for count in (3, 8, 9, 50):
            candidates = [{"user": f"u{number}", "price": number / 7} for number in range(count)]
            batch = session.read({"context": {"country": "de", "tags": ["a", "b"]}, "candidates": candidates})
            log.log(session, batch, session.predict_batch(batch), f"r{count}")

    document = replayed(tmp_path / "log" / "raw", folder, folder=tmp_path)

    assert document["log"] | {"path": "", "from": "", "to": "", "mean_prediction": 0} == {
        "path": "",
        "requests": 4,
        "samples": 70,
        "from": "",
        "to": "",
        "versions": {"1": 70},
        "mean_prediction": 0,
    }
    assert document["models"][0]["differences"]["samples"] == 70
    assert document["models"][0]["differences"]["largest_absolute"] == 0


def test_each_of_several_outputs_has_its_own_figures(tmp_path, capsys):
    folder, rng = write_towers(tmp_path / "models"), np.random.default_rng(0)
    with hotrow.load_model(folder) as session, closing(RequestLog(tmp_path / "log", 1.0, 1 << 30)) as log:
        for number in range(5):
            dense, keys = rng.random((3, 2), np.float32), rng.integers(0, 5, (3, 2))
            prediction = session.predict_batch(batch := read_batch(session.config, dense, keys, None))
            changed = dataclasses.replace(prediction, values=prediction.values + np.float32([0.125, -1.0, *[0] * 7]))
            log.log(session, batch, changed, f"r{number}")

    (model,) = replayed(tmp_path / "log" / "towers", folder, folder=tmp_path)["models"]

    means = {name: figures["mean"] for name, figures in model["outputs"].items()}
    assert means == pytest.approx(
        {"click": -0.125, "score": 1, "cosine": 0, "user_vector": 0, "item_vector": 0}, abs=1e-6
    )
    shown = capsys.readouterr().out
    assert re.search(r"mean size click +0\.1250\nmean prediction score ", shown)
    assert "mean prediction  " not in shown


@pytest.mark.parametrize("part_rows", [1, 2, 7, 40])
def test_a_log_that_is_read_in_parts_of_any_size_has_the_same_figures(models, rows, tmp_path, monkeypatch, part_rows):
    (tmp_path / "log").mkdir()
    for number, first in enumerate((0, 50, 51)):  # requests go on in the next file
        end = (50, 51, rows.num_rows)[number]
        pq.write_table(rows.slice(first, end - first), tmp_path / "log" / f"{number}.parquet", row_group_size=17)
    (tmp_path / "whole").mkdir()
    pq.write_table(rows, tmp_path / "whole" / "log.parquet")
    options = {"folder": tmp_path, "options": ("--labels", tmp_path / "labels.csv", "--on", PAIRS, "--label", "bought")}
    ones = pa.array(np.arange(rows.num_rows) % 3 == 0).cast(pa.int8())
    labels = rows.select(["request_id", "request_sample"]).append_column("bought", ones)
    pa_csv.write_csv(
        labels.take(pa.array(np.random.default_rng(0).permutation(rows.num_rows))), tmp_path / "labels.csv"
    )
    expected = replayed(tmp_path / "whole", models / "2", **options)

    monkeypatch.setattr("hotrow.replay.tables._PART_ROWS", part_rows)
    found = replayed(tmp_path / "log", models / "2", **options)

    for document in (found, expected):
        document["log"]["path"] = ""
        document["models"][0]["milliseconds"] = {}
    assert found == expected


def test_the_features_of_a_large_log_are_those_of_evenly_drawn_samples(models, log, tmp_path, monkeypatch):
    monkeypatch.setattr("hotrow.replay.tables._MOST_DRAWN", 80)

    (model,) = replayed(log, models / "2", folder=tmp_path)["models"]

    assert model["differences"]["samples"] == 120
    of_prices = [one["samples"] for one in model["differences"]["by_feature"] if one["feature"] == "price"]
    assert of_prices == [20, 20, 20]


def test_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("hotrow.replay.tables._PART_ROWS", 500)
    log = pa.table(
        {
            "request_id": pa.array([str(row // 300) for row in range(20_000)]),
            "request_sample": np.arange(20_000, dtype=np.int32) % 300,
            "user": pa.array([f"{row:09}" * 30 for row in range(20_000)]),
        }
    )
    pq.write_table(log, tmp_path / "log.parquet", row_group_size=500, use_dictionary=False)
    before = pa.total_allocated_bytes()
    requests, rows, most_bytes = 0, 0, 0

    for table in RequestRows(tmp_path / "log.parquet").requests(["user"]):
        requests, rows = requests + len(requests_of(table)) - 1, rows + table.num_rows
        most_bytes = max(most_bytes, pa.total_allocated_bytes() - before)

    assert (requests, rows) == (67, 20_000)
    assert most_bytes < log.nbytes / 2


def test_a_file_that_is_deleted_while_the_log_is_read_is_named(models, log, tmp_path, monkeypatch, capsys):
    (file,) = log.glob("*.parquet")
    copy = tmp_path / "log.parquet"
    copy.write_bytes(file.read_bytes())
    about = hotrow.replay.document._about
    monkeypatch.setattr(hotrow.replay.document, "_about", lambda *given: (about(*given), copy.unlink())[0])

    assert main(["replay", str(copy), str(models / "1")]) == 1
    assert "log.parquet: cannot be read: " in capsys.readouterr().err


def test_if_nothing_was_answered_the_figures_have_no_numbers(models, rows, tmp_path, capsys):
    table = rows.set_column(rows.column_names.index("seen"), "seen", pa.array([[-1]] * rows.num_rows))
    table = table.set_column(4, "prediction", pa.nulls(rows.num_rows, pa.float32())).append_column(
        "clicked", pa.array([1] * rows.num_rows)
    )
    pq.write_table(table, tmp_path / "log.parquet")
    options = ("--label", "clicked", "--plot", tmp_path / "replay.png")

    document = replayed(tmp_path / "log.parquet", models / "1", options=options, folder=tmp_path)

    (model,) = document["models"]
    assert (model["mean_prediction"], model["differences"], model["milliseconds"]) == (None, {"samples": 0}, {})
    assert document["log"]["mean_prediction"] is None
    assert "refused 40 requests; the first is request r0: seen of sample 0: value 0: " in capsys.readouterr().out


def test_a_feature_that_the_log_does_not_have_is_missing_and_reported(models, rows, tmp_path, capsys):
    pq.write_table(rows.drop_columns(["country", "member"]), tmp_path / "log.parquet")

    (model,) = replayed(tmp_path / "log.parquet", models / "1", folder=tmp_path)["models"]

    assert model["absent_features"] == ["country", "member"]
    assert model["differences"]["largest_absolute"] > 0
    assert "the log has no country, member, so replay treats it as missing" in capsys.readouterr().out


def test_a_picture_is_drawn(models, rows, tmp_path):
    pq.write_table(rows.append_column("clicked", pa.array([0, 1] * 60)), tmp_path / "log.parquet")
    options = ("--label", "clicked", "--plot", tmp_path / "replay.svg")

    replayed(tmp_path / "log.parquet", models / "1", models / "2", options=options, folder=tmp_path)

    assert (tmp_path / "replay.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none", "MODEL"], "none: no such file or folder"),
        (["EMPTY", "MODEL"], "the folder has no files *.parquet: 0 of 0 entries are data files"),
        (["ROOT", "MODEL"], "the folder has no files *.parquet; expected the folder of one model: "),
        (["LABELS", "MODEL"], "is not a request log: it has no column 'request_id', only id, clicked, word"),
        (["OTHER", "MODEL"], "has no feature of raw version 1"),
        (["DAMAGED", "MODEL"], "damaged.parquet: cannot be read: "),
        (
            ["LOG", "MODEL", "--labels", "TWICE", "--label", "clicked"],
            "twice.csv: the columns make no table: ",
        ),
        (["LOG", "none"], "none: no such file or folder"),
        (["LOG", "MODEL", "--on", "request_id"], "--on: needs --labels"),
        (["LOG", "MODEL", "--labels", "LABELS"], "--labels: needs --label, the column of the label"),
        (["LOG", "MODEL", "--label", "clicked"], "has no column 'clicked'"),
        (["LOG", "MODEL", "--label", "country"], "country: expected numbers, got string"),
        (["LOG", "MODEL", "--label", "price"], "price: expected 0 or 1, got "),
        (["LOG", "MODEL", "--label", "seen", "--label", "seen"], "seen: expected numbers, got list"),
        (["LOG", "MODEL", "--labels", "LABELS", "--label", "clicked"], "has no column 'request_id' to join on"),
        (
            ["LOG", "MODEL", "--labels", "LABELS", "--label", "clicked", "--on", "word"],
            "has no column 'word' to join on",
        ),
        (["LOG", "MODEL", "--plot", "replay.gif"], "--plot: expected a file that ends in .svg, .png, .pdf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_replayed_is_refused(models, log, rows, tmp_path, capsys, arguments, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1damaged")
    pq.write_table(pa.table({"id": ["a"], "clicked": [1], "word": ["x"]}), tmp_path / "labels.parquet")
    pq.write_table(rows.select(["request_id", "request_sample", "prediction"]), tmp_path / "other.parquet")
    (tmp_path / "twice.csv").write_text("request_id,clicked,clicked\nr0,1,1\n")
    paths = {
        "LOG": log,
        "TWICE": tmp_path / "twice.csv",
        "ROOT": log.parent,
        "MODEL": models / "1",
        "EMPTY": tmp_path / "empty",
        "LABELS": tmp_path / "labels.parquet",
        "OTHER": tmp_path / "other.parquet",
        "DAMAGED": tmp_path / "damaged.parquet",
    }

    assert main(["replay", *(str(paths.get(word, word)) for word in arguments)]) == 1
    assert reason in capsys.readouterr().err


def test_a_file_for_the_figures_that_cannot_be_written_is_refused(models, log, tmp_path, capsys):
    assert main(["replay", str(log), str(models / "1"), "--json", str(tmp_path / "none" / "x.json")]) == 1
    assert "x.json: cannot be written: no such file or directory" in capsys.readouterr().err


def test_a_server_without_a_log_needs_no_pyarrow_and_a_replay_needs_no_pytorch():
    program = (
        "import sys, serving.cli.serve, serving.frontend.front_end, serving.request_log\n"
        "assert 'pyarrow' not in sys.modules\n"
        "import hotrow.replay.skew, hotrow.replay.document, hotrow.replay.report\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
