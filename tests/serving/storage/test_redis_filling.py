"""Redis is filled: keys are removed meanwhile, and a batch of rows takes longer than a lease."""

import numpy as np
import pytest

from serving.errors import StoreUnreachableError
from serving.storage.redis import marker as scripts
from tests.serving.storage.redis_stores import KEYS, SPEC, Truth, fetch, found_in, open_store
from tests.tools.redis_servers import wait_until

PARTITIONS = 16
FILLINGS = {
    "load": lambda store, truth: store.table(SPEC).load(truth.batches(), truth.marker(), keep=False),
    "fill": lambda store, truth: store.table(SPEC).fill(truth, starting=True),
}


def cache(server, truth):
    store = open_store(server)
    store.table(SPEC).serve_as_cache(truth)
    return store


def test_a_key_that_is_removed_while_its_partition_is_filled_does_not_come_back(redis_server):
    other = cache(redis_server, Truth())
    removed = np.array([0, 1, 998, 999])  # from both halves
    truth = Truth(act=lambda: other.tables[SPEC.name].evict(removed))
    store = cache(redis_server, truth)

    assert store.table(SPEC).fill(truth, starting=True)

    assert store.tables[SPEC.name].is_whole
    assert found_in(store, KEYS).sum() == KEYS.size - removed.size
    assert not found_in(store, removed).any()


def test_a_key_that_is_removed_and_inserted_again_while_its_partition_is_filled_has_the_new_row(redis_server):
    other, key, row = cache(redis_server, Truth()), np.array([999]), np.full((1, 4), 7.0, dtype=np.float32)

    def change():
        other.tables[SPEC.name].evict(key)
        other.tables[SPEC.name].insert(key, row)

    truth = Truth(act=change)
    store = cache(redis_server, truth)
    store.table(SPEC).fill(truth, starting=True)

    out = np.empty((1, 4), dtype=np.float32)
    assert store.tables[SPEC.name].fetch(key, out).all()
    assert out.tolist() == row.tolist()


@pytest.mark.parametrize("verb", FILLINGS)
def test_leases_are_renewed_while_a_batch_of_rows_is_waited_for(redis_server, client, monkeypatch, verb):
    monkeypatch.setattr(scripts, "LEASE_MS", 3000)

    def wait():
        leases = client.keys("*.hotrow.lease")
        assert len(leases) == PARTITIONS
        for lease in leases:
            client.pexpire(lease, 2000)  # as a second does
        wait_until(lambda: all(client.pttl(lease) > 2000 for lease in leases), "the leases are renewed")

    truth = Truth(act=wait)
    store = cache(redis_server, truth)
    FILLINGS[verb](store, truth)

    assert not client.keys("*.hotrow.lease")
    fetch(store)


@pytest.mark.parametrize("verb", FILLINGS)
def test_a_lease_that_another_process_took_meanwhile_is_an_error_and_leaves_no_marker(redis_server, client, verb):
    lease = f"hps_et{{hps_et.{SPEC.name}/p3}}.hotrow.lease"
    truth = Truth(act=lambda: client.set(lease, "another process"))
    store = cache(redis_server, truth)

    with pytest.raises(StoreUnreachableError, match=r"/p3}v: its lease or its node was lost while it was filled"):
        FILLINGS[verb](store, truth)

    assert store.tables[SPEC.name].marker() is None
    assert client.get(lease) == b"another process"


def test_keys_that_were_removed_before_are_filled_again(redis_server, client):
    truth = Truth()
    store = cache(redis_server, truth)
    for name in [f"hps_et{{hps_et.{SPEC.name}/p{number}}}.hotrow.removed" for number in range(8)]:
        client.sadd(name, *(key.to_bytes(8, "little") for key in range(1000)))

    store.table(SPEC).fill(truth, starting=True)

    assert found_in(store, KEYS).all()
    assert not client.keys("*.hotrow.removed")
