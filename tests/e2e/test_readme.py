"""What the README shows, run as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving import ParameterServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = {"hotrow": "serving.cli.main", "hotrow-train": "training.cli"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def shown(command):
    """The one line of the README that begins with ``command``, without its comment, as arguments to run."""
    [line] = [line for block in blocks("") for line in block.splitlines() if line.startswith(f"{command} ")]
    name, *arguments = line.partition("#")[0].split()
    return [sys.executable, "-m", COMMANDS[name], *arguments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the README's reader stands after its `hotrow-train` line, with fewer rows."""
    folder = tmp_path_factory.mktemp("readme")
    command = ["2000" if argument == "200000" else argument for argument in shown("hotrow-train")]
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=250, capture_output=True)
    return folder


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_the_check_command_accepts_what_the_train_command_wrote(folder):
    answer = subprocess.run(
        shown("hotrow check"), cwd=folder, env=environment(), check=True, timeout=250, capture_output=True, text=True
    )

    assert "sparse_embedding1" in answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_each_python_block_runs_and_prints_one_probability_per_sample(folder, start, number):
    block = blocks("python")[number]
    if "localhost:8000" in block:
        block = block.replace("localhost:8000", start(folder / "models").url.removeprefix("http://"))

    answer = subprocess.run(
        [sys.executable, "-c", block], cwd=folder, env=environment(), timeout=250, capture_output=True, text=True
    )

    assert not answer.stderr
    probabilities = [float(number) for number in re.findall(r"\d\.\d+(?:e-\d+)?", answer.stdout)]
    assert len(probabilities) == (2 if "tritonclient" in block else 1)
    assert all(0 < probability < 1 for probability in probabilities)


@pytest.mark.slow
def test_the_predict_command_answers_the_request_that_the_readme_names(folder, start):
    command = [*shown("hotrow predict"), "--url", start(folder / "models").url]

    answer = subprocess.run(
        command, cwd=ROOT, env=environment(), check=True, timeout=250, capture_output=True, text=True
    )

    assert [0 < float(probability) < 1 for probability in answer.stdout.split()] == [True, True]


def test_the_tiers_shown_are_a_configuration_that_opens(tmp_path):
    [block] = blocks("json")
    tiers = json.loads(block)
    tiers["persistent_db"]["path"] = "rocksdb"
    (tmp_path / "ps.json").write_text(json.dumps(tiers))

    with ParameterServer.from_config(tmp_path / "ps.json") as server:
        assert [store.name for store in server.stores] == ["memory", "rocksdb"]


def test_every_make_target_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    assert set(re.findall(r"`?make ([a-z0-9-]+)", README)) <= targets
