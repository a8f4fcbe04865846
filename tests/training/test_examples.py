import json
import re
import runpy
import sys
from pathlib import Path

from serving.config import read_ps_config
from training.criteo_reader import read_criteo

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


def test_the_example_writes_a_criteo_file(tmp_path, monkeypatch):
    run(monkeypatch, "write_criteo_file.py", tmp_path / "raw.txt", 1000, 3)

    assert len(read_criteo(tmp_path / "raw.txt")) == 1000


def test_the_repository_in_the_source_tree_has_tiers_and_no_model(tmp_path):
    path = ROOT / "model_repository" / "ps.json"

    read_ps_config(path)
    assert json.loads(path.read_text())["models"] == []
