"""Redis as the source of truth: once it has lost rows, it takes no change, and the next start loads the files again."""

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import RedisStore
from serving.storage.redis.commands import Partition
from tests.serving.small_server import KEYS, NEW, ROWS, DurableDictStore, rows_of, serve, write_model
from tests.serving.storage.redis_stores import open_store

TABLE = "m.t"
FILE = {key: row.tolist() for key, row in zip(KEYS, ROWS, strict=True)}
CHANGES = {
    "insert": lambda server: server.insert(TABLE, np.array([99]), NEW),
    "evict": lambda server: server.evict(TABLE, np.array(KEYS[:1])),
}
ONE_PARTITION = {"num_partitions": 1, "num_node_connections": 1}


def content(client):
    return {name: client.type(name) for name in client.scan_iter()}


@pytest.mark.parametrize("verb", CHANGES)
def test_once_every_row_is_lost_no_change_is_taken_that_a_restart_would_undo(redis_server, client, tmp_path, verb):
    model = write_model(tmp_path)
    with serve(model, open_store(redis_server)) as server:
        client.flushall()

        with pytest.raises(StoreError, match="has lost its rows"):
            CHANGES[verb](server)

        assert not [name for name in client.scan_iter() if name.endswith(b"v")]
    with serve(model, open_store(redis_server)) as server:
        assert rows_of(server) == FILE
        CHANGES[verb](server)
        changed = rows_of(server, [*KEYS, 99])
    with serve(model, open_store(redis_server)) as server:
        assert rows_of(server, [*KEYS, 99]) == changed != FILE


@pytest.mark.parametrize("verb", CHANGES)
def test_a_partition_without_its_marker_takes_no_change_and_answers_nothing(redis_server, client, tmp_path, verb):
    with serve(write_model(tmp_path), open_store(redis_server, **ONE_PARTITION)) as server:
        client.delete(Partition(TABLE, 0).marker)

        with pytest.raises(StoreError, match="has lost its rows"):
            CHANGES[verb](server)
        with pytest.raises(StoreError, match="has lost its rows"):
            rows_of(server)

        assert client.hlen(Partition(TABLE, 0).values) == len(KEYS)


def test_the_other_partitions_take_changes_and_answer(redis_server, client, tmp_path):
    store = open_store(redis_server)
    with serve(write_model(tmp_path), store) as server:
        lost = int(store._tables[TABLE].partitions.places(np.array([KEYS[0]]))[0])
        client.delete(Partition(TABLE, lost).values, Partition(TABLE, lost).marker)
        others = [key for key in KEYS if store._tables[TABLE].partitions.places(np.array([key]))[0] != lost]

        server.insert(TABLE, np.array(others[:1]), NEW)

        assert rows_of(server, others) == {key: FILE[key] for key in others} | {others[0]: NEW[0].tolist()}
        with pytest.raises(StoreError, match="has lost its rows"):
            rows_of(server, KEYS[:1])


@pytest.mark.parametrize("verb", CHANGES)
def test_rows_that_are_lost_just_before_a_change_are_noticed(redis_server, client, tmp_path, verb, monkeypatch):
    with serve(write_model(tmp_path), open_store(redis_server)) as server:
        write_flags = RedisStore.write_flags

        def writing(store, table, **flags):
            write_flags(store, table, **flags)
            client.flushall()

        monkeypatch.setattr(RedisStore, "write_flags", writing)

        with pytest.raises(StoreError, match="has lost its rows"):
            CHANGES[verb](server)

    assert not client.keys()


def test_in_a_cluster_a_node_that_came_back_empty_takes_no_change(redis_cluster, tmp_path):
    store = open_store(redis_cluster.nodes[0])
    with serve(write_model(tmp_path), store) as server:
        for node in redis_cluster.nodes[: redis_cluster.masters]:
            with node.client() as client:
                client.flushall()

        for change in CHANGES.values():
            with pytest.raises(StoreError, match="has lost its rows"):
                change(server)


def test_where_every_row_was_evicted_nothing_is_lost(redis_server, tmp_path):
    with serve(write_model(tmp_path), open_store(redis_server)) as server:
        server.evict(TABLE, np.array(KEYS))
        server.insert(TABLE, np.array([99]), NEW)

        assert rows_of(server, [*KEYS, 99]) == {99: NEW[0].tolist()}


@pytest.mark.parametrize("verb", CHANGES)
def test_with_a_slower_tier_behind_it_changes_go_on(redis_server, client, tmp_path, verb):
    with serve(write_model(tmp_path), open_store(redis_server), DurableDictStore()) as server:
        client.flushall()

        CHANGES[verb](server)

        rows = rows_of(server, [*KEYS, 99])
        assert len(rows) == {"insert": 13, "evict": 11}[verb]
