"""Reading rows from the RocksDB tier, against rocksdict's own multi_get on the same files with the same options.

The peer gets its keys as the list of bytes it wants and returns a list of bytes; ours takes an int64 array and returns
float32 rows and which keys were found. The difference is the price of the store's interface. Target: ratio >= 0.9.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Record, parse_arguments, publish
from serving.storage import RocksDbStore, TableSpec
from serving.storage.hps_layout import key_list
from serving.storage.rocksdb.engine import import_rocksdict, open_database

DIM = 32
TABLE = "model.table"


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds = (50_000, 5) if arguments.quick else (1_000_000, 15)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "db"
        store = RocksDbStore(path, num_threads=2)
        store.open_table(TableSpec(TABLE, DIM), rows)
        store.bulk_load(TableSpec(TABLE, DIM), batches(rows), "benchmark")
        database, families = open_database(import_rocksdict(), path, read_only=True, num_threads=2)
        peer = families[f"hps_et.{TABLE}"]
        check(store, peer, rows)
        records = [measure(store, peer, rows, size, rounds) for size in (1664, 26_624)]
        store.close()
        peer.close()
        database.close()
    publish(records, arguments.json)


def batches(rows, batch_rows=100_000):
    rng = np.random.default_rng(0)
    keys = rng.permutation(rows)
    for start in range(0, rows, batch_rows):
        part = keys[start : start + batch_rows]
        yield part, vectors_of(part)


def vectors_of(keys):
    """Rows that can be told from the key."""
    return (keys[:, None] * 0.5 + np.arange(DIM)).astype(np.float32)


def check(store, peer, rows):
    """Both must answer right, absent keys included; reading every row also brings the files into memory."""
    keys = np.arange(rows + 1000)
    out = np.full((keys.size, DIM), np.nan, dtype=np.float32)
    found = store.fetch(TABLE, keys, out)
    if found.sum() != rows or not (out[:rows] == vectors_of(keys[:rows])).all() or out[rows:].any():
        raise SystemExit("the store's answer is wrong")
    for start in range(0, rows, 50_000):
        part = keys[start : start + 50_000]
        if b"".join(value for value in peer.get(key_list(part, 8)) if value) != out[part[part < rows]].tobytes():
            raise SystemExit("the peer's answer is wrong")


def measure(store, peer, rows, size, rounds):
    """Rows per second, in millions; the two take turns in going first."""
    rng = np.random.default_rng(1)
    out = np.empty((size, DIM), dtype=np.float32)
    repeats = max(100_000 // size, 1)
    rates = []
    for number in range(rounds):
        keys = [rng.integers(0, rows, size) for _ in range(repeats)]
        listed = [key_list(one, 8) for one in keys]
        took = {}
        for which in ("ours", "peer") if number % 2 else ("peer", "ours"):
            begin = time.perf_counter()
            for array, raw in zip(keys, listed, strict=True):
                if which == "ours":
                    store.fetch(TABLE, array, out)
                else:
                    peer.get(raw)
            took[which] = time.perf_counter() - begin
        rates.append(tuple(repeats * size / took[which] / 1e6 for which in ("ours", "peer")))
    return Record.of("rocksdb_misses.fetch", {"rows": rows, "dim": DIM, "keys": size}, "Mrow/s", rates)


if __name__ == "__main__":
    main()
