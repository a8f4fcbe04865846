"""What tests of the Redis tier share: stores that close when a test ends, and rows to load and to read back."""

import numpy as np

from serving.config import RedisConfig
from serving.storage import RedisStore, TableSpec

SPEC = TableSpec("model.table", 4)
KEYS = np.arange(1000)
ROWS = (KEYS[:, None] + np.arange(4)).astype(np.float32)
# For tests in which somebody stays silent.
IMPATIENT = {"timeout_ms": 200, "connect_timeout_ms": 100}
OPENED = []


def open_store(server, **options):
    """Open a store; it is closed when the test ends."""
    OPENED.append(RedisStore(RedisConfig(addresses=(server.address,), **options)))
    return OPENED[-1]


def loaded_store(server, **options):
    store = open_store(server, **options)
    store.bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")
    return store


def fetch(store, keys=KEYS):
    """Fetch rows, all of which must be there and right."""
    out = np.full((keys.size, 4), np.nan, dtype=np.float32)
    found = store.fetch(SPEC.name, keys, out)
    assert found.all()
    assert (out == ROWS[keys]).all()
