"""A table many times the memory it may take: loaded, served and walked."""

import subprocess
import sys

import pytest

ROWS, DIM = 1_500_000, 64  # 384 MB of rows

# Loads, reads and walks the table, and prints the anonymous memory of the process before and at its height.
CHILD = f"""
import re, sys, threading
import numpy as np
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb import sort as rocksdb_sort

rocksdb_sort.RUN_BYTES = 16 * 2**20

def anonymous_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def rows_of(keys):
    return np.broadcast_to((keys % 1000).astype(np.float32)[:, None], (keys.size, {DIM})).copy()

heights = [anonymous_mib()]
store = RocksDbStore(sys.argv[1], num_threads=1)

def batches():
    for first in range(0, {ROWS}, 20_000):
        keys = (np.arange(first, first + 20_000) * 1_000_003) % {ROWS}
        yield keys, rows_of(keys)
        heights.append(anonymous_mib())

spec = TableSpec("m.t", {DIM})
store.table(spec).load(batches(), Marker("digest"), keep=False)
heights.append(anonymous_mib())
rng = np.random.default_rng(0)
for _ in range(20):
    keys = rng.integers(0, {ROWS}, 20_000)
    out = np.empty((keys.size, {DIM}), np.float32)
    assert store.tables["m.t"].fetch(keys, out).all() and (out == rows_of(keys)).all()
    heights.append(anonymous_mib())
walked = 0
for keys, _ in store.tables["m.t"].items(20_000):
    walked += keys.size
    heights.append(anonymous_mib())
assert walked == {ROWS}
store.close()
print(heights[0], max(heights))
"""


@pytest.mark.long
def test_a_table_takes_the_memory_of_a_run_and_a_batch_however_many_rows_it_has(tmp_path):
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "db")], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    before, height = map(float, done.stdout.split())
    assert height - before < 150  # of 384 MB of rows
