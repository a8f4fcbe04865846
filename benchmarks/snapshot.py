"""Snapshots against loading, against the host table, and against page faults.

    python -m benchmarks.snapshot [--quick] [--json FILE]

- start: open a snapshot and answer a first batch of 1,664 keys, against reading key and emb_vector into a host table
  and answering the same keys; all files are in the page cache. Target: 50 times faster for 10M rows of 32 floats
- lookup: rows per second, against the same rows in a host table, after a warm-up that reads the whole file: on a
  virtual machine the first touch of a page is a fault in the host
- changed: rows per second, pooled in bags of 4, of a table with one changed row, against the table without a change.
  Target: at least 1 / 1.2
- first: the first 26,624 keys of a file that is in memory and was never opened, so that most keys check a page of the
  index, against the first keys after a warm-up, which checks the index
- cold: 10,000 keys of a snapshot that is not in memory, against reading as many known rows of a mapped emb_vector, one
  page fault after the other
"""

import gc
import mmap
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.one_table import WRITE_ROWS, write_table
from benchmarks.one_table import vectors_from as rows_of
from benchmarks.report import Record, parse_arguments, publish, take_turns
from kernels.host import HostTable
from serving import open_snapshot
from serving.model.snapshot_model import write_snapshot_file
from serving.model.sparse_file import open_sparse
from serving.storage import SnapshotStore, TableSpec

DIM = 32
FIRST_KEYS, BATCH_KEYS, COLD_KEYS = 1664, 26 * 1024, 10_000


def main():
    arguments = parse_arguments(__doc__)
    rows, starts, rounds = (100_000, 3, 3) if arguments.quick else (10_000_000, 5, 9)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be memory, which is never cold
        table, file = Path(folder) / "table", Path(folder) / "table.snapshot"
        keys = np.random.default_rng(0).permutation(rows).astype(np.int64)
        write_table(table, keys, rows_of)
        began = time.perf_counter()
        write_snapshot_file(file, open_sparse(table, DIM), "fp32", "00" * 32)
        print(f"written in {time.perf_counter() - began:.1f} s, {file.stat().st_size / 2**20:,.0f} MiB")
        records = [
            start(table, file, rows, starts),
            lookup(table, file, rows, rounds),
            changed(file, rows, rounds),
            first(file, rows, rounds),
            cold(table / "emb_vector", file, rows, rounds),
        ]
    publish(records, arguments.json)


def load(table):
    model = open_sparse(table, DIM)
    held = HostTable(DIM, model.rows)
    for keys, rows in model.batches(WRITE_ROWS):
        held.insert(keys, rows)
    return held


def answer(table, keys, out):
    """Fetch, and stop if the answer is wrong."""
    if not table.fetch(keys, out).all() or not (out == rows_of(keys)).all():
        raise SystemExit("a wrong answer")


def start(table, file, rows, rounds):
    """Starts per second."""
    out = np.empty((FIRST_KEYS, DIM), dtype=np.float32)
    rates = []
    for number in range(rounds):
        keys = np.random.default_rng(number).integers(0, rows, FIRST_KEYS)
        took = []
        for open_table in (open_snapshot, load):
            path = file if open_table is open_snapshot else table
            began = time.perf_counter()
            opened = open_table(path)
            opened.fetch(keys, out)
            took.append(time.perf_counter() - began)
            answer(opened, keys, out)
            del opened
            gc.collect()
        rates.append(tuple(1 / seconds for seconds in took))
    return Record.of("snapshot.start", {"rows": rows, "dim": DIM, "keys": FIRST_KEYS}, "1/s", rates)


def lookup(table, file, rows, rounds):
    """Millions of rows per second; another side goes first each round."""
    out = np.empty((BATCH_KEYS, DIM), dtype=np.float32)
    held = load(table)
    rates = []
    drop_cache(file)  # new files are cached in small pages
    with open_snapshot(file) as snapshot:
        snapshot.warm_up()
        snapshot.check(full=True)
        for number in range(rounds):
            batches = [np.random.default_rng([number, one]).integers(0, rows, BATCH_KEYS) for one in range(16)]
            rate = {}
            for one in (held, snapshot) if number % 2 else (snapshot, held):
                began = time.perf_counter()
                for keys in batches:
                    one.fetch(keys, out)
                rate[one] = len(batches) * BATCH_KEYS / (time.perf_counter() - began) / 1e6
                answer(one, batches[-1], out)
            rates.append((rate[snapshot], rate[held]))
    return Record.of("snapshot.lookup", {"rows": rows, "dim": DIM, "keys": BATCH_KEYS}, "Mrow/s", rates)


def changed(file, rows, rounds):
    """Millions of rows per second."""
    row_ptrs = np.arange(0, BATCH_KEYS + 1, 4)
    ours, peer = (SnapshotStore(overlay_capacity_rows=rows // 16) for _ in range(2))
    for store in (ours, peer):
        store.table(TableSpec("t", DIM)).serve_file(open_sparse(file, DIM))
    ours.tables["t"].insert(np.array([0]), rows_of(np.array([0])))
    outs = {store: np.empty((BATCH_KEYS // 4, DIM), dtype=np.float32) for store in (ours, peer)}

    def look_up(store, keys):
        store.tables["t"].fetch_pooled(keys, row_ptrs, outs[store], "sum")

    batches = [
        [(np.random.default_rng([7, number, one]).integers(0, rows, BATCH_KEYS),) for one in range(16)]
        for number in range(rounds + 1)
    ]
    took = take_turns(partial(look_up, ours), partial(look_up, peer), batches)[1:]  # the first round warms up
    if not (outs[ours] == outs[peer]).all():
        raise SystemExit("a wrong answer")
    work = 16 * BATCH_KEYS / 1e6
    rates = [(work / one, work / other) for one, other in took]
    return Record.of("snapshot.changed", {"rows": rows, "dim": DIM, "keys": BATCH_KEYS}, "Mrow/s", rates)


def first(file, rows, rounds):
    """Batches per second; only the snapshot's state differs."""
    out = np.empty((BATCH_KEYS, DIM), dtype=np.float32)
    rates = []
    for number in range(rounds):
        keys = np.random.default_rng([8, number]).integers(0, rows, BATCH_KEYS)
        took = []
        for warms_up in (False, True):
            with open_snapshot(file) as snapshot:
                if warms_up:
                    snapshot.warm_up()
                began = time.perf_counter()
                snapshot.fetch(keys, out)
                took.append(time.perf_counter() - began)
                answer(snapshot, keys, out)
        rates.append(tuple(1 / seconds for seconds in took))
    return Record.of("snapshot.first", {"rows": rows, "dim": DIM, "keys": BATCH_KEYS}, "1/s", rates)


def cold(vectors, file, rows, rounds):
    """Thousands of rows per second."""
    out = np.empty((COLD_KEYS, DIM), dtype=np.float32)
    rates = []
    for number in range(rounds):
        keys = np.random.default_rng([9, number]).integers(0, rows, COLD_KEYS)
        drop_cache(file)
        with open_snapshot(file) as snapshot:
            began = time.perf_counter()
            snapshot.fetch(keys, out)
            ours = time.perf_counter() - began
        drop_cache(vectors)
        with vectors.open("rb") as opened:
            pages = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        pages.madvise(mmap.MADV_RANDOM)  # a fault reads one page
        mapped = np.frombuffer(pages, dtype=np.float32).reshape(rows, DIM)
        began = time.perf_counter()
        np.take(mapped, keys, axis=0, out=out, mode="clip")  # mode="raise" would read everything
        peer = time.perf_counter() - began
        del mapped, pages
        rates.append((COLD_KEYS / ours / 1e3, COLD_KEYS / peer / 1e3))
    return Record.of("snapshot.cold", {"rows": rows, "dim": DIM, "keys": COLD_KEYS}, "krow/s", rates)


def drop_cache(file):
    """Drop the file from the page cache; it must not be mapped."""
    gc.collect()
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    main()
