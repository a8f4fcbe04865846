"""What a Redis store does to bring back rows that it has lost, for all processes that share them."""

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage.redis.commands import Partition
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, found_in, loaded_store, open_store

HASH, RECORD = Partition(SPEC.name, 7).values, Partition(SPEC.name, 7).record


def refill(store, batches=None):
    return store.refill(SPEC.name, iter([(KEYS, ROWS)]) if batches is None else batches, "digest")


@pytest.mark.parametrize("layout", ["hps", "strings"])
def test_where_nothing_is_lost_no_row_is_asked_for(redis_server, layout):
    def rows():
        pytest.fail("asked for rows")
        yield

    assert not refill(loaded_store(redis_server, layout=layout), rows())


@pytest.mark.parametrize("layout", ["hps", "strings"])
def test_all_that_is_lost_comes_back_for_all_who_share_the_table(redis_server, client, layout):
    store, other = loaded_store(redis_server, layout=layout), open_store(redis_server, layout=layout)
    other.open_table(SPEC, 0)
    client.flushall()

    assert refill(store)

    for one in (store, other):
        fetch(one)
        assert one.loaded_from(SPEC.name) == "digest"
    assert not [name for name in client.scan_iter() if b"filling" in name or b"loading" in name]
    assert client.ttl(RECORD) == {"hps": -1, "strings": -2}[layout]


def test_nodes_of_a_cluster_get_what_they_have_lost(redis_cluster):
    store = loaded_store(redis_cluster.nodes[0])
    with redis_cluster.nodes[1].client() as client:
        client.flushall()

    assert refill(store)

    fetch(store)
    assert store.count(SPEC.name) == KEYS.size


@pytest.mark.parametrize("gone", ["rows", "record", "both"])
def test_a_partition_that_has_all_rows_is_not_touched(redis_server, client, gone):
    store = loaded_store(redis_server)
    records = {at: client.get(Partition(SPEC.name, at).record) for at in range(16)}
    client.delete(*{"rows": [HASH], "record": [RECORD], "both": [HASH, RECORD]}[gone])

    assert refill(store)

    fetch(store)
    now = {at: client.get(Partition(SPEC.name, at).record) for at in range(16)}
    assert [at for at in range(16) if now[at] != records[at]] == [7]


@pytest.mark.parametrize("layout", ["hps", "strings"])
def test_while_one_process_brings_rows_back_another_does_not(redis_server, client, layout):
    store, other = loaded_store(redis_server, layout=layout), open_store(redis_server, layout=layout)
    other.open_table(SPEC, 0)
    client.flushall()

    def rows():
        with pytest.raises(StoreError, match="another process"):
            refill(other)
        with pytest.raises(StoreError, match="has lost the rows"):
            found_in(other, KEYS)
        yield KEYS, ROWS

    assert refill(store, rows())

    assert not refill(other)
    fetch(other)


def test_what_a_killed_process_has_claimed_is_free_after_a_while(redis_server, client):
    store = loaded_store(redis_server)
    client.flushall()

    def rows():
        yield KEYS, ROWS
        assert 0 < client.ttl(RECORD) <= 60

    assert refill(store, rows())


@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_row_that_another_process_changes_meanwhile_is_not_replaced_by_an_older_one(redis_server, client, verb):
    store, other = loaded_store(redis_server), open_store(redis_server)
    other.open_table(SPEC, 0)
    client.flushall()
    key = KEYS[3:4]
    expected = ROWS.copy()
    expected[3] = -1.0

    def rows():
        yield KEYS, ROWS
        other.mark_changed(SPEC.name)
        if verb == "insert":
            other.insert(SPEC.name, key, expected[3:4])
        else:
            other.evict(SPEC.name, key)
        other.note_change(SPEC.name, key)

    with pytest.raises(StoreError, match="has changed rows while they were brought"):
        refill(store, rows())
    with pytest.raises(StoreError, match="has lost the rows"):
        found_in(store, KEYS)

    kept = np.ones(KEYS.size, dtype=bool)
    kept[3] = verb == "insert"
    assert refill(store, iter([(KEYS[kept], expected[kept])]))
    out = np.empty((KEYS.size, 4), dtype=np.float32)
    assert store.fetch(SPEC.name, KEYS, out).tolist() == kept.tolist()
    assert (out[kept] == expected[kept]).all()


def test_what_was_gathered_is_gone_where_the_rows_end_in_an_error(redis_server, client):
    store = loaded_store(redis_server)
    client.flushall()

    def rows():
        yield KEYS, ROWS
        raise StoreError("rocksdb", SPEC.name, "no answer")

    with pytest.raises(StoreError, match=r"rocksdb: .* no answer"):
        refill(store, rows())

    assert client.keys() == []


def test_a_table_that_is_not_open_is_an_error(redis_server):
    with pytest.raises(StoreError, match="not an open table"):
        refill(open_store(redis_server))


def test_who_has_changed_rows_takes_over_what_another_process_brings_back(redis_server, client):
    changed, other = loaded_store(redis_server), open_store(redis_server)
    other.open_table(SPEC, 0)
    changed.insert(SPEC.name, KEYS, ROWS)
    changed.note_change(SPEC.name, KEYS)
    client.flushall()

    def older_rows():
        yield KEYS, -ROWS
        assert refill(changed)
        yield KEYS[:1], -ROWS[:1]

    with pytest.raises(StoreError, match="another process"):
        refill(other, older_rows())

    assert client.ttl(RECORD) == -1
    for one in (changed, other):
        fetch(one)
