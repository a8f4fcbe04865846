"""The load test runs, and a small server passes it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_few_seconds_of_load_without_a_failure(served, tmp_path):
    options = ["--model", "tiny", "--host", served.url, "--headless", "-u", "4", "-r", "4", "-t", "3s"]
    reports = ["--csv", str(tmp_path / "load"), "--only-summary", "--exit-code-on-error", "1"]
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py"), *options, *reports]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "load_stats.csv").read_text().splitlines()))
    (infer,) = (row for row in rows if row["Name"] == "/v2/models/tiny/infer")
    assert int(infer["Request Count"]) > 0  # a benchmark measures how many
    assert int(infer["Failure Count"]) == 0
