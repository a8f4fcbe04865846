"""Loading a table into the RocksDB tier, against rocksdict's bare SstFileWriter; and a checkpoint, against a copy.

The peer gets sorted keys as lists of bytes and only writes a file. Hotrow reads a model's files in any order of keys,
sorts the rows with bounded memory, keeps the last of equal keys, ingests the sorted files and reads them ahead.
"""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import rocksdict

from benchmarks.one_table import TABLE, WRITE_ROWS, raw_keys, raw_rows, table_model, write_table
from benchmarks.report import Record, parse_arguments, publish
from benchmarks.rocksdb_peer import peer_options
from serving.parameter_server import ParameterServer
from serving.storage import RocksDbStore

DIM = 32
ROW_BYTES = 8 + 4 * DIM


def main():
    arguments = parse_arguments(__doc__, rows={"type": int, "default": 0, "help": "rows of the table"})
    rows = arguments.rows or (200_000 if arguments.quick else 10_000_000)
    rounds = 1 if arguments.quick else 3
    loads, copies = [], []
    with tempfile.TemporaryDirectory() as folder:
        # The model, and a database with its copy or with the sorted files of a load.
        check_room(folder, 3 * rows * ROW_BYTES)
        model = Path(folder) / "t"
        vectors = np.random.default_rng(1).standard_normal((WRITE_ROWS, DIM), dtype=np.float32)
        write_table(model, np.random.default_rng(0).permutation(rows), lambda keys: vectors[: keys.size])
        for number in range(rounds):
            path = Path(folder) / f"db{number}"
            took = {}
            for side in ("ours", "peer") if number % 2 else ("peer", "ours"):
                took[side] = load(path, model, rows) if side == "ours" else write_file(path.with_suffix(".sst"), rows)
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
    """Stop before minutes of work if the disk has no room for these bytes and a tenth more."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.1:
        raise SystemExit(f"{folder}: {size * 1.1:,.0f} bytes are needed, {free:,} are free; set TMPDIR, or --rows")


def load(path, model, rows):
    """Seconds from opening the model's files until its rows are on the disk and in memory."""
    with ParameterServer([RocksDbStore(path, num_threads=2)]) as server:
        begin = time.perf_counter()
        server.load_model(table_model(model, DIM))
        took_s = time.perf_counter() - begin
        keys = np.random.default_rng(2).integers(0, rows + rows // 10, 10_000)
        if not np.array_equal(server.lookup(TABLE, keys)[1], keys < rows):
            raise SystemExit("the loaded table's answer is wrong")
    return took_s


def write_file(file, rows):
    """Seconds that the peer takes to write as many rows, without making the lists."""
    keys = np.arange(rows).byteswap()  # in the order of their bytes
    values = raw_rows(np.random.default_rng(1).standard_normal((WRITE_ROWS, DIM), dtype=np.float32))
    writer = rocksdict.SstFileWriter(peer_options())
    writer.open(str(file))
    took_s = 0.0
    for start in range(0, rows, WRITE_ROWS):
        listed = raw_keys(keys[start : start + WRITE_ROWS])
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
    """Checkpoints and copies per second."""
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
