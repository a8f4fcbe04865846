"""A version is complete or absent after faults, kills and concurrent writes."""

import dataclasses
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import HotrowError
from serving.errors import OutputError
from serving.model.graph import parse_graph
from serving.model.manifest import verify_manifest
from serving.model.sparse_file import write_sparse_directory
from serving.model.version_writer import write_version
from tests.tools.tiny_model import TinyModel
from tests.tools.warm import Warm

GRAPH = parse_graph(TinyModel().graph(), "graph.json")


def write_files(folder):
    (folder / "graph.json").write_text("{}")
    write_sparse_directory(folder / "user", np.arange(9, dtype=np.int64), np.ones((9, 2), np.float32))


def write(repository):
    return write_version(repository, "two", GRAPH, write_files)


def versions_of(folder):
    return [entry.name for entry in folder.iterdir() if entry.name.isdecimal()] if folder.exists() else []


def test_a_disk_fault_leaves_no_version(tmp_path, monkeypatch):
    """Each fsync and each rename fails once. The writer without a fault succeeds."""
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
                path = write(repository)
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


def test_an_error_during_writing_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_version(tmp_path, "two", GRAPH, fail)

    assert versions_of(tmp_path / "two") == []
    assert not list((tmp_path / "two").glob(".*.tmp"))
    assert not (tmp_path / "two" / "config.pbtxt").exists()  # the file would stay and describe the wrong model


def test_tritons_configuration_describes_the_first_complete_version(tmp_path):
    def fail(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        write_version(tmp_path, "two", dataclasses.replace(GRAPH, label_dim=7), fail)
    write(tmp_path)

    assert 'OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ]' in (tmp_path / "two" / "config.pbtxt").read_text()


def test_folders_of_a_killed_writer_are_deleted_by_the_next(tmp_path):
    stale = tmp_path / "two" / ".1.0123abcd.tmp"
    (stale / "wide_table").mkdir(parents=True)
    (stale / "wide_table" / "key").write_bytes(b"half")
    (tmp_path / "two" / ".config.pbtxt.4567abcd.tmp").write_text("half")

    path = write(tmp_path)

    assert path.name == "1"
    assert not list((tmp_path / "two").glob(".*.tmp"))


def test_concurrent_writers_wait_for_each_other_although_a_writer_that_fails_leaves_no_folder(tmp_path):
    running, numbers = [], itertools.count()

    def fail_at_first(folder):
        running.append(folder)
        time.sleep(0.001)
        assert running == [folder]
        running.clear()
        if next(numbers) < 30:
            raise OSError("no space")
        write_files(folder)

    def write_one(_):
        with suppress(OutputError):
            write_version(tmp_path, "two", GRAPH, fail_at_first)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_one, range(30)))
        assert not (tmp_path / "two").exists()
        list(pool.map(write_one, range(4)))

    assert sorted(versions_of(tmp_path / "two")) == ["1", "2", "3", "4"]


def test_concurrent_writers_wait_for_each_other(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(write, tmp_path) for _ in range(4)]
        paths = [future.result() for future in futures]

    assert sorted(path.name for path in paths) == ["1", "2", "3", "4"]
    for path in paths:
        verify_manifest(path)


WRITE_FOR_EVER = """
import sys
from pathlib import Path
import numpy as np
from tests.tools.tiny_model import TinyModel
from serving.model.graph import parse_graph
from serving.model.sparse_file import write_sparse_directory
from serving.model.version_writer import write_version

keys, vectors = np.arange(2_000, dtype=np.int64), np.ones((2_000, 16), np.float32)

def write_files(folder):
    (folder / "dense.onnx").write_bytes(b"onnx" * 100_000)
    for table in ("user", "item"):
        write_sparse_directory(folder / table, keys, vectors)

graph = parse_graph(TinyModel().graph(), "graph.json")
while True:
    write_version(Path(sys.argv[1]), "two", graph, write_files)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_only_whole_versions(tmp_path):
    rng = np.random.default_rng()
    for _ in range(3):
        seen = len(versions_of(tmp_path / "two"))
        process = Warm("-c", WRITE_FOR_EVER, tmp_path, cwd=Path(__file__).parents[3])
        try:
            deadline = time.monotonic() + 60
            while len(versions_of(tmp_path / "two")) == seen:
                assert process.poll() is None
                assert time.monotonic() < deadline
            spin_until = time.monotonic() + rng.uniform(0, 0.1)  # a random point of some later version
            while time.monotonic() < spin_until:
                pass
        finally:
            process.kill()
            process.communicate()

        for version in versions_of(tmp_path / "two"):
            verify_manifest(tmp_path / "two" / version)

    write(tmp_path)  # the killed process holds no lock
    assert not list((tmp_path / "two").glob(".*.tmp"))
