"""Processes that share a table in Redis must agree on ``num_partitions``, or they look for keys in the wrong place."""

import struct
import threading

import numpy as np
import pytest

from serving.errors import StoreError
from serving.model.hps_hash import mix
from serving.storage import Marker
from serving.storage.redis.commands import Partition
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, Truth, fetch, found_in, loaded_store, open_store

OTHERS = [8, 17, 32]
OTHER_NUMBER = "num_partitions differs: it was loaded with {}, but this process uses 16"


def load(server, digest="digest", **options):
    store = open_store(server, **options)
    store.table(SPEC).load(iter([(KEYS, ROWS)]), Marker(digest), keep=False)
    return store


@pytest.mark.parametrize("number", OTHERS)
def test_a_process_that_starts_with_another_number_over_the_same_files_is_refused(redis_server, number):
    first, second = loaded_store(redis_server), open_store(redis_server, num_partitions=number)

    assert second.table(SPEC).marker().digest == "digest"  # so the table is opened, and not loaded again
    with pytest.raises(StoreError, match="num_partitions differs"):
        second.table(SPEC).open(0)

    fetch(first)


@pytest.mark.parametrize("number", OTHERS)
def test_a_cache_with_another_number_over_the_same_files_is_refused(redis_server, number):
    first, second = loaded_store(redis_server), open_store(redis_server, num_partitions=number)
    second.table(SPEC).serve_as_cache(Truth())

    for starting in (True, False):
        with pytest.raises(StoreError, match="num_partitions differs"):
            second.table(SPEC).fill(Truth(), starting=starting)

    fetch(first)


@pytest.mark.parametrize("digest", ["digest", "retrained"])
@pytest.mark.parametrize("number", OTHERS)
def test_a_load_with_another_number_is_an_outage_to_processes_with_the_old_one(redis_server, number, digest):
    loaded, opened = loaded_store(redis_server), open_store(redis_server)
    opened.table(SPEC).open(0)

    new = load(redis_server, digest, num_partitions=number)

    for store in (loaded, opened):
        for key in KEYS[::7]:
            with pytest.raises(StoreError):
                found_in(store, [key])
        with pytest.raises(StoreError, match=OTHER_NUMBER.format(number)):
            found_in(store, KEYS)
    fetch(new)
    assert new.tables[SPEC.name].count() == KEYS.size


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_process_with_the_old_number_changes_nothing(redis_server, number, verb):
    old = loaded_store(redis_server)
    new = load(redis_server, num_partitions=number)
    changes = {
        "insert": lambda: old.tables[SPEC.name].insert(KEYS, ROWS + 1),
        "evict": lambda: old.tables[SPEC.name].evict(KEYS),
    }

    with pytest.raises(StoreError, match=OTHER_NUMBER.format(number)):
        changes[verb]()

    fetch(new)
    assert new.tables[SPEC.name].count() == KEYS.size
    assert new.tables[SPEC.name].marker().digest == "digest"
    opened_again = open_store(redis_server, num_partitions=number)
    opened_again.table(SPEC).open(0)
    fetch(opened_again)


@pytest.mark.parametrize(("first", "last"), [(16, 32), (32, 16)])
def test_a_process_that_waits_for_a_load_with_another_number_is_refused(redis_server, first, last):
    first_store = open_store(redis_server, num_partitions=first)
    last_store = open_store(redis_server, num_partitions=last)
    errors = []

    def load_the_other():
        try:
            last_store.table(SPEC).load(iter([(KEYS, ROWS)]), Marker("digest"), keep=True)
        except StoreError as err:
            errors.append(str(err))

    thread = threading.Thread(target=load_the_other)

    def batches():
        thread.start()
        yield KEYS, ROWS

    first_store.table(SPEC).load(batches(), Marker("digest"), keep=True)
    thread.join()

    assert len(errors) == 1
    assert "num_partitions differs" in errors[0]
    fetch(first_store)
    assert first_store.tables[SPEC.name].count() == KEYS.size


def test_a_cluster_is_watched_too(redis_cluster):
    store = loaded_store(redis_cluster.nodes[0])

    with pytest.raises(StoreError, match="num_partitions differs"):
        open_store(redis_cluster.nodes[1], num_partitions=32).table(SPEC).open(0)
    load(redis_cluster.nodes[1], num_partitions=32)

    with pytest.raises(StoreError, match=OTHER_NUMBER.format(32)):
        found_in(store, KEYS)
    with pytest.raises(StoreError, match=OTHER_NUMBER.format(32)):
        store.tables[SPEC.name].evict(KEYS)


def test_a_process_that_reads_what_hps_wrote_notices_a_load_with_another_number(redis_server, client):
    old = open_store(redis_server)
    for key, place in zip(KEYS.tolist(), (mix(KEYS) % np.uint64(16)).tolist(), strict=True):  # as HPS writes
        client.hset(Partition(SPEC.name, place).values, struct.pack("<q", key), ROWS[key].tobytes())
    old.table(SPEC).open(0)
    fetch(old)

    load(redis_server, num_partitions=32)

    with pytest.raises(StoreError, match=OTHER_NUMBER.format(32)):
        found_in(old, KEYS)
