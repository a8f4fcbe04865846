"""Loading a table into the RocksDB tier, against rocksdict's bare SstFileWriter, and copying the database.

The peer gets keys that are sorted already, as lists of bytes, and only writes a file; ours takes batches in any order,
sorts them with bounded memory, keeps the last of equal keys, has RocksDB take the files in and the system read them
ahead. A checkpoint's peer is a copy of the files.
"""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Record, parse_arguments, publish
from serving.storage import RocksDbStore, TableSpec
from serving.storage.hps_layout import key_list, row_list
from serving.storage.rocksdb.engine import import_rocksdict, table_options

DIM = 32
BATCH_ROWS = 65536
ROW_BYTES = 8 + 4 * DIM
SPEC = TableSpec("model.table", DIM)


def main():
    arguments = parse_arguments(__doc__, rows={"type": int, "default": 0, "help": "rows of the table"})
    rows = arguments.rows or (200_000 if arguments.quick else 10_000_000)
    rounds = 1 if arguments.quick else 3
    loads, copies = [], []
    with tempfile.TemporaryDirectory() as folder:
        # A database and its copy; or, while it is loaded, runs of sorted rows and the files made of them.
        check_room(folder, 2 * rows * ROW_BYTES)
        for number in range(rounds):
            path = Path(folder) / f"db{number}"
            took = {}
            for which in ("ours", "peer") if number % 2 else ("peer", "ours"):
                took[which] = load(path, rows) if which == "ours" else write_file(path.with_suffix(".sst"), rows)
            loads.append((rows / took["ours"] / 1e6, rows / took["peer"] / 1e6))
            copies.append(copy(path))
            shutil.rmtree(path)
    params = {"rows": rows, "dim": DIM}
    publish(
        [
            Record.of("rocksdb_load.bulk_load", params, "Mrow/s", loads),
            Record.of("rocksdb_load.checkpoint", params, "1/s", copies),
        ],
        arguments.json,
    )


def check_room(folder, size):
    """End at once, and not after minutes, where the disk has no room for that many bytes and a tenth more."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.1:
        raise SystemExit(f"{folder}: {size * 1.1:,.0f} bytes are needed, {free:,} are free; set TMPDIR, or --rows")


def batches(rows):
    """The same rows again and again, under keys in random order."""
    keys = np.random.default_rng(0).permutation(rows)
    vectors = np.random.default_rng(1).standard_normal((BATCH_ROWS, DIM), dtype=np.float32)
    for start in range(0, rows, BATCH_ROWS):
        part = keys[start : start + BATCH_ROWS]
        yield part, vectors[: part.size]


def load(path, rows):
    """Seconds that a load takes, from the first batch until its rows are in memory and on the disk."""
    store = RocksDbStore(path, num_threads=2)
    begin = time.perf_counter()
    store.bulk_load(SPEC, batches(rows), "benchmark")
    took_s = time.perf_counter() - begin
    keys = np.random.default_rng(2).integers(0, rows + rows // 10, 10_000)
    if not np.array_equal(store.fetch(SPEC.name, keys, np.empty((keys.size, DIM), np.float32)), keys < rows):
        raise SystemExit("the loaded table's answer is wrong")
    store.close()
    return took_s


def write_file(file, rows):
    """Seconds that the peer takes to write as many rows; making the lists is not counted."""
    keys = np.arange(rows).byteswap()  # in the order of their bytes
    values = row_list(np.random.default_rng(1).standard_normal((BATCH_ROWS, DIM), dtype=np.float32))
    rocksdict = import_rocksdict()
    writer = rocksdict.SstFileWriter(table_options(rocksdict, 2))
    writer.open(str(file))
    took_s = 0.0
    for start in range(0, rows, BATCH_ROWS):
        listed = key_list(keys[start : start + BATCH_ROWS], 8)
        begin = time.perf_counter()
        for key, value in zip(listed, values, strict=False):
            writer[key] = value
        took_s += time.perf_counter() - begin
    begin = time.perf_counter()
    writer.finish()
    took_s += time.perf_counter() - begin
    file.unlink()
    return took_s


def copy(path):
    """How often in a second a checkpoint and a copy could be made."""
    store = RocksDbStore(path, num_threads=2)
    begin = time.perf_counter()
    store.checkpoint(path.with_suffix(".checkpoint"))
    middle = time.perf_counter()
    shutil.copytree(path, path.with_suffix(".copy"))
    end = time.perf_counter()
    store.close()
    shutil.rmtree(path.with_suffix(".checkpoint"))
    shutil.rmtree(path.with_suffix(".copy"))
    return 1 / (middle - begin), 1 / (end - middle)


if __name__ == "__main__":
    main()
