"""What tests of the Redis tier share: stores that close when a test ends, and rows to load and to read back."""

import numpy as np

from serving.config import RedisConfig
from serving.storage import Marker, RedisStore, TableSpec
from tests.tools.redis_servers import wait_until

SPEC = TableSpec("model.table", 4)
KEYS = np.arange(1000)
ROWS = (KEYS[:, None] + np.arange(4)).astype(np.float32)
# For tests in which a node stays silent. The other tests wait longer, because a node may be slow.
IMPATIENT = {"timeout_ms": 1000, "connect_timeout_ms": 500}
PATIENT = {"timeout_ms": 30_000, "connect_timeout_ms": 30_000}
OPENED = []


class Truth:
    """A source of truth that has these rows; a test may ``act`` after it has given half of them."""

    writes = True

    def __init__(self, keys=KEYS, rows=ROWS, act=lambda: None):
        self._keys, self._rows, self._act = keys, rows, act

    def marker(self):
        return Marker("digest", self._keys.size)

    def batches(self):
        half = self._keys.size // 2
        yield self._keys[:half], self._rows[:half]
        self._act()
        yield self._keys[half:], self._rows[half:]

    def insert_absent(self, keys, rows):
        raise AssertionError("Redis has no rows of its own")


def open_store(server, **options):
    """Open a store that waits long unless ``options`` say otherwise; it is closed when the test ends."""
    OPENED.append(RedisStore(RedisConfig(addresses=(server.address,), **(PATIENT | options))))
    return OPENED[-1]


def loaded_store(server, **options):
    store = open_store(server, **options)
    store.table(SPEC).load(iter([(KEYS, ROWS)]), Marker("digest"), keep=False)
    return store


def fetch(store, keys=KEYS):
    """Fetch rows, all of which must be there and right."""
    out = np.full((keys.size, 4), np.nan, dtype=np.float32)
    found = store.tables[SPEC.name].fetch(keys, out)
    assert found.all()
    assert (out == ROWS[keys]).all()


def found_in(store, keys):
    """Which of ``keys`` a store holds."""
    return store.tables[SPEC.name].fetch(np.asarray(keys), np.empty((len(keys), 4), dtype=np.float32))


def evicted_rows(store, table=SPEC.name):
    """Rows that a store says it has evicted from a table."""
    return next(sample.value for sample in store.tables[table].samples() if sample.name == "hotrow_tier_evicted_rows")


def assert_served(server, model):
    """Look up every row of the model "dcn", all of which must be there and right."""
    for index, rows in enumerate(model.tables):
        answer, found = server.lookup(f"dcn.table{index}", np.array(list(rows), dtype=np.int64))
        assert found.all()
        assert answer.tobytes() == b"".join(row.tobytes() for row in rows.values())


def wait_for_master(node):
    """Wait until a node of a cluster is a master."""
    with node.client() as client:
        wait_until(lambda: client.info("replication")["role"] == "master", f"port {node.port} is a master")


def said(caplog, what):
    """The beginnings of the log lines that contain ``what``."""
    return [line.partition(":")[0] for line in caplog.messages if what in line]
