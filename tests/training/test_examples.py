import gzip
import io
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from serving.config import read_ps_config
from training.built_in import built_in_graphs
from training.data.criteo import COLUMNS, write_lines
from training.data.criteo_reader import read_criteo
from training.data.npz import read_npz
from training.model.document import open_document
from training.synthetic.criteo_like import generate
from training.synthetic.generator import generate_for

ROOT = Path(__file__).parents[2]


def run(monkeypatch, script, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")


def test_the_example_trains_and_predicts(tmp_path, monkeypatch, capsys):
    run(monkeypatch, "train_and_predict.py", tmp_path)

    output = capsys.readouterr().out
    best, reached = (float(value) for value in re.findall(r"AUC ([\d.]+)", output))
    assert 0.65 < reached < best
    assert len(re.findall(r"click probability 0\.\d+", output)) == 2
    assert output.endswith("defaulted_keys 0 of 52\n")


@pytest.fixture(scope="module")
def demo():
    """The functions of the demo."""
    return runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="demo")


def test_the_example_request_has_values_that_training_sees(demo):
    [samples] = json.loads((ROOT / "examples" / "request.json").read_text()).values()
    trained = demo["raw_rows"](generate(20_000, seed=0)).slice(0, 18_000).to_pydict()

    for sample in samples:
        assert sample.keys() == trained.keys() - {"label"}
        assert all(value in trained[name] for name, value in sample.items())


@pytest.mark.parametrize("form", ["raw", "raw.gz", "csv", "csv with a header"])
def test_the_demo_reads_criteos_files_as_they_are(demo, tmp_path, form):
    data = generate(50, seed=3)
    text = io.StringIO()
    write_lines(text, data.samples, data.counts)
    content = text.getvalue()
    if form.startswith("csv"):
        names = ",".join(reversed(COLUMNS)) + "\n"
        rows = [",".join(reversed(line.split("\t"))) for line in content.splitlines()]
        content = names + "\n".join(rows) if "header" in form else content.replace("\t", ",")
    path = tmp_path / form.replace(" ", "_")
    path.write_bytes(gzip.compress(content.encode()) if form.endswith("gz") else content.encode())

    batches = list(demo["criteo_batches"](path))

    assert pa.Table.from_batches(batches).to_pydict() == demo["raw_rows"](data).to_pydict()


def test_the_demo_reads_counts_that_are_floats(demo, tmp_path):
    """As pandas writes a column of integers with a missing value."""
    (tmp_path / "clicks.csv").write_text(",".join(COLUMNS) + "\n0,260.0" + "," * 38 + "\n")

    [batch] = demo["criteo_batches"](tmp_path / "clicks.csv")

    assert batch.to_pylist() == [{**dict.fromkeys(COLUMNS), "label": 0, "I1": 260}]


def test_the_demo_names_a_file_that_it_cannot_read(demo, tmp_path):
    (tmp_path / "odd.txt").write_text("0" + "\tx" * 39 + "\n")
    for name, reason in (("odd.txt", "CSV conversion error to double"), ("no.txt", "No such file")):
        with pytest.raises(SystemExit) as stopped:
            list(demo["criteo_batches"](tmp_path / name))
        assert f"{tmp_path / name}: " in str(stopped.value)
        assert reason in str(stopped.value)


def test_the_help_of_the_example_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "train_and_predict.py", "--help")

    assert stopped.value.code == 0
    assert "usage: train_and_predict.py" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


def test_the_example_writes_a_criteo_file(tmp_path, monkeypatch):
    run(monkeypatch, "write_criteo_file.py", tmp_path / "raw.txt", 1000, 3)

    assert len(read_criteo(tmp_path / "raw.txt")) == 1000


@pytest.mark.parametrize("model", built_in_graphs())
def test_the_example_writes_the_arrays_that_a_model_reads(tmp_path, monkeypatch, capsys, model):
    run(monkeypatch, "write_npz_file.py", model, tmp_path / "train.npz", 100, 3)

    document = open_document(model)
    [read], written = read_npz(tmp_path / "train.npz", document), generate_for(document.graph, 100, seed=3).samples
    np.testing.assert_array_equal(read.labels, written.labels)
    np.testing.assert_array_equal(read.dense, written.dense)
    np.testing.assert_array_equal(read.bags.keys, written.bags.keys)
    np.testing.assert_array_equal(read.bags.row_ptrs, written.bags.row_ptrs)
    assert f"hotrow train --model {model} --data {tmp_path / 'train.npz'}" in capsys.readouterr().out


def test_the_repository_in_the_source_tree_has_tiers_and_no_model(tmp_path):
    path = ROOT / "model_repository" / "ps.json"

    read_ps_config(path)
    assert json.loads(path.read_text())["models"] == []
