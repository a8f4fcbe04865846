"""Reading rows from the Redis tier, against redis-py's cluster client on the same cluster.

The first peer reads the same rows under plain keys with ``mget_nonatomic`` and gets a list of bytes. Hotrow takes an
int64 array and returns float32 rows and a mask of the found keys. The second peer shows the worth of the hashes alone:
redis-py's pipeline of HMGET on Hotrow's own hashes. Three masters and the client share the machine.
Target: ratio >= 8 to the first peer for 26,624 keys.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.one_table import TABLE, raw_keys, raw_rows, table_model, tiers_file, vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish, take_turns
from serving.parameter_server import ParameterServer
from tests.tools.redis_servers import RedisServers

DIM = 32
PARTITIONS = 16


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds, keys_per_round = (5000, 2, 1) if arguments.quick else (300_000, 15, 60_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = RedisServers(folder / "redis", masters=3)
        try:
            write_table(folder / "t", np.arange(rows), vectors_from)
            redis = {
                "type": "redis_cluster",
                "address": f"127.0.0.1:{cluster.nodes[0].port}",
                "num_partitions": PARTITIONS,
            }
            tiers = tiers_file(folder, volatile_db=redis, persistent_db={"type": "disabled"})
            with ParameterServer.from_config(tiers) as server:
                server.load_model(table_model(folder / "t", DIM))
                records = run(server.stores[0], cluster, rows, rounds, keys_per_round)
        finally:
            cluster.kill()
    publish(records, arguments.json)


def run(store, cluster, rows, rounds, keys_per_round):
    client = cluster.client()
    for start in range(0, rows, 10_000):
        keys = np.arange(start, min(start + 10_000, rows))
        client.mset_nonatomic(dict(zip(raw_keys(keys), raw_rows(vectors_from(keys)), strict=True)))
    peers = {"mget": lambda keys: client.mget_nonatomic(raw_keys(keys)), "hmget": lambda keys: hmget(client, keys)}
    records = []
    for name, peer in peers.items():
        check(store, peer, rows)
        records += [
            measure(store, name, peer, rows, size, rounds, max(keys_per_round // size, 1)) for size in (1024, 26_624)
        ]
    client.close()
    return records


def hmget(client, keys):
    """Rows of ``keys``, by partition, through redis-py's pipeline."""
    places = rrmxmx(keys) % np.uint64(PARTITIONS)
    pipeline = client.pipeline()
    for number in range(PARTITIONS):
        wanted = keys[places == number]
        if wanted.size:
            pipeline.hmget(f"hps_et{{hps_et.{TABLE}/p{number}}}v", raw_keys(wanted))
    return [value for values in pipeline.execute() for value in values]


def rrmxmx(keys):
    """Pelle Evensen's hash, by which HPS chooses a key's partition."""

    def rotated(x, bits):
        return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))

    x = keys.view(np.uint64)
    x = (x ^ rotated(x, 25) ^ rotated(x, 50)) * np.uint64(0xA24BAED4963EE407)
    x = (x ^ rotated(x, 24) ^ rotated(x, 49)) * np.uint64(0x9FB21C651E98DF25)
    return x ^ (x >> np.uint64(28))


def check(store, peer, rows):
    """Both must answer right. The peer may answer in any order."""
    keys = np.random.default_rng(0).integers(0, rows, 5000)
    out = np.full((keys.size, DIM), np.nan, dtype=np.float32)
    if not store.tables[TABLE].fetch(keys, out).all() or (out != vectors_from(keys)).any():
        raise SystemExit("the store's answer is wrong")
    if sorted(peer(keys)) != sorted(raw_rows(vectors_from(keys))):
        raise SystemExit("the peer's answer is wrong")


def measure(store, name, peer, rows, size, rounds, calls):
    """Millions of rows per second."""
    rng = np.random.default_rng(1)
    out = np.empty((size, DIM), dtype=np.float32)
    batches = [[(rng.integers(0, rows, size),) for _ in range(calls)] for _ in range(rounds)]
    took = take_turns(lambda keys: store.tables[TABLE].fetch(keys, out), peer, batches)
    rates = [tuple(calls * size / seconds / 1e6 for seconds in pair) for pair in took]
    return Record.of(f"redis_store.fetch_vs_{name}", {"rows": rows, "dim": DIM, "keys": size}, "Mrow/s", rates)


if __name__ == "__main__":
    main()
