"""A table with four times the rows of its RAM tier, in front of RocksDB: hit rates, and the cost of eviction.

- ``eviction.hit_rate``: the share of lookups that RAM answers in the second half of a trace (Zipf 1.05), with
  promotion. The peer is the best fixed set of rows, chosen with knowledge of the trace. The record of
  ``evict_oldest`` has two hit rates of LRU from `hotrow plan`: for the bound, and for the part of it that an overflow
  leaves. The measured hit rate should lie between them. ``rss_growth_mib`` is the process's growth in that half.
- ``eviction.fetch``: M rows/s of lookups on one thread that all hit. The peer is a table without a policy.
- ``eviction.p99``: the 99th percentile of lookups in microseconds while a writer evicts all the time. The peer is a
  table without a policy while a writer overwrites rows at full rate.
"""

import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.one_table import TABLE, table_model, write_table
from benchmarks.report import Record, parse_arguments, publish
from kernels.host import HostTable
from serving.parameter_server import FirstRows, ParameterServer, TierSettings
from serving.planner.policies import lru_curve, pinned_curve
from serving.storage import MemoryStore, RocksDbStore

DIM = 32
KEYS = 1664  # 64 samples of 26 keys
TARGET = 0.8
POLICIES = ("evict_random", "evict_least_used", "evict_oldest")
STILL = {"memory": TierSettings(first_rows=FirstRows(cache_rate=0.0))}  # promotion fills it


def main():
    arguments = parse_arguments(__doc__)
    table_rows, batches = (10_000, 20) if arguments.quick else (400_000, 1500)
    fetch_rows, rounds, calls = (20_000, 1, 50) if arguments.quick else (10_000_000, 5, 1500)
    with tempfile.TemporaryDirectory() as name:
        records = hit_rates(Path(name), table_rows, batches)
    records += reader_costs(fetch_rows, rounds, calls)
    publish(records, arguments.json)


def hit_rates(folder, table_rows, batches):
    rows = np.random.default_rng(0).standard_normal((table_rows, DIM), dtype=np.float32)
    write_table(folder / "t", np.arange(table_rows), lambda keys: rows[keys])
    weights = 1 / np.arange(1, table_rows + 1) ** 1.05
    places = np.random.default_rng(1).choice(table_rows, KEYS * batches, p=weights / weights.sum())
    trace = np.random.default_rng(2).permutation(table_rows)[places]
    bound, half = table_rows // 4, trace.size // 2
    best = float(pinned_curve(trace[half:], half).hit_rate(bound))
    least, most = lru_in_the_second_half(trace, [round(TARGET * bound), bound])
    records = []
    for policy in POLICIES:
        memory = MemoryStore(
            capacity_rows_of_each_table=bound, overflow_policy=policy, overflow_resolution_target=TARGET
        )
        database = RocksDbStore(folder / "db", num_threads=2)
        with ParameterServer([memory, database], promote=True, settings=STILL) as server:
            server.load_model(table_model(folder / "t", DIM, slots=26))
            serve(server, rows, trace[:half])
            before, rss = hits(server), rss_bytes()
            serve(server, rows, trace[half:])
            rate = (hits(server) - before) / half
            growth = (rss_bytes() - rss) / 2**20
            params = {
                "policy": policy,
                "evicted_rows": memory.tables[TABLE].evicted_rows,
                "rss_growth_mib": round(growth),
            }
        if policy == "evict_oldest":
            params |= {"plan_least": round(100 * least, 2), "plan_most": round(100 * most, 2)}
        records.append(Record.of("eviction.hit_rate", params, "%", [(100 * rate, 100 * best)]))
    return records


def lru_in_the_second_half(trace, bounds):
    """LRU's hit rate in the second half, after the first half."""
    half = trace.size // 2
    whole, first = lru_curve(trace, trace.size), lru_curve(trace[:half], half)
    return [float(whole.hits_at(bound) - first.hits_at(bound)) / half for bound in bounds]


def serve(server, rows, trace):
    for start in range(0, trace.size - KEYS + 1, KEYS):
        keys = trace[start : start + KEYS]
        answer, found = server.lookup(TABLE, keys)
        if not (found.all() and (answer == rows[keys]).all()):
            raise SystemExit("eviction: a wrong answer")
        server.wait_for_promotions()


def hits(server):
    return server.counters()[TABLE].hits.get("memory", 0)


def rss_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def reader_costs(table_rows, rounds, calls):
    plain, records = filled(None, table_rows), []
    for policy in POLICIES:
        table, rng = filled(policy, table_rows), np.random.default_rng(0)
        rates, slowest = [], []
        for _ in range(rounds):
            batches = [rng.integers(0, table_rows, 8 * KEYS) for _ in range(100)]
            rates.append((rate(table, batches), rate(plain, batches)))
        for _ in range(rounds):
            batches = [rng.integers(0, 2 * table_rows, KEYS) for _ in range(calls)]  # about half of them hit
            slowest.append(
                (p99_beside_writes(table, batches, 2 * table_rows), p99_beside_writes(plain, batches, table_rows))
            )
        params = {"policy": policy, "rows": table_rows, "dim": DIM}
        records.append(Record.of("eviction.fetch", params, "M rows/s", rates))
        records.append(Record.of("eviction.p99", params, "us", slowest))
    return records


def filled(policy, table_rows):
    table = HostTable(DIM, table_rows, "fp32", policy, round(TARGET * table_rows))
    ones = np.ones((65536, DIM), dtype=np.float32)
    for start in range(0, table_rows, 65536):
        keys = np.arange(start, min(start + 65536, table_rows))
        table.insert(keys, ones[: keys.size])
    return table


def rate(table, batches):
    out = np.empty((batches[0].size, DIM), dtype=np.float32)
    begin = time.perf_counter()
    for keys in batches:
        table.fetch(keys, out)
    return len(batches) * batches[0].size / (time.perf_counter() - begin) / 1e6


def p99(table, batches):
    out, took = np.empty((KEYS, DIM), dtype=np.float32), []
    for keys in batches:
        begin = time.perf_counter()
        table.fetch(keys, out)
        took.append(time.perf_counter() - begin)
    return float(np.quantile(took, 0.99)) * 1e6


def p99_beside_writes(table, batches, keys):
    """The 99th percentile while a thread inserts keys 0 to ``keys`` - 1 over and over."""
    stop = threading.Event()

    def write():
        next_key, ones = table.capacity_rows, np.ones((4096, DIM), dtype=np.float32)
        while not stop.is_set():
            table.insert((next_key + np.arange(4096)) % keys, ones)
            next_key += 4096

    writer = threading.Thread(target=write)
    writer.start()
    try:
        return p99(table, batches)
    finally:
        stop.set()
        writer.join()


if __name__ == "__main__":
    main()
