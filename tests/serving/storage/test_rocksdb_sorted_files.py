"""Sorted files of many rows come from a second Python, which cannot make requests of this process wait."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb import sorted_files

SPEC = TableSpec("model.table", 4)
WAIT_S = 30

# Begins a load, prints the number of the second Python, and waits to be killed.
LOADER = """
import os, sys, time
from pathlib import Path
import numpy as np
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb import sorted_files

sorted_files.APART_BYTES = 1

def batches():
    yield np.arange(10), np.zeros((10, 4), np.float32)
    print(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(), flush=True)
    time.sleep(600)

RocksDbStore(sys.argv[1], num_threads=1).table(TableSpec("model.table", 4)).load(batches(), Marker("new"), keep=False)
"""


def rows_of(keys):
    return np.repeat(np.asarray(keys, dtype=np.float32)[:, None], SPEC.dim, axis=1)


def batches_of(keys):
    for piece in np.array_split(np.asarray(keys), 10):
        yield piece, rows_of(piece)


def rows_in(table, keys):
    """The first number of each key's row, None if the key is absent."""
    out = np.empty((len(keys), SPEC.dim), np.float32)
    found = table.fetch(np.asarray(keys), out)
    return [row[0] if is_found else None for row, is_found in zip(out.tolist(), found, strict=True)]


def second_python():
    """The number of this process's second Python, which has other children, too."""
    own = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    for child in Path(own).read_text(encoding="utf-8").split():
        if b"write_received" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("there is no second Python")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_files, "APART_BYTES", 1)
    store = RocksDbStore(tmp_path / "rows", num_threads=1)
    yield store
    store.close()


def test_a_second_python_writes_many_rows_and_of_equal_keys_the_last_wins(store, monkeypatch):
    monkeypatch.setattr(sorted_files, "FILE_BYTES", 24 * 30_000)
    table, keys = store.table(SPEC), np.random.default_rng(0).permutation(np.arange(-50_000, 50_000))

    def batches():
        yield keys[:10], rows_of(keys[:10] + 7)
        yield keys[:0], rows_of(keys[:0])
        yield from batches_of(keys)

    table.load(batches(), Marker("digest"), keep=False)

    assert table.count() == keys.size
    assert rows_in(table, keys) == keys.tolist()
    assert len(list(store.path.glob("*.sst"))) > 1


@pytest.mark.parametrize("program", ["", "/nowhere/python", "/bin/false"])
def test_without_a_second_python_the_rows_are_written_here_and_the_log_says_so(store, monkeypatch, caplog, program):
    monkeypatch.setattr(sys, "executable", program)
    table = store.table(SPEC)

    table.load(batches_of(range(100)), Marker("digest"), keep=False)

    assert rows_in(table, range(100)) == list(range(100))
    assert "no second Python starts, so requests wait while files are written" in caplog.text


def test_a_second_python_that_is_killed_is_an_error_and_the_old_rows_stay(store):
    table = store.table(SPEC)
    table.load(batches_of(range(10)), Marker("old"), keep=False)

    def batches():
        for number, batch in enumerate(batches_of(range(10, 10**6))):
            if number == 1:
                os.kill(second_python(), signal.SIGKILL)
            yield batch

    with pytest.raises(StoreError, match="the process that writes the files ended with -9"):
        table.load(batches(), Marker("new"), keep=False)

    assert (rows_in(table, [1, 20]), table.marker().digest) == ([1.0, None], "old")
    assert not (store.path / "loading").exists()


def test_an_error_of_the_second_python_says_why(store):
    def batches():
        for number, batch in enumerate(batches_of(range(10**6))):
            if number == 1:
                os.rmdir(store.path / "loading")
            yield batch

    with pytest.raises(StoreError, match=r"No such file or directory"):
        store.table(SPEC).load(batches(), Marker("new"), keep=False)


def test_a_second_python_ends_when_its_process_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", LOADER, tmp_path], stdout=subprocess.PIPE, text=True) as loader:
        second = int(loader.stdout.readline())
        loader.kill()
    until_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{second}/fd/0").exists() and time.monotonic() < until_s:
        time.sleep(0.01)

    assert not Path(f"/proc/{second}/fd/0").exists()
    assert not list(tmp_path.rglob("*.sst"))
