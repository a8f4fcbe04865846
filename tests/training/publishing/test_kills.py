"""A trainer that is killed while it publishes: at the end, a server that followed has its rows."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from serving.model.manifest import read_manifest
from serving.model.sparse_file import open_sparse
from tests.tools.warm import Warm
from tests.training.publishing.following import Follower

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow
OFTEN = pytest.param(10, marks=pytest.mark.long)


def start(*command):
    return Warm(*command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.STDOUT)


def kill_after(process, log, has_checkpoint, messages):
    """Kill a process when it has published more messages and there is a checkpoint, at a random moment."""
    begin, until = len(list(log.glob("*.update"))), time.monotonic() + 100
    while not has_checkpoint() or len(list(log.glob("*.update"))) < begin + messages:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.002)
    time.sleep(random.random() / 20)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def finish(process):
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output


@pytest.mark.parametrize("kills", [1, OFTEN])
def test_after_kills_a_server_that_followed_has_the_rows_of_hotrow_train(tmp_path, kills):
    log, models, checkpoints = tmp_path / "log", tmp_path / "models", tmp_path / "checkpoints"
    train = ["-m", "serving.cli.main", "train", "--synthetic", "4000", "--model", "wdl", "--batch-size", "100"]
    train += ["--epochs", "3", "--output", models, "--checkpoint", checkpoints, "--checkpoint-steps", "7"]
    train += ["--publish", log, "--publish-steps", "2"]

    for number in range(kills):
        resume = ["--resume"] if number else []
        has_checkpoint = lambda: any(checkpoints.glob("step-*/checkpoint.json"))  # noqa: E731
        kill_after(start(*train, *resume), log, has_checkpoint, 100 if kills == 1 else 30)
    finish(start(*train, "--resume"))

    version = models / "wdl" / "1"
    manifest = read_manifest(version)
    expected = {}
    for keys, rows in open_sparse(version / "sparse_embedding1", 17).batches(1000):
        expected |= dict(zip(keys.tolist(), map(bytes, np.ascontiguousarray(rows)), strict=True))
    follower = Follower().follow(log)
    assert follower.tables["sparse_embedding1"] == expected
    assert {run for _, run, _ in follower.sequences} == {manifest.run}
    assert manifest.positions == {"folder": str(len(list(log.glob("*.update"))))}


@pytest.mark.parametrize("kills", [OFTEN])
def test_after_kills_a_server_that_followed_has_the_rows_of_a_training_with_evictions(tmp_path, kills):
    program = ["-m", "tests.training.publishing.train_with_evictions", tmp_path]
    log, state = tmp_path / "log", tmp_path / "state.pt"

    for _ in range(kills):
        kill_after(start(*program, "100000"), log, state.exists, 150)
    begin = len(list(log.glob("*.update")))
    finish(start(*program, "1"))  # only goes back to the checkpoint

    assert len(list(log.glob("*.update"))) > begin
    tables = Follower().follow(log).tables
    with np.load(tmp_path / "rows.npz") as rows:
        for name, table in tables.items():
            assert table == dict(zip(rows[f"{name} 0"].tolist(), map(bytes, rows[f"{name} 1"]), strict=True))
    assert len(tables["user"]) == 50
