"""A change that a tier missed when its process ended is noted in RocksDB until the tier has been given it."""

import numpy as np
import pytest

from serving.errors import StoreError
from serving.parameter_server.tier import TierSettings
from serving.storage import RocksDbStore
from tests.serving.small_server import KEYS, NEW, ROWS, DurableDictStore, rows_of, serve

FILE = dict(zip(KEYS, ROWS.tolist(), strict=True))
KEPT = {"cache": TierSettings(is_initialized=False)}  # initialize_after_startup: false


class Cache(DurableDictStore):
    """A tier in front that outlives servers, and does not take changes of the table while it ``refuses``."""

    refuses = False

    def insert(self, table, keys, rows):
        if self.refuses:
            raise StoreError(self.name, table, "refuses")
        super().insert(table, keys, rows)


@pytest.fixture
def cache():
    return Cache("cache")


@pytest.fixture
def start(config, cache, tmp_path):
    """Serve as a process does that starts anew."""
    return lambda **options: serve(config, cache, RocksDbStore(tmp_path / "db", num_threads=1), **options)


def miss_a_change(server, cache, key):
    cache.refuses = True
    with pytest.raises(StoreError, match="refuses"):
        server.insert("m.t", np.array([key]), NEW)
    cache.refuses = False


def test_a_server_that_leaves_the_tier_as_it_is_leaves_the_note_of_another_for_the_next_that_loads_it(start, cache):
    with start() as server:
        miss_a_change(server, cache, 1)
    with start(settings=KEPT) as server:
        assert rows_of(cache)[1] == FILE[1]  # as it was left
        server.insert("m.t", np.array([2]), NEW)

    with start() as server:
        expected = FILE | {key: NEW[0].tolist() for key in (1, 2)}
        assert rows_of(server) == rows_of(cache) == expected


def test_what_the_tier_had_to_forget_is_in_it_again_after_the_next_start(start, cache):
    expected = FILE | {1: NEW[0].tolist()}
    with start() as server:
        miss_a_change(server, cache, 1)
        assert rows_of(server) == expected
        assert 1 not in rows_of(cache)

    with start():
        assert rows_of(cache) == expected


def test_a_server_that_loads_the_tier_or_gives_it_a_change_after_all_clears_the_note(start, cache, monkeypatch):
    with start() as server:
        miss_a_change(server, cache, 1)
        server.insert("m.t", np.array([1]), NEW)
        expected = rows_of(server)

    monkeypatch.setattr(Cache, "bulk_load", lambda *_, **__: pytest.fail("loaded again"))
    for settings in (None, KEPT, None):
        with start(settings=settings) as server:
            server.insert("m.t", np.array([1]), NEW)
            assert rows_of(server) == rows_of(cache) == expected
