"""``hotrow predict --data``: the predictions of a file, as a session gives them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import hotrow
from serving.cli.main import main
from tests.training.command.running import hotrow_train

ROWS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoring")
    rng = np.random.default_rng(0)
    rows = pa.table(
        {
            "clicked": rng.integers(0, 2, ROWS),
            "user": [f"u{user}" for user in rng.integers(0, 9, ROWS)],
            "price": pa.array(rng.random(ROWS), mask=rng.random(ROWS) < 0.1),
        }
    )
    pq.write_table(rows, folder / "clicks.parquet", row_group_size=70)
    pa_csv.write_csv(rows, folder / "clicks.csv")
    features = [{"name": "user", "kind": "hash", "buckets": 50}, {"name": "price", "kind": "dense", "missing": 0}]
    (folder / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    options = ["--features", str(folder / "features.json"), "--label", "clicked", "--output", str(folder)]
    assert hotrow_train(["--data", str(folder / "clicks.parquet"), *options]) == 0
    assert hotrow_train(["--synthetic", "200", "--model", "mmoe", "--output", str(folder)]) == 0
    return folder


def predict(folder, data, output, *options, model="dcn"):
    paths = ["--data", str(folder / data), "--output", str(folder / output)]
    return main(["predict", str(folder / model), *paths, *options])


@pytest.mark.parametrize("data", ["clicks.parquet", "clicks.csv"])
def test_the_predictions_are_those_of_a_session_in_the_order_of_the_rows(folder, data, capsys):
    assert predict(folder, data, "scores.parquet") == 0
    assert capsys.readouterr().out == f"300 predictions written to {folder}/scores.parquet\n"
    found = pq.read_table(folder / "scores.parquet")
    with hotrow.load_model(folder / "dcn") as session:
        expected = session.predict(pq.read_table(folder / "clicks.parquet").drop_columns("clicked"))
    assert found.column_names == ["prediction"]
    assert found["prediction"].to_numpy().tolist() == pytest.approx(expected[:, 0].tolist(), abs=1e-6)
    assert predict(folder, data, "scores.parquet") == 0  # its own output is replaced


def test_a_model_of_keys_reads_columns_by_the_names_of_its_inputs(folder):
    rows = {"dense_0": [0.5, 1.0], "dense_1": [0.0, 2.0], "history": [[1, 2], []]}
    pq.write_table(
        pa.table({**rows, **{f"profile_{slot}": [slot, None] for slot in range(3)}}), folder / "keys.parquet"
    )
    assert predict(folder, "keys.parquet", "two.parquet", model="mmoe") == 0
    with hotrow.load_model(folder / "mmoe") as session:
        labels = session.graph.label_names or ("0", "1")
    assert pq.read_table(folder / "two.parquet").column_names == [f"prediction_{label}" for label in labels]


def test_a_wrong_value_is_named_and_the_output_stays(folder, capsys):
    assert predict(folder, "clicks.parquet", "kept.parquet") == 0
    before = (folder / "kept.parquet").read_bytes()
    lines = (folder / "clicks.csv").read_text().splitlines()
    (folder / "wrong.csv").write_text("\n".join([*lines[:-1], '0,"u1",free']) + "\n")
    assert predict(folder, "wrong.csv", "kept.parquet") == 1
    assert "wrong.csv line 301 column price: expected a number, got 'free'" in capsys.readouterr().err
    assert (folder / "kept.parquet").read_bytes() == before
    assert not list(folder.glob(".*tmp*"))


@pytest.mark.parametrize(
    ("data", "output", "text"),
    [
        ("clicks.parquet", "scores.csv", "scores.csv: expected a file that ends in .parquet"),
        ("clicks.parquet", "absent/scores.parquet", "absent: no such folder"),
        ("clicks.csv", "clicks.parquet", "clicks.parquet: exists, and `hotrow predict` did not write it; --overwrite"),
        ("clicks.parquet", "clicks.parquet", "clicks.parquet: is part of the data; name another file"),
        ("", "new.parquet", "new.parquet: is part of the data; name another file"),
        ("absent.parquet", "new.parquet", "absent.parquet: "),
        ("features.json", "new.parquet", "features.json: expected a Parquet or CSV file"),
        (
            "renamed.parquet",
            "new.parquet",
            "renamed.parquet column user: missing; the file has clicked, users, price; did",
        ),
    ],
)
def test_data_and_outputs_that_cannot_be_used_are_refused(folder, capsys, data, output, text):
    renamed = pq.read_table(folder / "clicks.parquet").rename_columns(["clicked", "users", "price"])
    pq.write_table(renamed, folder / "renamed.parquet")
    assert predict(folder, data, output) == 1
    assert text in capsys.readouterr().err


def test_what_a_killed_run_left_behind_is_removed(folder):
    (folder / ".scores.parquet.0123abcd.tmp").write_bytes(b"PAR1")
    assert predict(folder, "clicks.csv", "scores.parquet") == 0
    assert not list(folder.glob(".scores.parquet*"))


def test_another_programs_file_is_replaced_if_asked_for(folder):
    (folder / "other.parquet").write_bytes(b"notes")
    assert predict(folder, "clicks.csv", "other.parquet") == 1
    assert predict(folder, "clicks.csv", "other.parquet", "--overwrite") == 0
    assert pq.read_table(folder / "other.parquet").num_rows == ROWS


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "the following arguments are required: FILE"),
        (["--output", "b"], "the following arguments are required: FILE"),
        (["--data", "a"], "expected FILE, the samples for a server, or --data and --output"),
        (["f", "--data", "a", "--output", "b"], "expected FILE, the samples for a server, or --data and --output"),
        (["f", "--output", "b"], "expected FILE, the samples for a server, or --data and --output"),
    ],
)
def test_a_command_line_without_samples_or_data_is_refused(options, text, capsys):
    with pytest.raises(SystemExit):
        main(["predict", "m", *options])
    assert text in capsys.readouterr().err
