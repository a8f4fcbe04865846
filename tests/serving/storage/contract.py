"""What the contract tests of the tiers share: Redis in front of RocksDB, and the rows that a server must answer."""

import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from serving.config import RedisConfig
from serving.errors import ServingError, StoreError
from serving.storage import RedisStore, RocksDbStore
from tests.serving.small_server import KEYS, ROWS, UNKNOWN, held_by, rows_of, serve
from tests.serving.storage.redis_stores import OPENED, open_store
from tests.tools.redis_servers import DEADLINE_S, SLOTS, wait_until
from tests.tools.warm import Warm

TABLE = "m.t"
STARTS, ENDS = "tier redis does not answer, model 'm'", "tier redis answers again, model 'm'"
PARTITIONS = 4
FILE = {key: row.tolist() for key, row in zip(KEYS, ROWS, strict=True)}
ROOT = Path(__file__).parents[3]


def redis_of(server, **options):
    """Open a Redis tier of few partitions; it is closed when the test ends."""
    return open_store(server, num_partitions=PARTITIONS, **options)


def late_redis(address, **options):
    """A Redis tier whose server may be down now."""
    config = RedisConfig(addresses=(address,), num_partitions=PARTITIONS, **options)
    OPENED.append(RedisStore(config, may_be_late=True))
    return OPENED[-1]


def rocksdb_in(folder, **options):
    return RocksDbStore(folder, num_threads=1, **options)


def nodes_of(two_masters, slot):
    """The node that has the slot at first, and the other node."""
    return two_masters.nodes if slot < SLOTS // 2 else two_masters.nodes[::-1]


@contextmanager
def moving(two_masters, slot):
    """A slot that moves to the other node until the block ends, as redis-cli moves it; gives what moves its keys."""
    source, target = [node.client() for node in nodes_of(two_masters, slot)]
    names = source.cluster("MYID").decode(), target.cluster("MYID").decode()
    target.cluster("SETSLOT", slot, "IMPORTING", names[0])
    source.cluster("SETSLOT", slot, "MIGRATING", names[1])

    def move():
        while keys := source.cluster("GETKEYSINSLOT", slot, 100):
            source.migrate("127.0.0.1", nodes_of(two_masters, slot)[1].port, keys, 0, 5000)

    yield move
    move()
    for client in (target, source):
        client.cluster("SETSLOT", slot, "NODE", names[1])
        client.close()


def move_slot(two_masters, slot):
    with moving(two_masters, slot):
        pass


class Server:
    """A parameter server, and every row that it was asked to write.

    Of several servers on one Redis, each checks its ``own`` keys, which the others do not write.
    """

    def __init__(self, server, rows=FILE, own=(*KEYS, *UNKNOWN)):
        self.server, self.stores, self.close = server, server.stores, server.close
        self._written = {key: [rows.get(key)] for key in own}  # by key, oldest first; None: evicted
        self._acknowledged = dict.fromkeys(self._written, 0)  # the place of the last acknowledged row

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def rows(self):
        """{key: row} after the last change."""
        return {key: rows[-1] for key, rows in self._written.items() if rows[-1] is not None}

    @property
    def tier(self):
        """What the server counted of its first tier."""
        return self.server.counters()[TABLE].tiers[0]

    def insert(self, keys, value):
        """Insert rows that have ``value`` everywhere."""
        rows = np.full((len(keys), 3), value, dtype=np.float32)
        self._change(keys, rows[0].tolist(), lambda: self.server.insert(TABLE, np.array(keys), rows))

    def evict(self, keys):
        self._change(keys, None, lambda: self.server.evict(TABLE, np.array(keys)))

    def check(self):
        """Look up every own key; no row may be older than the last that was acknowledged before."""
        oldest = dict(self._acknowledged)
        answer = rows_of(self.server, list(self._written))
        for key, rows in self._written.items():
            assert answer.get(key) in rows[oldest[key] :], key

    def wait_until(self, holds, what):
        """Look up every key until ``holds()``."""

        def is_so():
            self.check()
            return holds()

        wait_until(is_so, what)

    def wait_for_redis(self):
        """Look up every key until Redis holds every row and answers alone."""

        def is_filled():
            try:
                return self.stores[0].tables[TABLE].is_whole and held_by(self.stores[0]) == self.rows
            except StoreError:  # it does not answer yet
                return False

        self.wait_until(is_filled, "Redis holds every row")

        def answers_alone():
            before = self.tier.hits
            self.check()
            return self.tier.hits - before >= len(self.rows)  # a thread may ask, too

        wait_until(answers_alone, "Redis answers every key")

    @contextmanager
    def asked(self):
        """Look up every key all the while, in a thread, whose errors are raised at the end."""
        stop, errors, answers = threading.Event(), [], []

        def ask():
            while not stop.is_set():
                try:
                    self.check()
                except (AssertionError, ServingError) as err:
                    errors.append(err)
                    return
                answers.append(1)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield lambda: len(answers)
        finally:
            stop.set()
            thread.join(DEADLINE_S)
        if errors:
            raise errors[0]
        assert answers

    def _change(self, keys, row, change):
        for key in keys:
            self._written[key].append(row)
        change()
        for key in keys:
            self._acknowledged[key] = len(self._written[key]) - 1


def serve_in_front(config, redis, folder, rows=FILE, **options):
    """Serve a model from Redis in front of RocksDB."""
    return Server(serve(config, redis, rocksdb_in(folder)), rows, **options)


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from serving.config import RedisConfig
from serving.storage import RedisStore, RocksDbStore
from serving.storage.rocksdb.table import RocksDbTable
from tests.serving.small_server import hooked, model_of, serve
from tests.serving.storage.contract import PARTITIONS, TABLE

class Stopping(hooked(RocksDbStore, RocksDbTable)):
    stops = ""

    def write(self, changes, reached=None):
        super().write(changes, reached)
        self.stop("change")

    def on_items(self, table, batch_rows=65536):
        for number, batch in enumerate(super().on_items(table, 3)):
            if number == 2:
                self.stop("items")
            yield batch

    def stop(self, at):
        print("taken", flush=True)
        if Stopping.stops == at:
            time.sleep(600)

port, folder, database = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
rocksdb = Stopping(database, num_threads=1)
redis = [RedisStore(RedisConfig(addresses=(("127.0.0.1", port),), num_partitions=PARTITIONS, timeout_ms=60_000))]
server = serve(model_of(folder), *(redis if port else []), rocksdb)
print("ready", flush=True)
for line in sys.stdin:
    verb, *words = line.split()
    if verb == "insert":
        server.insert(TABLE, np.array([int(words[0])]), np.full((1, 3), float(words[1]), np.float32))
    elif verb == "evict":
        server.evict(TABLE, np.array([int(words[0])]))
    elif verb == "stop":
        Stopping.stops = words[0]
    elif verb == "lookup":
        server.lookup(TABLE, np.arange(1, 13))
    elif verb == "close":
        server.close()
    print("done", flush=True)
"""


class WriterProcess:
    """A process that serves Redis in front of RocksDB, or RocksDB alone without a ``port``; killed at the end."""

    def __init__(self, config, database, port=0):
        self._process = Warm("-c", WRITER, port, config.graph_file.parent, database)
        self._deadline = threading.Timer(DEADLINE_S, self._process.kill)
        self._deadline.start()

    def __enter__(self):
        self.expect("ready")
        return self

    def __exit__(self, *_):
        self._deadline.cancel()
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()

    def send(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def expect(self, word):
        """Read lines until this one."""
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise EOFError(f"the process ended before it printed {word!r}")

    def do(self, line):
        """Have the process do something, to its end."""
        self.send(line)
        self.expect("done")

    def kill(self):
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
