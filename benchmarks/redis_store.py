"""Reading rows from the Redis tier, against redis-py's cluster client and plain keys, on the same cluster.

The peer reads the same rows under keys of their own with ``mget_nonatomic`` and gets a list of bytes; ours takes an
int64 array and returns float32 rows and which keys were found. Three masters, the client and both layouts share the
machine. A second peer shows what the layout alone is worth: redis-py's pipeline of HMGET on the same hashes as ours.
Target: ratio >= 8 for 26,624 keys.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.redis_servers import RedisServers
from benchmarks.report import Record, parse_arguments, publish
from serving.config import RedisConfig
from serving.storage import RedisStore, TableSpec
from serving.storage.hps_layout import key_list, mix, row_list
from serving.storage.redis.commands import Partition

DIM = 32
TABLE = "model.table"
PARTITIONS = 16


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds = (20_000, 3) if arguments.quick else (300_000, 15)
    with tempfile.TemporaryDirectory() as folder:
        cluster = RedisServers(Path(folder), masters=3)
        try:
            records = run(cluster, rows, rounds)
        finally:
            cluster.kill()
    publish(records, arguments.json)


def run(cluster, rows, rounds):
    store = RedisStore(RedisConfig(addresses=(cluster.nodes[0].address,), num_partitions=PARTITIONS))
    keys = np.arange(rows)
    store.bulk_load(TableSpec(TABLE, DIM), iter([(keys, vectors_of(keys))]), "benchmark")
    client = cluster.client()
    for start in range(0, rows, 10_000):
        part = keys[start : start + 10_000]
        client.mset_nonatomic(dict(zip(key_list(part, 8), row_list(vectors_of(part)), strict=True)))
    peers = {"mget": lambda one: client.mget_nonatomic(key_list(one, 8)), "hmget": lambda one: hmget(client, one)}
    records = []
    for name, peer in peers.items():
        check(store, peer, rows)
        for size in (1024, 26_624):
            records.append(measure(store, name, peer, rows, size, rounds))
    client.close()
    store.close()
    return records


def hmget(client, keys):
    """Rows of ``keys``, by partition, through redis-py's pipeline."""
    places = mix(keys) % np.uint64(PARTITIONS)
    pipeline = client.pipeline()
    for number in range(PARTITIONS):
        wanted = keys[places == number]
        if wanted.size:
            pipeline.hmget(Partition(TABLE, number).values, key_list(wanted, 8))
    return [value for values in pipeline.execute() for value in values]


def vectors_of(keys):
    """Rows that can be told from the key."""
    return (keys[:, None] * 0.5 + np.arange(DIM)).astype(np.float32)


def check(store, peer, rows):
    """Both must answer right, in whatever order the peer does."""
    keys = np.random.default_rng(0).integers(0, rows, 5000)
    out = np.full((keys.size, DIM), np.nan, dtype=np.float32)
    if not store.fetch(TABLE, keys, out).all() or (out != vectors_of(keys)).any():
        raise SystemExit("the store's answer is wrong")
    if sorted(peer(keys)) != sorted(row_list(vectors_of(keys))):
        raise SystemExit("the peer's answer is wrong")


def measure(store, name, peer, rows, size, rounds):
    """Rows per second, in millions; the two take turns in going first."""
    rng = np.random.default_rng(1)
    out = np.empty((size, DIM), dtype=np.float32)
    repeats = max(60_000 // size, 1)
    rates = []
    for number in range(rounds):
        keys = [rng.integers(0, rows, size) for _ in range(repeats)]
        took = {}
        for which in ("ours", "peer") if number % 2 else ("peer", "ours"):
            begin = time.perf_counter()
            for one in keys:
                if which == "ours":
                    store.fetch(TABLE, one, out)
                else:
                    peer(one)
            took[which] = time.perf_counter() - begin
        rates.append(tuple(repeats * size / took[which] / 1e6 for which in ("ours", "peer")))
    return Record.of(f"redis_store.fetch_vs_{name}", {"rows": rows, "dim": DIM, "keys": size}, "Mrow/s", rates)


if __name__ == "__main__":
    main()
