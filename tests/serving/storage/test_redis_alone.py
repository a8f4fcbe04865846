"""A Redis that nothing is behind: where it has lost rows, the next start loads the files again, and takes no change."""

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


@pytest.fixture(params=["hps", "strings"])
def layout(request):
    return {"layout": request.param}


def all_gone(client):
    client.flushall()


def one_record_gone(client):
    client.delete(next(name for name in sorted(client.scan_iter()) if b"loaded_from" in name))


@pytest.mark.parametrize("verb", CHANGES)
@pytest.mark.parametrize("lose", [all_gone, one_record_gone])
def test_once_rows_are_lost_no_change_is_taken_that_a_restart_would_undo(
    redis_server, client, tmp_path, layout, lose, verb
):
    model = write_model(tmp_path)
    with serve(model, open_store(redis_server, **layout)) as server:
        lose(client)
        before = {name: client.type(name) for name in client.scan_iter()}

        with pytest.raises(StoreError, match="lost the rows it was loaded with"):
            CHANGES[verb](server)

        assert {name: client.type(name) for name in client.scan_iter()} == before
    with serve(model, open_store(redis_server, **layout)) as server:
        assert rows_of(server) == FILE
        CHANGES[verb](server)
        changed = rows_of(server, [*KEYS, 99])
    with serve(model, open_store(redis_server, **layout)) as server:
        assert rows_of(server, [*KEYS, 99]) == changed != FILE


@pytest.mark.parametrize("verb", CHANGES)
def test_a_change_of_a_partition_whose_rows_are_gone_is_refused_though_its_record_is_there(
    redis_server, client, tmp_path, verb
):
    with serve(write_model(tmp_path), open_store(redis_server, num_partitions=1, num_node_connections=1)) as server:
        client.delete(Partition(TABLE, 0).values)

        with pytest.raises(StoreError, match="has lost the rows it was loaded with"):
            CHANGES[verb](server)

    assert not client.exists(Partition(TABLE, 0).values)


@pytest.mark.parametrize("verb", CHANGES)
def test_rows_that_go_between_the_mark_and_the_change_are_noticed(
    redis_server, client, tmp_path, layout, verb, monkeypatch
):
    with serve(write_model(tmp_path), open_store(redis_server, **layout)) as server:
        mark_changed = RedisStore.mark_changed

        def marking(store, table):
            mark_changed(store, table)
            client.flushall()

        monkeypatch.setattr(RedisStore, "mark_changed", marking)

        with pytest.raises(StoreError, match="lost the rows it was loaded with"):
            CHANGES[verb](server)

    assert not client.keys()


def test_in_a_cluster_a_node_that_came_back_empty_ends_all_changes(redis_cluster, tmp_path, layout):
    with serve(write_model(tmp_path), open_store(redis_cluster.nodes[0], **layout)) as server:
        with redis_cluster.nodes[1].client() as client:
            client.flushall()

        for change in CHANGES.values():
            with pytest.raises(StoreError, match="lost the rows it was loaded with"):
                change(server)


def test_where_every_row_was_evicted_nothing_is_lost(redis_server, tmp_path, layout):
    with serve(write_model(tmp_path), open_store(redis_server, **layout)) as server:
        server.evict(TABLE, np.array(KEYS))
        server.insert(TABLE, np.array([99]), NEW)

        assert rows_of(server, [*KEYS, 99]) == {99: NEW[0].tolist()}


@pytest.mark.parametrize("verb", CHANGES)
def test_with_a_slower_tier_behind_changes_go_on(redis_server, client, tmp_path, layout, verb):
    with serve(write_model(tmp_path), open_store(redis_server, **layout), DurableDictStore()) as server:
        client.flushall()

        CHANGES[verb](server)

        rows = rows_of(server, [*KEYS, 99])
        assert len(rows) == {"insert": 13, "evict": 11}[verb]
