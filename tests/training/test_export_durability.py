"""A version is complete or absent: whatever fails, whoever is killed, however many export at once."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import HotrowError
from serving.model.manifest import verify_manifest
from training import export
from training.export import export_model


def versions_of(folder):
    return [entry.name for entry in folder.iterdir() if entry.name.isdecimal()] if folder.exists() else []


def test_wherever_the_disk_refuses_no_version_is_left(trained, document, tmp_path, monkeypatch):
    """Every fsync and every rename of an export fails in turn; the export that meets no fault succeeds."""
    monkeypatch.setattr(export, "build_onnx", lambda graph, weights: b"onnx")
    faults = 0
    for failing_call in range(100):
        calls = 0

        def faulty(function, *arguments, failing_call=failing_call):
            nonlocal calls
            calls += 1
            if calls == failing_call + 1:
                raise OSError(28, "No space left on device")
            return function(*arguments)

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
                original = getattr(owner, name)
                patch.setattr(owner, name, lambda *a, original=original, faulty=faulty: faulty(original, *a))
            repository = tmp_path / str(failing_call)
            try:
                path = export_model(trained, document, repository, "two")
            except HotrowError as err:
                assert "No space left" in str(err)  # noqa: PT017
                faults += 1
                for version in versions_of(repository / "two"):
                    verify_manifest(repository / "two" / version)
                assert not list((repository / "two").glob(".*.tmp"))
                continue
        verify_manifest(path)
        break

    assert faults >= 10


def test_folders_that_a_killed_export_left_are_cleared_by_the_next(trained, document, tmp_path):
    stale = tmp_path / "two" / ".1.0123.tmp"
    (stale / "wide_table").mkdir(parents=True)
    (stale / "wide_table" / "key").write_bytes(b"half")
    (tmp_path / "two" / ".config.pbtxt.4567.tmp").write_text("half")

    path = export_model(trained, document, tmp_path, "two")

    assert path.name == "1"
    assert not list((tmp_path / "two").glob(".*.tmp"))


def test_exports_at_the_same_time_take_turns(trained, document, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(export_model, trained, document, tmp_path, "two") for _ in range(4)]
        paths = [future.result() for future in futures]

    assert sorted(path.name for path in paths) == ["1", "2", "3", "4"]
    for path in paths:
        verify_manifest(path)


EXPORT_FOR_EVER = """
import json, sys
from pathlib import Path
import torch
from serving.model.graph import parse_graph
from training import export
from training.ctr_model import CtrModel
from training.synthetic import generate

export.build_onnx = lambda graph, weights: b"onnx" * 100_000
torch.set_num_threads(1)
document = json.loads(sys.argv[1])
model = CtrModel(parse_graph(document, "graph.json"), seed=0)
samples = generate(2_000, seed=0).samples
model.train_batch(samples.dense, model.bags(samples.keys), samples.labels[:, None], 0.01)
while True:
    export.export_model(model, document, Path(sys.argv[2]), "two")
"""


@pytest.mark.slow
def test_a_killed_exporter_leaves_only_whole_versions(document, trained, tmp_path):
    rng = np.random.default_rng()
    for _ in range(3):
        seen = len(versions_of(tmp_path / "two"))
        process = subprocess.Popen([sys.executable, "-c", EXPORT_FOR_EVER, json.dumps(document), str(tmp_path)])
        try:
            deadline = time.monotonic() + 60
            while len(versions_of(tmp_path / "two")) == seen:
                assert process.poll() is None
                assert time.monotonic() < deadline
            spin_until = time.monotonic() + rng.uniform(0, 0.1)  # a random point of some later export
            while time.monotonic() < spin_until:
                pass
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

        for version in versions_of(tmp_path / "two"):
            verify_manifest(tmp_path / "two" / version)

    export_model(trained, document, tmp_path, "two")  # the killed process holds no lock
    assert not list((tmp_path / "two").glob(".*.tmp"))
