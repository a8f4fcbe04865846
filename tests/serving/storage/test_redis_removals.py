"""Keys that are removed from Redis while another process fills it from the source of truth."""

import numpy as np

from serving.storage.store import Marker
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, found_in, open_store


class Truth:
    """A source of truth that lets the test act after half of its rows."""

    def __init__(self, act=lambda: None):
        self._act = act

    def marker(self):
        return Marker("digest", KEYS.size, changed=True)

    def batches(self):
        half = KEYS.size // 2
        yield KEYS[:half], ROWS[:half]
        self._act()
        yield KEYS[half:], ROWS[half:]

    def take(self, keys, rows):
        raise AssertionError("Redis has no rows of its own")


def cache(server, truth):
    store = open_store(server)
    store.serve_as_cache(SPEC, truth)
    return store


def test_a_key_that_is_removed_while_its_partition_is_filled_does_not_come_back(redis_server):
    other = cache(redis_server, Truth())
    removed = np.array([0, 1, 998, 999])  # from both halves
    truth = Truth(lambda: other.evict(SPEC.name, removed))
    store = cache(redis_server, truth)

    assert store.fill(SPEC, truth, starting=True)

    assert store.is_whole(SPEC.name)
    assert found_in(store, KEYS).sum() == KEYS.size - removed.size
    assert not found_in(store, removed).any()


def test_a_key_that_is_removed_and_inserted_again_while_its_partition_is_filled_has_the_new_row(redis_server):
    other, key, row = cache(redis_server, Truth()), np.array([999]), np.full((1, 4), 7.0, dtype=np.float32)

    def change():
        other.evict(SPEC.name, key)
        other.insert(SPEC.name, key, row)

    truth = Truth(change)
    store = cache(redis_server, truth)
    store.fill(SPEC, truth, starting=True)

    out = np.empty((1, 4), dtype=np.float32)
    assert store.fetch(SPEC.name, key, out).all()
    assert out.tolist() == row.tolist()


def test_keys_that_were_removed_before_are_filled_again(redis_server, client):
    truth = Truth()
    store = cache(redis_server, truth)
    for name in [f"hps_et{{hps_et.{SPEC.name}/p{number}}}.hotrow.removed" for number in range(8)]:
        client.sadd(name, *(key.to_bytes(8, "little") for key in range(1000)))

    store.fill(SPEC, truth, starting=True)

    assert found_in(store, KEYS).all()
    assert not client.keys("*.hotrow.removed")
