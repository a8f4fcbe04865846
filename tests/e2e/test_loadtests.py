"""Short load tests of real servers, without a failed request."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.tiny_model import NamedModel

ROOT = Path(__file__).parents[2]


def load(*options):
    """Run the command of docs/loadtests.md."""
    command = [sys.executable, "-m", "loadtests", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def rows(file):
    return list(csv.DictReader(file.read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "protocol"),
    [
        ("steady", "grpc"),
        pytest.param("ramp", "http", marks=pytest.mark.long),
        pytest.param("spike", "grpc", marks=pytest.mark.long),
        pytest.param("soak", "http", marks=pytest.mark.long),
    ],
)
def test_a_scenario_runs_against_a_server_of_its_own(repository, tmp_path, scenario, protocol):
    chosen = ["--model", "tiny", "--scenario", scenario, "--protocol", protocol, "--output", tmp_path]

    done = load(repository, *chosen, "-u", "4", "-t", "1s", "--unknown", "0.25")

    assert done.returncode == 0, done.stderr
    report = tmp_path / f"{scenario}_{protocol}"
    assert '"history": [{"' in report.with_suffix(".html").read_text()  # the points of the charts
    *_, total = rows(Path(f"{report}_stats.csv"))
    assert int(total["Request Count"]) > 0
    assert int(total["Failure Count"]) == 0
    keys, unknown = re.search(r"server: ([\d,]+) keys looked up, ([\d.]+) % of them unknown", done.stdout).groups()
    assert int(keys.replace(",", "")) >= int(total["Request Count"]) * 64 * 3  # samples and slots
    assert float(unknown) == pytest.approx(25, abs=2)


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_have_one_user_and_many_candidates(tmp_path, protocol):
    names = ("user", "history", "city", "shown")
    NamedModel(tables={"t": 4}, names=names, dense_names=("x", "y", "z")).write(tmp_path / "models", "named")
    options = ["--scenario", "candidates", "--protocol", protocol, "--output", tmp_path, "-u", "2", "-t", "1s"]

    done = load(tmp_path / "models", *options)

    assert done.returncode == 0, done.stderr
    *_, total = rows(tmp_path / f"candidates_{protocol}_stats.csv")
    [keys] = re.findall(r"server: ([\d,]+) keys looked up", done.stdout)
    assert int(keys.replace(",", "")) >= int(total["Request Count"]) * 503 > 0


@pytest.mark.long
def test_load_on_a_running_server_has_keys_of_the_model_only(served, repository, tmp_path):
    address = f"{served.host}:{served.port}"
    chosen = ["--model", "small", "--address", address, "--unknown", "0", "--skew", "0", "--output", tmp_path]

    done = load(repository, *chosen, "-u", "2", "-t", "1s")

    assert done.returncode == 0, done.stderr
    _, _, page = served.ask("/metrics")
    counted = dict(re.findall(r'^(hotrow_\w+)\{model="small",table="only",version="1"\} (\S+)$', page.decode(), re.M))
    assert float(counted["hotrow_lookup_keys_total"]) > 0
    assert float(counted["hotrow_defaulted_keys_total"]) == 0


@pytest.mark.long
def test_failed_requests_fail_the_command_and_are_in_the_report(repository, served, tmp_path):
    address = f"{served.host}:{served.port}"
    chosen = ["--model", "tiny", "--protocol", "grpc", "--address", address, "--output", tmp_path]

    done = load(repository, *chosen, "-t", "1s")  # gRPC to the port of HTTP

    assert done.returncode == 1
    [failure] = rows(tmp_path / "steady_grpc_failures.csv")
    assert "UNAVAILABLE" in failure["Error"]


@pytest.mark.long  # tests/loadtests has the checks in one process
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "192.0.2.1:8000"], "'http://192.0.2.1:8000' is not this machine; --allow-remote sends load"),
        (["--address", "127.0.0.1:1"], "there are several models: choose one of small, tiny with --model"),
        (["--address", "127.0.0.1:1", "--skew", "-1"], "expected a number from 0 to 4, got '-1'"),
        (["--address", "127.0.0.1:1", "--samples", "0"], "expected a whole number from 1 to 1048576, got '0'"),
        (["--address", "127.0.0.1:1", "--users", "0"], "expected at least 1 user, got --users 0"),
        (["--scenario", "calm"], "invalid choice: 'calm'"),
    ],
)
def test_a_wrong_option_is_refused_before_any_load(repository, tmp_path, options, message):
    done = load(repository, *options, "--output", tmp_path)

    assert done.returncode != 0
    assert message in done.stderr
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.long
def test_a_repository_that_cannot_be_served_is_refused(tmp_path):
    done = load(tmp_path / "none", "--output", tmp_path)

    assert done.returncode != 0
    assert "none: no such file or folder" in done.stderr
    assert "the server did not start" in done.stderr
