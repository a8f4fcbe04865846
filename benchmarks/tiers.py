"""What the parameter server adds to the tiers that it asks: times of one lookup in microseconds, so less is better.

Peers: for ``tiers.counted`` the store's own pooled fetch, which neither counts nor watches the time; for
``tiers.two_tiers`` the fetches of both stores; for ``tiers.budget`` and ``tiers.promotion`` the same server without a
time budget, and without promotion.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.report import Record, parse_arguments, publish
from serving.config import ModelConfig, TableConfig
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer, TierSettings
from serving.storage import MemoryStore, RocksDbStore

DIM = 32
KEYS = 1664  # 64 samples of 26 keys
TABLE = "m.t"


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds, repeats = (20_000, 3, 20) if arguments.quick else (400_000, 15, 100)
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        write_sparse_directory(folder / "t", np.arange(rows), np.ones((rows, DIM), dtype=np.float32))

        def serve(database, memory, **options):
            server = ParameterServer([memory, RocksDbStore(folder / database, num_threads=2)], **options)
            opened.callback(server.close)
            server.load_model(model(folder))
            return server

        plain = serve("plain", MemoryStore(capacity_rows=rows // 2))
        budget = {"rocksdb": TierSettings(timeout_ms=1000)}
        waiting = serve("waiting", MemoryStore(capacity_rows=rows // 2), settings=budget)
        promoting = serve("promoting", MemoryStore(capacity_rows=rows // 2), promote=True)

        hot, cold = (0, rows // 2), (rows // 2, rows)
        memory, disk = plain.stores
        records = [
            compare("tiers.counted", 26, hot, rounds, 50 * repeats, pooled(plain), stores(memory)),
            compare("tiers.counted", KEYS, hot, rounds, repeats, pooled(plain), stores(memory)),
            compare("tiers.two_tiers", KEYS, cold, rounds, repeats, pooled(plain), stores(memory, disk)),
            compare("tiers.budget", 26, cold, rounds, repeats, pooled(waiting), pooled(plain)),
            compare("tiers.budget", KEYS, cold, rounds, repeats, pooled(waiting), pooled(plain)),
            compare("tiers.promotion", KEYS, cold, rounds, repeats, making_room(promoting), making_room(plain)),
        ]
    publish(records, arguments.json)


def model(folder):
    table = TableConfig(name="t", dim=DIM, slots=26, combiner="sum", file=folder / "t")
    return ModelConfig(
        name="m",
        graph_file=folder / "graph.json",
        dense_file=folder / "dense.model",
        tables=(table,),
        key_type="I64",
        max_batchsize=64,
        dense_dim=0,
        label_dim=1,
    )


def pooled(server):
    """One lookup through the server."""
    return lambda keys: server.lookup_pooled(TABLE, keys, np.arange(keys.size + 1, dtype=np.int32), "sum")


def making_room(server):
    """The same with room in RAM for what may be promoted, so that it is."""
    look_up = pooled(server)

    def run(keys):
        server.stores[0].evict(TABLE, keys)
        look_up(keys)

    return run


def stores(memory, disk=None):
    """The same calls of the stores, by hand."""

    def run(keys):
        out = np.empty((keys.size, DIM), dtype=np.float32)
        memory.fetch_pooled(TABLE, keys, np.arange(keys.size + 1, dtype=np.int32), out, "sum")
        if disk is not None:
            disk.fetch(TABLE, keys, out)

    return run


def compare(name, size, between, rounds, repeats, ours, peer):
    """Microseconds of one call; the two take turns in going first."""
    rng = np.random.default_rng(size)
    pairs = []
    for number in range(rounds):
        batches = [rng.integers(*between, size) for _ in range(repeats)]
        took = {}
        for call in (ours, peer) if number % 2 else (peer, ours):
            begin = time.perf_counter()
            for keys in batches:
                call(keys)
            took[call] = (time.perf_counter() - begin) / repeats * 1e6
        pairs.append((took[ours], took[peer]))
    return Record.of(name, {"keys": size, "tier": "memory" if between[0] == 0 else "rocksdb"}, "us", pairs)


if __name__ == "__main__":
    main()
