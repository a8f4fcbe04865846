"""The GPU benchmark runs on small input and gets right answers, on the runner and on a GPU."""

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_it_runs_on_small_input(device, tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", device.name, "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["records"]
    assert result["failures"] == []
