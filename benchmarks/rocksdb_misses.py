"""Reading rows from the RocksDB tier, against rocksdict's own multi_get on the same files with the same options.

The peer gets its keys as a list of bytes and returns a list of bytes. Hotrow takes an int64 array and returns float32
rows and a mask of the found keys. The difference is the price of the store's interface. Target: ratio >= 0.9.
"""

import tempfile
from pathlib import Path

import numpy as np
import rocksdict

from benchmarks.one_table import TABLE, raw_keys, table_model, tiers_file, vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish, take_turns
from benchmarks.rocksdb_peer import peer_options
from serving.parameter_server import ParameterServer

DIM = 32
FAMILY = f"hps_et.{TABLE}"


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds, keys_per_round = (20_000, 2, 1) if arguments.quick else (1_000_000, 15, 100_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "t", np.random.default_rng(0).permutation(rows), vectors_from)
        disk = {"type": "rocks_db", "path": "db", "num_threads": 2}
        tiers = tiers_file(folder, volatile_db={"type": "disabled"}, persistent_db=disk)
        with ParameterServer.from_config(tiers) as server:
            server.load_model(table_model(folder / "t", DIM))
            (store,) = server.stores
            options = peer_options()
            database = rocksdict.Rdict(
                str(folder / "db"),
                options,
                {"default": options, FAMILY: options},
                rocksdict.AccessType.read_only(False),
            )
            peer = database.get_column_family(FAMILY)
            check(store, peer, rows)
            records = [
                measure(store, peer, rows, size, rounds, max(keys_per_round // size, 1)) for size in (1664, 26_624)
            ]
            peer.close()
            database.close()
    publish(records, arguments.json)


def check(store, peer, rows):
    """Both must answer right, for absent keys too. Reading every row also brings the files into memory."""
    keys = np.arange(rows + 1000)
    out = np.full((keys.size, DIM), np.nan, dtype=np.float32)
    found = store.tables[TABLE].fetch(keys, out)
    if found.sum() != rows or not (out[:rows] == vectors_from(keys[:rows])).all() or out[rows:].any():
        raise SystemExit("the store's answer is wrong")
    for start in range(0, rows, 50_000):
        part = keys[start : start + 50_000]
        if b"".join(value for value in peer.get(raw_keys(part)) if value) != out[part[part < rows]].tobytes():
            raise SystemExit("the peer's answer is wrong")


def measure(store, peer, rows, size, rounds, calls):
    """Millions of rows per second."""
    rng = np.random.default_rng(1)
    out = np.empty((size, DIM), dtype=np.float32)
    batches = ([rng.integers(0, rows, size) for _ in range(calls)] for _ in range(rounds))
    took = take_turns(
        lambda keys, raw: store.tables[TABLE].fetch(keys, out),
        lambda keys, raw: peer.get(raw),
        ([(keys, raw_keys(keys)) for keys in some] for some in batches),
    )
    rates = [tuple(calls * size / seconds / 1e6 for seconds in pair) for pair in took]
    return Record.of("rocksdb_misses.fetch", {"rows": rows, "dim": DIM, "keys": size}, "Mrow/s", rates)


if __name__ == "__main__":
    main()
