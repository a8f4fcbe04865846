import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from serving.config import read_ps_config
from training.built_in import built_in_graphs
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


def test_the_example_request_asks_for_keys_that_training_sees():
    [samples] = json.loads((ROOT / "examples" / "request.json").read_text()).values()
    trained = generate(20_000, seed=0).samples.bags.keys

    assert np.isin([key for sample in samples for slot in sample["keys"] for key in slot], trained).all()


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
