"""Processes that share a table in Redis must agree on ``num_partitions``: who does not finds no key where it looks."""

import struct

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage.hps_layout import mix
from serving.storage.redis.commands import Partition
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, found_in, loaded_store, open_store

OTHERS = [8, 17, 32]
OTHER_NUMBER = "has loaded it with num_partitions {}; this one goes by 16"


def load(server, digest="digest", **options):
    store = open_store(server, **options)
    store.bulk_load(SPEC, iter([(KEYS, ROWS)]), digest)
    return store


@pytest.mark.parametrize("number", OTHERS)
def test_who_starts_with_another_number_over_the_same_files_is_refused(redis_server, number):
    first, second = loaded_store(redis_server), open_store(redis_server, num_partitions=number)

    assert second.loaded_from(SPEC.name) == "digest"  # so it is opened, and not loaded anew
    with pytest.raises(StoreError, match="num_partitions differs"):
        second.open_table(SPEC, 0)

    fetch(first)


@pytest.mark.parametrize("digest", ["digest", "retrained"])
@pytest.mark.parametrize("number", OTHERS)
def test_a_load_with_another_number_is_an_outage_to_who_goes_by_the_old_one(redis_server, number, digest):
    loaded, opened = loaded_store(redis_server), open_store(redis_server)
    opened.open_table(SPEC, 0)

    new = load(redis_server, digest, num_partitions=number)

    for store in (loaded, opened):
        for key in KEYS:
            with pytest.raises(StoreError):
                found_in(store, [key])
    fetch(new)


@pytest.mark.parametrize("number", OTHERS)
def test_the_error_names_both_numbers(redis_server, number):
    store = loaded_store(redis_server)

    load(redis_server, num_partitions=number)

    with pytest.raises(StoreError, match=OTHER_NUMBER.format(number)):
        found_in(store, KEYS)


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("verb", ["insert", "evict", "mark_changed", "refill"])
def test_who_goes_by_the_old_number_changes_nothing(redis_server, number, verb):
    old = loaded_store(redis_server)
    new = load(redis_server, num_partitions=number)
    changes = {
        "insert": lambda: old.insert(SPEC.name, KEYS, ROWS + 1),
        "evict": lambda: old.evict(SPEC.name, KEYS),
        "mark_changed": lambda: old.mark_changed(SPEC.name),
        "refill": lambda: old.refill(SPEC.name, iter([(KEYS, ROWS + 1)]), "digest"),
    }

    with pytest.raises(StoreError, match=f"of {number} partitions|num_partitions {number}"):
        changes[verb]()

    fetch(new)
    assert new.count(SPEC.name) == KEYS.size
    assert new.loaded_from(SPEC.name) == "digest"
    load_again = open_store(redis_server, num_partitions=number)
    load_again.open_table(SPEC, 0)
    fetch(load_again)


@pytest.mark.parametrize(("first", "last"), [(16, 32), (32, 16)])
def test_of_processes_that_load_at_once_none_answers_for_partitions_of_the_other(redis_server, first, last):
    one, other = open_store(redis_server, num_partitions=first), open_store(redis_server, num_partitions=last)

    def batches():
        yield KEYS, ROWS
        other.bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")

    with pytest.raises(StoreError, match="another process, which began later, has loaded it meanwhile: digest"):
        one.bulk_load(SPEC, batches(), "digest")

    fetch(other)
    with pytest.raises(StoreError, match="num_partitions differs"):
        one.open_table(SPEC, 0)


def test_a_cluster_is_watched_too(redis_cluster):
    store = loaded_store(redis_cluster.nodes[0])

    with pytest.raises(StoreError, match="num_partitions differs"):
        open_store(redis_cluster.nodes[1], num_partitions=32).open_table(SPEC, 0)
    load(redis_cluster.nodes[1], num_partitions=32)

    with pytest.raises(StoreError, match=OTHER_NUMBER.format(32)):
        found_in(store, KEYS)
    with pytest.raises(StoreError, match="of 32 partitions"):
        store.evict(SPEC.name, KEYS)


def test_who_reads_what_hps_wrote_notices_a_load_with_another_number(redis_server, client):
    old = open_store(redis_server)
    for key, place in zip(KEYS.tolist(), (mix(KEYS) % np.uint64(16)).tolist(), strict=True):  # as HPS writes
        client.hset(Partition(SPEC.name, place).values, struct.pack("<q", key), ROWS[key].tobytes())
    old.open_table(SPEC, 0)
    fetch(old)

    load(redis_server, num_partitions=32)

    with pytest.raises(StoreError, match=OTHER_NUMBER.format(32)):
        found_in(old, KEYS)


def test_records_of_older_versions_tell_no_number(redis_server, client):
    store = loaded_store(redis_server)
    for number in range(16):
        record = Partition(SPEC.name, number).record
        client.set(record, client.get(record).replace(b"of16", b""))

    opened = open_store(redis_server)
    opened.open_table(SPEC, 0)

    for one in (store, opened):
        fetch(one)
        one.insert(SPEC.name, KEYS, ROWS)
        assert one.evict(SPEC.name, KEYS[:0]) == 0
    load(redis_server, num_partitions=32)
    with pytest.raises(StoreError, match=OTHER_NUMBER.format(32)):
        found_in(opened, KEYS)
