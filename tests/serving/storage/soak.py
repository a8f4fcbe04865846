"""The processes of the soak test: one changes and serves rows, others follow, and all check what they read.

``python -m tests.serving.storage.soak serve|follow FOLDER REDIS_PORT`` says "open" and works. It answers each line
"report" with a line of JSON, and ends at another line, or with the first answer that was wrong.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.scale import anonymous_bytes
from serving.config import RedisConfig, RedisOverflow
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore, RedisStore, RocksDbStore
from serving.storage.rocksdb import engine as rocksdb_engine
from tests.serving.small_server import errors_of, model_of
from tests.serving.storage.redis_stores import evicted_rows
from tests.tools.redis_servers import wait_until

TABLE, DIM = "m.t", 16
KEYS, FILE_ROWS = 40_000, 30_000  # the other keys are new ones
MEMTABLE_BYTES = 2**20  # so that each is written out every few seconds
RAM_ROWS, REDIS_PARTITION_ROWS, REDIS_PARTITIONS = 4_000, 4_000, 4
WRITERS, READERS = 2, 3
MOST_BATCH_KEYS = 400
# Rows that changed while they waited for their promotion are dropped. So that most are not: how long a writer rests,
# and after how many calls a reader lets the promotions so far happen.
PAUSE_S, CALLS_TO_PROMOTE = 0.05, 8
# A pause after each call of a reader, so that restarts get processor time on a small machine.
REST_S = 0.005
REFILL_DEADLINE_S = 300.0  # on a machine that does other work, too
REMOVAL = 3  # of every four changes of a key, the one that removes it


class Oracle:
    """The latest change of every key that was begun, and the latest that was acknowledged, for all processes.

    Changes of a key are numbered. Change n leaves a row that only this key has after n, or none (``REMOVAL``). A key
    has one writer, so what a reader may be given are the changes from the one that was acknowledged before it asked
    to the one that had begun when it was answered.
    """

    def __init__(self, folder: Path):
        """Map the two numbers of every key."""
        self.begun, self.acknowledged = np.memmap(folder / "oracle", np.int64, "r+", shape=(2, KEYS))

    @staticmethod
    def make(folder: Path):
        """Write it as it is before the first change: a key that is not in the file counts as removed."""
        before = np.where(np.arange(KEYS) < FILE_ROWS, 0, REMOVAL)
        np.stack([before, before]).astype(np.int64).tofile(folder / "oracle")

    def check(self, keys, rows, found, least):
        """Refuse an answer of which a row is older than change ``least``, not begun, another key's, or not whole."""
        newest = self.begun[keys]
        changes = np.where(found, rows[:, 0].astype(np.int64), newest - (newest - REMOVAL) % 4)
        expected = np.where(found[:, None], rows_of(keys, changes), 0)
        right = (rows == expected).all(axis=1) & (found == is_there(changes)) & (least <= changes) & (changes <= newest)
        if not right.all():
            at = np.argmin(right)
            raise AssertionError(
                f"key {keys[at]}: expected one of the changes {least[at]} to {newest[at]}, "
                f"got {rows[at].tolist() if found[at] else 'no row'}"
            )

    def changed_keys(self):
        """How many keys were changed."""
        return int(np.count_nonzero(self.acknowledged != np.where(np.arange(KEYS) < FILE_ROWS, 0, REMOVAL)))

    def check_all(self, server):
        """Refuse anything but the last change of every key; nothing is being changed."""
        keys = np.arange(KEYS)
        self.check(keys, *server.lookup(TABLE, keys), least=self.acknowledged[keys])


def rows_of(keys, changes):
    """The number of the change, and values that hold for no other key: whole numbers, exact in float32."""
    columns = np.arange(1, DIM)
    values = (keys[:, None] * columns + changes[:, None] * (7919 * columns + 1)) % 65_521
    return np.column_stack([changes, values]).astype(np.float32)


def is_there(changes):
    """Whether a key has a row after its change: bool[N]."""
    return changes % 4 != REMOVAL


def model_in(folder):
    """The model whose one table is written in ``folder``."""
    model = model_of(folder)
    return model.model_copy(update={"tables": (model.tables[0].model_copy(update={"dim": DIM}),)})


def redis_of(port):
    """Redis with room for less than half of the rows; it may be silent for as long as a fault lasts."""
    overflow = RedisOverflow(margin_rows=REDIS_PARTITION_ROWS, policy="least_used")
    where = (("127.0.0.1", port),)
    config = RedisConfig(addresses=where, num_partitions=REDIS_PARTITIONS, timeout_ms=300, overflow=overflow)
    return RedisStore(config, may_be_late=True)


def some_keys(rng, count):
    """Keys, some of which come often, as in requests."""
    return (count * rng.random(int(rng.integers(1, MOST_BATCH_KEYS))) ** 3).astype(np.int64)


def change(server, oracle, number, stop):
    """Change rows of this writer's keys; RocksDB takes every change, whatever Redis does."""
    rng = np.random.default_rng(number)
    while not stop.wait(PAUSE_S):
        keys = np.unique(some_keys(rng, KEYS // WRITERS)) * WRITERS + number
        changes = oracle.acknowledged[keys] + 1
        oracle.begun[keys] = changes
        stays = is_there(changes)
        kept, gone = keys[stays], keys[~stays]
        server.insert(TABLE, kept, rows_of(kept, changes[stays]))
        server.evict(TABLE, gone)
        oracle.acknowledged[keys] = changes


def read(server, oracle, seed, stop, is_current=True):
    """Look up rows, and bags of one row each; with ``is_current``, none may be older than was acknowledged before."""
    rng = np.random.default_rng(seed)
    calls = 0
    while not stop.wait(REST_S):
        keys = some_keys(rng, KEYS)
        least = oracle.acknowledged[keys] if is_current else np.zeros_like(keys)
        if calls % 2:
            answer = server.lookup(TABLE, keys)
        else:
            answer = server.lookup_pooled(TABLE, keys, np.arange(keys.size + 1), "sum")
        oracle.check(keys, *answer, least)
        calls += 1
        if calls % CALLS_TO_PROMOTE == 0:
            server.wait_for_promotions(timeout_s=1.0)


def work(report, *calls):
    """Run each call in a thread, with the event that ends it, and report until another line or an error comes."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(*call, stop) for call in calls]
        say("open")
        while sys.stdin.readline() == "report\n" and not any(future.done() for future in running):
            say(json.dumps(report()))
        stop.set()
        for future in running:
            future.result()


def say(line):
    """One line to whoever started the process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(heights, stop):
    """Add the anonymous memory of the process to ``heights``, second by second, in bytes."""
    while not stop.wait(1.0):
        heights.append(anonymous_bytes())


def serve(folder, port):
    """RAM and Redis, which evict rows, in front of a RocksDB that has all rows; rows are promoted."""
    oracle = Oracle(folder)
    rocksdb_engine.MEMTABLE_BYTES = MEMTABLE_BYTES
    before, heights = anonymous_bytes(), []
    memory = MemoryStore(capacity_rows=RAM_ROWS, overflow_policy="evict_least_used")
    redis = redis_of(port)
    rocksdb = RocksDbStore(folder / "db", num_threads=2)
    with ParameterServer([memory, redis, rocksdb], promote=True) as server:
        server.load_model(model_in(folder))
        oracle.check_all(server)  # an earlier process may have been killed during a change
        writers = [(change, server, oracle, number) for number in range(WRITERS)]
        readers = [(read, server, oracle, seed) for seed in range(READERS)]

        def report():
            counters = server.counters()[TABLE]
            return {
                "before_bytes": before,
                "heights_bytes": heights,
                "changed_keys": oracle.changed_keys(),
                "hits": counters.hits,
                "errors": errors_of(server, TABLE),
                "promoted_rows": [tier.promoted_rows for tier in counters.tiers],
                "refills": counters.tiers[1].refills,
                "evicted_rows": [evicted_rows(store, TABLE) for store in (memory, redis)],
            }

        work(report, (measure, heights), *writers, *readers)
        # Redis may have missed the last changes: on a busy machine it also misses changes without a fault.
        wait_until(lambda: redis.tables[TABLE].is_whole, "Redis has every change", REFILL_DEADLINE_S)
        oracle.check_all(server)
        return report()


def follow(folder, port):
    """The same Redis in front of a RocksDB that another process writes: rows may be old, but never torn."""
    oracle = Oracle(folder)
    before, heights = anonymous_bytes(), []
    rocksdb = RocksDbStore(folder / "db", read_only=True, num_threads=1, catch_up_interval_ms=100)
    with ParameterServer([redis_of(port), rocksdb]) as server:
        server.load_model(model_in(folder))

        def report():
            counters = server.counters()[TABLE]
            return {
                "before_bytes": before,
                "heights_bytes": heights,
                "hits": counters.hits,
                "refills": counters.tiers[0].refills,
            }

        work(report, (measure, heights), (lambda stop: read(server, oracle, 0, stop, is_current=False),))
        rocksdb.catch_up()
        oracle.check_all(server)
        return report()


if __name__ == "__main__":
    say(json.dumps({"serve": serve, "follow": follow}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
