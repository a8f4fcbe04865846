"""Partitions of which Redis has lost the rows, or the record that tells of them, and those that are rightly empty."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import RedisOverflow
from serving.errors import StoreError
from serving.storage.hps_layout import mix
from serving.storage.redis.commands import Partition
from serving.storage.redis.nodes import RedisNodes
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, found_in, loaded_store, open_store

PARTITIONS = 16
SEVEN = 7  # the partition whose rows go
PLACES = mix(KEYS) % np.uint64(PARTITIONS)
INSIDE, OUTSIDE = KEYS[PLACES == SEVEN], KEYS[PLACES != SEVEN]
HASH, RECORD = Partition(SPEC.name, SEVEN).values, Partition(SPEC.name, SEVEN).record
LOST = re.escape(HASH.decode()) + " has lost the rows it was loaded with: a slower tier, or a reload of the"


def test_a_partition_whose_rows_are_gone_is_an_outage_though_its_record_is_there(redis_server, client):
    store = loaded_store(redis_server)

    client.delete(HASH)

    for keys in (INSIDE, INSIDE[:1], KEYS):
        with pytest.raises(StoreError, match=LOST):
            found_in(store, keys)
    fetch(store, OUTSIDE)
    assert store.loaded_from(SPEC.name) is None


def test_rows_that_are_gone_when_a_store_opens_the_table_are_an_outage(redis_server, client):
    loaded_store(redis_server)
    client.delete(HASH)
    store = open_store(redis_server)

    store.open_table(SPEC, 0)

    with pytest.raises(StoreError, match=LOST):
        found_in(store, INSIDE)


def test_a_lost_partition_stays_lost_when_rows_are_inserted_into_it(redis_server, client):
    store, other = loaded_store(redis_server), open_store(redis_server)
    other.open_table(SPEC, 0)
    client.delete(HASH)

    store.insert(SPEC.name, INSIDE[:1], ROWS[INSIDE[:1]])

    for one in (store, other):
        fetch(one, INSIDE[:1])
        with pytest.raises(StoreError, match=LOST):
            found_in(one, INSIDE)
    assert store.loaded_from(SPEC.name) is None


def test_evicting_from_a_lost_partition_does_not_make_it_rightly_empty(redis_server, client):
    store = loaded_store(redis_server)
    client.delete(HASH)

    assert store.evict(SPEC.name, INSIDE) == 0

    with pytest.raises(StoreError, match=LOST):
        found_in(store, INSIDE)


def test_a_partition_whose_last_row_was_evicted_has_no_keys_and_is_not_lost(redis_server, client):
    store, other = loaded_store(redis_server), open_store(redis_server)
    other.open_table(SPEC, 0)

    assert store.evict(SPEC.name, INSIDE) == INSIDE.size

    for one in (store, other):
        assert not found_in(one, INSIDE).any()
        assert one.loaded_from(SPEC.name) == "digest"
    store.insert(SPEC.name, INSIDE[:1], ROWS[INSIDE[:1]])
    fetch(other, INSIDE[:1])
    client.delete(HASH)
    with pytest.raises(StoreError, match=LOST):
        found_in(other, INSIDE)


def test_rows_that_hps_erased_one_by_one_are_taken_for_lost(redis_server, client):
    store = loaded_store(redis_server)

    client.hdel(HASH, *(int(key).to_bytes(8, "little") for key in INSIDE))

    with pytest.raises(StoreError, match=LOST):
        found_in(store, INSIDE)


def test_partitions_that_a_load_left_empty_have_no_keys(redis_server):
    store = open_store(redis_server)

    store.bulk_load(SPEC, iter([(OUTSIDE, ROWS[OUTSIDE])]), "digest")

    assert not found_in(store, INSIDE).any()
    assert store.loaded_from(SPEC.name) == "digest"


def test_a_record_without_word_of_rows_is_read_as_an_older_version_wrote_it(redis_server, client):
    loaded_store(redis_server)
    for number in range(PARTITIONS):
        record = Partition(SPEC.name, number).record
        client.set(record, client.get(record).rpartition(b":")[0])
    store = open_store(redis_server)
    store.open_table(SPEC, 0)

    fetch(store)
    assert store.loaded_from(SPEC.name) == "digest"
    client.delete(HASH)
    assert not found_in(store, INSIDE).any()  # of which that record cannot tell
    store.mark_changed(SPEC.name)
    assert store.loaded_from(SPEC.name) == "digest+changed"


def test_a_table_that_is_loaded_again_between_the_reading_and_the_asking_is_read_again(
    redis_server, client, monkeypatch
):
    store, other = loaded_store(redis_server), open_store(redis_server)
    client.delete(HASH)
    run = RedisNodes.run

    def running(nodes, commands):
        replies = run(nodes, commands)
        if commands[0].name == "HMGET":
            monkeypatch.setattr(RedisNodes, "run", run)
            other.bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")
        return replies

    monkeypatch.setattr(RedisNodes, "run", running)

    fetch(store, INSIDE)


def test_in_a_partition_that_overflows_rows_may_be_gone(redis_server, client):
    store = loaded_store(redis_server, overflow=RedisOverflow(margin_rows=100))
    client.delete(HASH)

    assert not found_in(store, INSIDE).any()  # which is for a slower tier to say
    assert store.loaded_from(SPEC.name) is None


@settings(deadline=None, max_examples=25)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(["insert", "evict", "mark", "load"]), st.sets(st.sampled_from(INSIDE.tolist()[:3]))),
        max_size=8,
    )
)
def test_whatever_was_inserted_and_evicted_a_partition_is_lost_exactly_if_its_rows_were_taken(
    shared_redis_server, changes
):
    with shared_redis_server.client() as client:
        client.flushall()
        store, held = open_store(shared_redis_server), set()
        store.bulk_load(SPEC, iter([]), "digest")
        for change, some in changes:
            keys = np.array(sorted(some), dtype=np.int64)
            if change == "insert":
                store.insert(SPEC.name, keys, ROWS[keys])
                held |= some
            elif change == "evict":
                assert store.evict(SPEC.name, keys) == len(held & some)
                held -= some
            elif change == "mark":
                store.mark_changed(SPEC.name)
            else:
                store.bulk_load(SPEC, iter([(keys, ROWS[keys])]), "digest")
                held = set(some)
            assert found_in(store, INSIDE).tolist() == [key in held for key in INSIDE.tolist()]
            assert store.loaded_from(SPEC.name) is not None

        client.delete(HASH)

        if held:
            with pytest.raises(StoreError, match=LOST):
                found_in(store, INSIDE)
        else:
            assert not found_in(store, INSIDE).any()
        store.close()
