"""Processes that end while threads that nobody joins are in the kernels, without Python's global lock."""

import subprocess
import sys

WORK_UNTIL_THE_END = """
import threading
import numpy as np
from kernels.host import HostTable, KeyIndex, PooledLookup, encode_rows, pool_rows

COUNT, DIM = 20_000, 16
keys, rows, row_ptrs = np.arange(COUNT), np.ones((COUNT, DIM), np.float32), np.arange(COUNT + 1)
table = HostTable(DIM, COUNT)
table.insert(keys, rows)
several = PooledLookup([DIM], [1], ["sum"], [np.zeros(3, np.int64)], [])
calls = {
    "fetch": lambda out: table.fetch(keys, out),
    "fetch_pooled": lambda out: table.fetch_pooled(keys, row_ptrs, out, "sum"),
    "several tables": lambda out: several.fetch([table], keys, row_ptrs, out.reshape(-1), COUNT),
    "insert": lambda out: table.insert(keys, rows),
    "items": lambda out: list(table.items()),
    "encode_rows": lambda out: encode_rows(rows, "int8"),
    "pool_rows": lambda out: pool_rows(rows, row_ptrs, out, "mean"),
    "find": lambda out: KeyIndex(COUNT).find_or_insert(keys),
}

def work(call, begun):
    out = np.empty_like(rows)
    while True:
        call(out)
        begun.set()

begins = [threading.Event() for _ in range(2) for _ in calls]
for call, begun in zip([*calls.values()] * 2, begins):
    threading.Thread(target=work, args=(call, begun), daemon=True).start()
for begun in begins:
    begun.wait()
"""


def test_a_process_ends_cleanly_while_daemon_threads_are_in_calls():
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", WORK_UNTIL_THE_END], capture_output=True, text=True)

        assert (ended.returncode, ended.stderr) == (0, "")
