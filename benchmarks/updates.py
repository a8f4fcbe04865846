"""Updating rows through Redis and RocksDB, against the same writes by redis-py and rocksdict.

Both sides take the same int64 keys and float32 rows and end on the same Redis server and the same disk. The peer writes
one rocksdict `WriteBatch`, syncs the log, then sends one redis-py pipeline with one HSET per hash that the keys touch.
Hotrow also checks the keys and values and records what a restart needs.

Targets: at least 0.8 of the peer's rows per second for 256 and 16,384 rows; at most twice its time for 1 row.
"""

import tempfile
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import rocksdict

from benchmarks.one_table import TABLE, raw_keys, raw_rows, table_model, tiers_file, vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish, take_turns
from benchmarks.rocksdb_peer import peer_options
from serving.parameter_server import ParameterServer
from tests.tools.redis_servers import RedisServer

DIM, PARTITIONS = 32, 16
#: Calls per round, by rows of one call.
CALLS = {1: 200, 256: 20, 16_384: 2}
FAMILY = "rows"


def main():
    arguments = parse_arguments(__doc__)
    rows, rounds, openings = (5000, 1, 1) if arguments.quick else (200_000, 15, 5)
    rng = np.random.default_rng(0)

    def draw(size):
        return rng.integers(0, rows, size), rng.normal(size=(size, DIM)).astype(np.float32)

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        redis_server = RedisServer(folder / "redis")
        stack.callback(redis_server.kill)
        client = stack.enter_context(redis_server.client())
        write_table(folder / "t", np.arange(rows), vectors_from)
        first = []
        for number in range(openings):  # a process pays some costs once, at its first update
            with opened(folder, number, client, redis_server.port, rows) as (insert, peer_insert, check):
                (took,) = take_turns(insert, peer_insert, [[draw(1)]])
                first.append(tuple(1e3 * seconds for seconds in took))
                if number == openings - 1:
                    records = [
                        *(measure(size, insert, peer_insert, draw, rounds) for size in CALLS),
                        Record.of("updates.first", {"rows": 1}, "ms", first),
                        count_commands(client, insert, peer_insert, draw),
                    ]
                    check(*draw(1000))
    publish(records, arguments.json)


@contextmanager
def opened(folder, number, client, port, rows):
    """Open both sides with empty databases and load the table; yield their inserts and a check of both."""
    client.flushall()
    redis = {"type": "redis_cluster", "address": f"127.0.0.1:{port}", "num_partitions": PARTITIONS}
    disk = {"type": "rocks_db", "path": f"database{number}", "num_threads": 2}
    tiers = tiers_file(folder, volatile_db=redis, persistent_db=disk)
    with ParameterServer.from_config(tiers) as server, closing(Peer(folder / f"peer{number}", client)) as peer:
        server.load_model(table_model(folder / "t", DIM))
        peer.insert(np.arange(rows), vectors_from(np.arange(rows)))
        insert = partial(server.insert, TABLE)

        def check(keys, vectors):
            insert(keys, vectors)
            peer.insert(keys, vectors)
            last = dict(zip(keys.tolist(), vectors, strict=True))
            answer, found = server.lookup(TABLE, keys)
            if not found.all() or (answer != np.stack([last[key] for key in keys.tolist()])).any():
                raise SystemExit("the parameter server's answer is wrong")
            if any(set(peer.row(key)) != {last[int(key)].tobytes()} for key in keys):
                raise SystemExit("the peer's answer is wrong")

        yield insert, peer.insert, check


class Peer:
    """rocksdict and redis-py."""

    def __init__(self, folder, client):
        options = peer_options()
        self.database = rocksdict.Rdict(str(folder), options)
        self.family = self.database.create_column_family(FAMILY, options)
        self.handle = self.database.get_column_family_handle(FAMILY)
        self.client = client

    def insert(self, keys, vectors):
        """Write rows to both."""
        fields, values = raw_keys(keys), raw_rows(vectors)
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.set_default_column_family(self.handle)
        for key, row in zip(fields, values, strict=True):
            batch[key] = row
        self.database.write(batch)
        self.database.flush_wal(True)
        items = {}
        for place, key, row in zip((keys % PARTITIONS).tolist(), fields, values, strict=True):
            items.setdefault(place, []).extend((key, row))
        pipeline = self.client.pipeline(transaction=False)
        for place, words in items.items():
            pipeline.hset(f"peer{place}", items=words)
        pipeline.execute()

    def row(self, key):
        """The row of ``key`` as bytes, from both."""
        raw = key.tobytes()
        return self.family[raw], self.client.hget(f"peer{key % PARTITIONS}", raw)

    def close(self):
        self.family.close()
        self.database.close()


def measure(size, ours, peer, draw, rounds):
    """Time of one call for 1 row; rows per second for more."""
    calls = CALLS[size] if rounds > 1 else 1
    took = take_turns(ours, peer, [[draw(size) for _ in range(calls)] for _ in range(rounds + 1)])[1:]
    if size == 1:
        pairs, unit = [tuple(1e6 * seconds / calls for seconds in one) for one in took], "us"
    else:
        pairs, unit = [tuple(size * calls / seconds / 1e3 for seconds in one) for one in took], "krow/s"
    return Record.of("updates.insert", {"rows": size, "dim": DIM}, unit, pairs)


def count_commands(client, ours, peer, draw):
    """Redis commands of one update of 1 row, those of scripts included."""

    def commands():
        stats = client.info("commandstats")
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items() if name != "cmdstat_info"}

    pairs, by_name = [], {}
    for _ in range(9):
        counts = []
        for call in (ours, peer):
            before = commands()
            call(*draw(1))
            used = {name: calls - before.get(name, 0) for name, calls in commands().items()}
            counts.append(sum(used.values()))
            if call is ours:
                by_name = {name: calls for name, calls in used.items() if calls}
        pairs.append(tuple(counts))
    names = " ".join(f"{name}:{calls}" for name, calls in sorted(by_name.items()))
    return Record.of("updates.commands", {"rows": 1, "names": names}, "calls", pairs)


if __name__ == "__main__":
    main()
