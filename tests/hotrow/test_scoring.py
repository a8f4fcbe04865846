"""``hotrow predict --data``: the predictions of a file, as a session gives them."""

import json
import os
import random
import resource
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

import hotrow
import hotrow.scoring
from hotrow.partial_output import open_partial_output
from serving.cli.main import main
from serving.errors import OutputError
from tests.tools.raw_model import write_raw_model
from tests.tools.warm import Warm
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
    written = f"300 predictions written to {folder}/scores.parquet, in place of an earlier file\n"
    assert capsys.readouterr().out == written
    pq.write_table(found.append_column("rank", pa.array(range(ROWS))), folder / "scores.parquet")
    assert predict(folder, data, "scores.parquet") == 1
    assert "scores.parquet: exists, and `hotrow predict` did not write it" in capsys.readouterr().err
    (folder / "scores.parquet").unlink()


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
        ("clicks.csv", "folder.parquet", "folder.parquet: is a folder; name a file"),
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
    (folder / "folder.parquet").mkdir(exist_ok=True)
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


def rows_of(count):
    """Rows of the model that ``write_raw_model`` writes."""
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "id": np.arange(count) + 1000,
            "user": [f"u{user}" for user in rng.integers(0, 50, count)],
            "country": rng.choice(["de", "fr", "xx"], count),
            "tags": [["a", "b"][:size] for size in rng.integers(0, 3, count)],
            "seen": [[1, 2]] * count,
            "member": [True] * count,
            "price": rng.random(count),
        }
    )


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """A model, data, and the output of a run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("items")
    write_raw_model(folder, "dcn", max_batchsize=7)
    pq.write_table(rows_of(ROWS), folder / "items.parquet", row_group_size=33)
    assert predict(folder, "items.parquet", "scores.parquet", "--keep", "id") == 0
    return folder


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr("hotrow.scoring._ROWS_AT_ONCE", 50)


@pytest.fixture
def stopped(items, tmp_path, small_steps, monkeypatch):
    """The model and the data in a folder of their own, with the partial output of a run that nearly finished."""
    for name in ("dcn", "items.parquet"):
        (tmp_path / name).symlink_to(items / name)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hotrow.scoring._write", stop)
        assert predict(tmp_path, "items.parquet", "scores.parquet", "--keep", "id")
    return tmp_path


def test_kept_columns_are_next_to_the_predictions(items):
    found = pq.read_table(items / "scores.parquet")

    assert found.column_names == ["id", "prediction"]
    assert found["id"].to_pylist() == [*range(1000, 1000 + ROWS)]
    assert pq.read_metadata(items / "scores.parquet").num_row_groups == 1


def test_kept_columns_of_a_folder_of_csv_files_are_texts(folder, tmp_path):
    lines = (folder / "clicks.csv").read_text().splitlines(keepends=True)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "0.csv").write_text("".join(lines[:100]))
    (tmp_path / "parts" / "1.csv").write_text("".join([lines[0], *lines[100:]]))
    output = tmp_path / "scores.parquet"
    options = ["--data", str(tmp_path / "parts"), "--output", str(output), "--keep", "user,clicked"]

    assert main(["predict", str(folder / "dcn"), *options]) == 0
    clicks, found = pq.read_table(folder / "clicks.parquet"), pq.read_table(output)
    assert found["user"].to_pylist() == clicks["user"].to_pylist()
    assert found["clicked"].to_pylist() == [str(clicked) for clicked in clicks["clicked"].to_pylist()]


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        ("idd", "items.parquet column idd: missing; the file has id, user, country"),
        ("id,id", "--keep: the output would have two columns 'id'"),
        ("prediction", "--keep: the output would have two columns 'prediction'"),
        (",", "expected names of columns, got ','"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused(items, tmp_path, capsys, keep, text):
    try:
        code = predict(items, "items.parquet", str(tmp_path / "new.parquet"), "--keep", keep)
    except SystemExit as err:
        code = err.code
    assert code
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_column_with_different_types_in_different_files_cannot_be_kept(items, tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    table = rows_of(9)
    pq.write_table(table, tmp_path / "parts" / "0.parquet")
    pq.write_table(table.set_column(0, "id", pa.array(["x"] * 9)), tmp_path / "parts" / "1.parquet")

    assert predict(items, str(tmp_path / "parts"), str(tmp_path / "new.parquet"), "--keep", "id") == 1
    assert "parts: a column of --keep has different types: " in capsys.readouterr().err


def test_what_a_kill_at_any_moment_leaves_is_completed(stopped, items, caplog):
    partial, output = stopped / "scores.parquet.partial", stopped / "scores.parquet"
    content, expected = partial.read_bytes(), pq.read_table(items / "scores.parquet")
    chosen = random.Random(0)
    has_gone_on = set()
    for size in (len(content), len(content) - 1, *(chosen.randrange(400, len(content)) for _ in range(4))):
        partial.write_bytes(content[:size])
        output.unlink(missing_ok=True)
        assert predict(stopped, "items.parquet", "scores.parquet", "--keep", "id") == 0
        found = pq.read_table(output)
        assert found["id"].equals(expected["id"])
        np.testing.assert_allclose(found["prediction"], expected["prediction"], atol=1e-6)
        assert not partial.exists()
        has_gone_on.add("predictions; only the others are computed" in caplog.text)
        caplog.clear()
    assert has_gone_on == {True, False}


def test_rows_that_are_there_are_not_computed_again(stopped, monkeypatch, caplog):
    read, computed = hotrow.scoring.read_columns, []

    def counted(*arguments, **options):
        for part in read(*arguments, **options):
            computed.append(len(part))
            yield part

    monkeypatch.setattr("hotrow.scoring.read_columns", counted)
    assert predict(stopped, "items.parquet", "scores.parquet") == 0
    found = int(caplog.text.split("partial has ")[1].split()[0])
    assert found >= ROWS - 2 * 50
    assert sum(computed) == ROWS - found


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_has_the_same_output(items, tmp_path, kills):
    pq.write_table(pa.concat_tables([rows_of(ROWS)] * 20), tmp_path / "many.parquet", row_group_size=1000)
    chosen, output = random.Random(1), tmp_path / "scores.parquet"
    options = ["predict", str(items / "dcn"), "--data", "many.parquet", "--output", "scores.parquet", "--keep", "id"]
    program = (
        "import hotrow.scoring, sys\nfrom serving.cli.main import main\n"
        f"hotrow.scoring._ROWS_AT_ONCE = 100\nprint('begins', flush=True)\nsys.exit(main({options}))"
    )
    for _ in range(kills):
        with Warm("-c", program, cwd=tmp_path) as process:
            assert process.stdout.readline() == "begins\n"
            time.sleep(chosen.uniform(0.01, 0.4))  # the moment of the kill
            process.send_signal(signal.SIGKILL)
        assert not output.exists() or len(pq.read_table(output)) == 20 * ROWS
    with Warm("-c", program, cwd=tmp_path) as process:
        process.communicate()
    found, expected = pq.read_table(output), pq.read_table(items / "scores.parquet")
    assert found["id"].to_pylist() == expected["id"].to_pylist() * 20
    np.testing.assert_allclose(found["prediction"], np.tile(expected["prediction"], 20), atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.parquet", "scores.parquet"]


def test_a_full_disk_keeps_the_rows_before_it(items, tmp_path, small_steps, capsys, caplog):
    arguments = [items, str(items / "items.parquet"), str(tmp_path / "scores.parquet"), "--keep", "id"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        assert predict(*arguments) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "scores.parquet: cannot be written: file too large" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet.partial"]
    assert predict(*arguments) == 0
    assert "predictions; only the others are computed" in caplog.text
    np.testing.assert_allclose(
        pq.read_table(tmp_path / "scores.parquet")["prediction"],
        pq.read_table(items / "scores.parquet")["prediction"],
        atol=1e-6,
    )


def test_an_output_that_cannot_be_written_is_refused(items, capsys):
    assert predict(items, "items.parquet", "/proc/scores.parquet") == 1
    assert "/proc/scores.parquet: cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("change", ["grown", "other times", "other model"])
def test_rows_of_other_data_or_another_model_are_not_mixed(stopped, items, capsys, change):
    partial = stopped / "scores.parquet.partial"
    before = partial.read_bytes()
    if change == "other model":
        (stopped / "dcn").unlink()
        write_raw_model(stopped, "dcn", seed=1)
    else:
        (stopped / "items.parquet").unlink()
        pq.write_table(rows_of(ROWS + (change == "grown")), stopped / "items.parquet")

    assert predict(stopped, "items.parquet", "scores.parquet") == 1
    what = "model" if change == "other model" else "data"
    assert f"predictions of an earlier run, but the {what} changed since; delete this file" in capsys.readouterr().err
    assert partial.read_bytes() == before
    partial.unlink()
    assert predict(stopped, "items.parquet", "scores.parquet") == 0


def test_data_that_changes_while_it_is_read_gives_no_output(stopped, monkeypatch, capsys):
    data, write = stopped / "items.parquet", hotrow.scoring._write

    def change(*arguments):
        write(*arguments)
        os.utime(data, ns=(0, 1))

    content = data.read_bytes()
    data.unlink()
    data.write_bytes(content)
    (stopped / "scores.parquet.partial").unlink()
    monkeypatch.setattr("hotrow.scoring._write", change)
    assert predict(stopped, "items.parquet", "scores.parquet") == 1
    assert "items.parquet: changed while it was read; delete " in capsys.readouterr().err
    assert not (stopped / "scores.parquet").exists()


@pytest.mark.parametrize("content", [b"notes", pa.schema([("x", pa.int64())]).serialize().to_pybytes()])
def test_a_partial_file_of_another_program_stays(items, tmp_path, capsys, content):
    partial = tmp_path / "scores.parquet.partial"
    partial.write_bytes(content)

    assert predict(items, "items.parquet", str(tmp_path / "scores.parquet"), "--overwrite") == 1
    assert "partial: exists, and `hotrow predict` did not write it" in capsys.readouterr().err
    assert partial.read_bytes() == content


def test_two_runs_do_not_write_the_same_output(stopped):
    schema = pa.schema([("prediction", pa.float32())])
    with (
        open_partial_output(stopped / "a.partial", schema, {}),
        pytest.raises(OutputError, match=r"a\.partial: another `hotrow predict` writes this file"),
        open_partial_output(stopped / "a.partial", schema, {}),
    ):
        pass


def test_a_run_that_fails_before_it_has_rows_leaves_nothing(folder, tmp_path):
    (tmp_path / "wrong.csv").write_text("clicked,user,price\n0,u1,free\n")

    assert predict(folder, str(tmp_path / "wrong.csv"), str(tmp_path / "scores.parquet")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.csv"]


def test_data_without_rows_gives_an_output_without_rows(items, tmp_path):
    pq.write_table(rows_of(0), tmp_path / "none.parquet")

    assert predict(items, str(tmp_path / "none.parquet"), str(tmp_path / "scores.parquet"), "--keep", "id") == 0
    assert pq.read_table(tmp_path / "scores.parquet").column_names == ["id", "prediction"]


class Towers(torch.nn.Module):
    """A two-tower model: a score, and the vectors whose dot product it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = torch.nn.Embedding(50, 8), torch.nn.Embedding(400, 8)
        self.of_user, self.of_item = torch.nn.Linear(9, 5), torch.nn.Linear(9, 5)

    def forward(self, user, age, item, price):
        user_vector = self.of_user(torch.cat([self.users(user), age[:, None]], dim=1))
        item_vector = self.of_item(torch.cat([self.items(item), price[:, None]], dim=1))
        return {"score": (user_vector * item_vector).sum(dim=1), "user_vector": user_vector, "item_vector": item_vector}


@pytest.fixture(scope="module")
def towers(exporter, tmp_path_factory):
    """A module, a folder with its version, and the rows of 300 items."""
    folder, module = tmp_path_factory.mktemp("towers"), Towers()
    example = {
        "user": torch.tensor([1]),
        "age": torch.tensor([0.5]),
        "item": torch.tensor([2]),
        "price": torch.tensor([0.5]),
    }
    kinds = {"score": "score", "user_vector": "vector", "item_vector": "vector"}
    hotrow.from_torch(module, example, folder, "towers", outputs=kinds, max_batchsize=64)
    rng = np.random.default_rng(0)
    items = {"item": rng.permutation(400)[:ROWS], "price": rng.random(ROWS).astype(np.float32)}
    pq.write_table(pa.table(items), folder / "items.parquet", row_group_size=77)
    return module, folder, items


def test_vectors_of_items_need_no_user(towers):
    module, folder, items = towers
    options = ["--outputs", "item_vector", "--without", "user,age", "--keep", "item"]

    assert predict(folder, "items.parquet", "vectors.parquet", *options, model="towers") == 0

    found = pq.read_table(folder / "vectors.parquet")
    assert found.schema.types == [pa.int64(), pa.list_(pa.float32(), 5)]
    assert found.column_names == ["item", "item_vector"]
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    given = [torch.from_numpy(items[name]) for name in ("item", "price")]
    with torch.inference_mode():
        expected = module(zeros, zeros.float(), *given)["item_vector"].numpy()
    np.testing.assert_allclose(np.stack(found["item_vector"].to_numpy()), expected, atol=1e-5)


def test_without_a_choice_the_file_has_all_outputs(towers):
    module, folder, items = towers
    rows = items | {"user": np.arange(ROWS) % 50, "age": np.full(ROWS, 0.25, np.float32)}
    pq.write_table(pa.table(rows), folder / "pairs.parquet")

    assert predict(folder, "pairs.parquet", "all.parquet", model="towers") == 0

    found = pq.read_table(folder / "all.parquet")
    assert found.column_names == ["prediction_score", "user_vector", "item_vector"]
    with torch.inference_mode():
        expected = module(*(torch.from_numpy(rows[name]) for name in ("user", "age", "item", "price")))["score"]
    np.testing.assert_allclose(found["prediction_score"].to_numpy(), expected.numpy(), atol=1e-5)


def test_rows_of_other_options_are_not_mixed(towers, small_steps, monkeypatch, capsys):
    _, folder, _ = towers

    def stop(*_):
        raise KeyboardInterrupt

    options = ["--outputs", "item_vector", "--keep", "item", "--without"]
    with monkeypatch.context() as patch:
        patch.setattr("hotrow.scoring._write", stop)
        assert predict(folder, "items.parquet", "mixed.parquet", *options, "user,age", model="towers")

    assert predict(folder, "items.parquet", "mixed.parquet", *options, "user", model="towers") == 1
    assert "predictions of an earlier run, but the options changed since" in capsys.readouterr().err
    assert predict(folder, "items.parquet", "mixed.parquet", *options, "user,age", model="towers") == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--outputs", "item_vectr"], "the model has no output 'item_vectr'; it has "),
        (["--outputs", "score,score"], "output 'score' is requested twice"),
        (
            ["--outputs", "score", "--without", "user,age"],
            "--without: 'age' cannot be left out, because 'score' depends on it; choose others with --outputs",
        ),
        (["--outputs", "score", "--without", "user"], "--without: 'user' cannot be left out, because 'score' depends"),
        (["--without", "usr"], "--without: the model has no feature or named input 'usr'; did you mean 'user'?"),
        (
            [],
            "items.parquet column age: missing; the file has item, price. If no output depends on it: hotrow predict "
            "--without age",
        ),
        (
            ["--outputs", "item_vector", "--without", "user,age", "--keep", "item_vector"],
            "--keep: the output would have two columns 'item_vector'",
        ),
    ],
)
def test_outputs_and_inputs_that_the_model_does_not_have_are_refused(towers, capsys, options, text):
    _, folder, _ = towers
    assert predict(folder, "items.parquet", "new.parquet", *options, model="towers") == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--keep", "a"], ["--outputs", "a"], ["--without", "a"], ["--overwrite"]])
def test_options_of_files_need_a_file(option, capsys):
    with pytest.raises(SystemExit):
        main(["predict", "m", "f", *option])
    assert f"{option[0]} needs --data and --output" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [0, 1])
def test_a_partial_file_without_durable_rows_is_begun_again_for_other_data(items, tmp_path, rows):
    schema = pa.schema([("prediction", pa.float32())], {"hotrow.predictions": "{}"})
    batch = pa.record_batch([pa.array([0.5], pa.float32())], schema=schema)
    content = schema.serialize().to_pybytes() + batch.serialize().to_pybytes() * rows
    for content_now in (content, b""):
        (tmp_path / "scores.parquet.partial").write_bytes(content_now)
        assert predict(items, "items.parquet", str(tmp_path / "scores.parquet")) == 0
        found = pq.read_table(tmp_path / "scores.parquet")
        assert found["prediction"].equals(pq.read_table(items / "scores.parquet")["prediction"])
