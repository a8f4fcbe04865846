"""The cost of the parameter server on top of its tiers: microseconds of one lookup, so less is better.

- ``tiers.tables``: a lookup through 26 tables in RAM against one table that holds the rows of all of them
- ``tiers.counted``: against the store's own pooled fetch, without counters and timers
- ``tiers.two_tiers``: against the fetches of both stores
- ``tiers.budget``: against the same server without a time budget
- ``tiers.promotion``: against the same server without promotion
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.one_table import TABLE, table_model, vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish, take_turns
from serving.config import TableConfig
from serving.lookup import LookupSession
from serving.parameter_server import ParameterServer, TierSettings
from serving.reading import read_batch
from serving.storage import MemoryStore, RocksDbStore

DIM = 32
KEYS = 1664  # 64 samples of 26 keys
TABLES = 26


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds, repeats = (20_000, 3, 20) if arguments.quick else (400_000, 15, 100)
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        write_table(folder / "t", np.arange(rows), vectors_from)

        def serve(database, memory, **options):
            server = ParameterServer([memory, RocksDbStore(folder / database, num_threads=2)], **options)
            opened.callback(server.close)
            server.load_model(table_model(folder / "t", DIM, slots=26))
            return server

        plain = serve("plain", MemoryStore(capacity_rows=rows // 2))
        budget = {"rocksdb": TierSettings(timeout_ms=1000)}
        waiting = serve("waiting", MemoryStore(capacity_rows=rows // 2), settings=budget)
        promoting = serve("promoting", MemoryStore(capacity_rows=rows // 2), promote=True)

        hot, cold = (0, rows // 2), (rows // 2, rows)
        memory, disk = plain.stores
        records = [
            *compare_tables(folder, rows // TABLES, rounds, repeats),
            compare("tiers.counted", 26, hot, rounds, 50 * repeats, pooled(plain), stores(memory)),
            compare("tiers.counted", KEYS, hot, rounds, repeats, pooled(plain), stores(memory)),
            compare("tiers.two_tiers", KEYS, cold, rounds, repeats, pooled(plain), stores(memory, disk)),
            compare("tiers.budget", 26, cold, rounds, repeats, pooled(waiting), pooled(plain)),
            compare("tiers.budget", KEYS, cold, rounds, repeats, pooled(waiting), pooled(plain)),
            compare("tiers.promotion", KEYS, cold, rounds, repeats, after_eviction(promoting), after_eviction(plain)),
        ]
    publish(records, arguments.json)


def pooled(server):
    """One lookup through the server."""
    return lambda keys: server.lookup_pooled(TABLE, keys, np.arange(keys.size + 1, dtype=np.int32), "sum")


def after_eviction(server):
    """The same lookup, after its rows have left RAM so that they are promoted again."""
    look_up = pooled(server)

    def run(keys):
        server.stores[0].tables[TABLE].evict(keys)
        look_up(keys)

    return run


def stores(memory, disk=None):
    """The same calls of the stores, without the server."""

    def run(keys):
        out = np.empty((keys.size, DIM), dtype=np.float32)
        memory.tables[TABLE].fetch_pooled(keys, np.arange(keys.size + 1, dtype=np.int32), out, "sum")
        if disk is not None:
            disk.tables[TABLE].fetch(keys, out)

    return run


def compare_tables(folder, rows, rounds, repeats):
    """Records of the same request through many tables of ``rows`` rows each, and through one table of all rows."""
    parts = [np.arange(rows) + rows * place for place in range(TABLES)]
    one = table_model(folder / "all", DIM, slots=TABLES)
    write_table(folder / "all", np.concatenate(parts), vectors_from)
    tables = []
    for place, keys in enumerate(parts):
        file = folder / f"part{place}"
        write_table(file, keys, vectors_from)
        tables.append(TableConfig(name=f"t{place}", dim=DIM, slots=1, combiner="sum", file=file))
    many = one.model_copy(update={"name": "many", "tables": tuple(tables)})
    with ParameterServer([MemoryStore()]) as server:
        sessions = []
        for config in (many, one):
            server.load_model(config)
            sessions.append(LookupSession(server, config))
        for samples in (1, 64):
            yield compare_sessions(sessions, rows, samples, rounds, repeats)


def compare_sessions(sessions, rows, samples, rounds, repeats):
    """Microseconds of one lookup through each of two sessions; checks that the answers are equal."""
    rng = np.random.default_rng(samples)
    row_ptrs = np.arange(samples * TABLES + 1, dtype=np.int32)
    repeats = repeats * 640 // (9 + samples)  # a round takes as long for every number of samples
    keys = rng.integers(0, rows, (64, samples, TABLES)) + rows * np.arange(TABLES)
    batches = [[read_batch(tiers.config, None, some.reshape(-1), row_ptrs) for some in keys] for tiers in sessions]
    for many, one in zip(*batches, strict=True):
        answers = [session.lookup_pooled(batch) for session, batch in zip(sessions, (many, one), strict=True)]
        assert [answer.defaulted_keys for answer in answers] == [0, 0]
        assert np.array_equal(np.concatenate(answers[0].embeddings, axis=1), answers[1].embeddings[0])
    ours, peer = (
        lambda number, session=session, batches=batches: session.lookup_pooled(batches[number % len(batches)])
        for session, batches in zip(sessions, batches, strict=True)
    )
    took = take_turns(ours, peer, [[(number,) for number in range(repeats)]] * rounds)
    pairs = [tuple(1e6 * seconds / repeats for seconds in pair) for pair in took]
    return Record.of("tiers.tables", {"tables": TABLES, "samples": samples, "less": "is better"}, "us", pairs)


def compare(name, size, between, rounds, repeats, ours, peer):
    """Microseconds of one call."""
    rng = np.random.default_rng(size)
    batches = ([(rng.integers(*between, size),) for _ in range(repeats)] for _ in range(rounds))
    took = take_turns(ours, peer, batches)
    pairs = [tuple(1e6 * seconds / repeats for seconds in pair) for pair in took]
    return Record.of(name, {"keys": size, "tier": "memory" if between[0] == 0 else "rocksdb"}, "us", pairs)


if __name__ == "__main__":
    main()
