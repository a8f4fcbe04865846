import json
import sys

from benchmarks import tensorflow_lookup


def test_the_benchmark_runs_on_small_input(fresh, tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["tensorflow_lookup", "--quick", "--json", str(file)])
    monkeypatch.setattr(tensorflow_lookup, "TABLES", 2)

    tensorflow_lookup.main()

    assert [load["name"] for load in json.loads(file.read_text())["records"]] == [
        "tensorflow_lookup.dynamic",
        "tensorflow_lookup.variable",
    ]
