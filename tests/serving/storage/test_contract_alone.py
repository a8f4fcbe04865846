"""Redis as the source of truth: what it has is true, and a partition without its marker is an error, never defaults."""

import numpy as np
import pytest

from serving.errors import StoreError
from serving.model.hps_hash import mix
from serving.storage.redis.commands import Partition
from serving.storage.redis.table import RedisTable
from tests.serving.small_server import KEYS, UNKNOWN, held_by, rows_of, write_model
from tests.serving.storage.contract import PARTITIONS, TABLE, Server, redis_of, serve, serve_in_front
from tests.serving.storage.redis_stores import said
from tests.tools.redis_servers import RedisServer

PLACES = dict(zip((*KEYS, *UNKNOWN), mix(np.array([*KEYS, *UNKNOWN])) % np.uint64(PARTITIONS), strict=True))
LOST = PLACES[KEYS[0]]  # the partition that is lost
INSIDE = [key for key in KEYS if PLACES[key] == LOST]
OUTSIDE = [key for key in KEYS if PLACES[key] != LOST]
PARTITION = Partition(TABLE, int(LOST))
REFUSED = "has no marker: it has lost its rows; load the model again: restart a server of this model"
CHANGES = {
    "insert": lambda server: server.insert(INSIDE[:1], 7),
    "insert elsewhere too": lambda server: server.insert([*INSIDE[:1], *OUTSIDE[:1]], 7),
    "evict": lambda server: server.evict(INSIDE[:1]),
}


@pytest.fixture(params=["the marker", "the marker and the rows"])
def lose(request, client):
    """Remove a partition's marker, and its rows where the parameter says so."""
    names = [PARTITION.marker, *([PARTITION.values] if "rows" in request.param else [])]
    return lambda: client.delete(*names)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_partition_without_its_marker_is_an_error_and_never_a_default(redis_server, config, lose, restarts):
    with Server(serve(config, redis_of(redis_server))) as server:
        server.insert(OUTSIDE[:1], 7)
        if restarts:
            server.check()
        lose()
        for keys in (INSIDE, INSIDE[:1], KEYS):
            with pytest.raises(StoreError, match=REFUSED):
                rows_of(server.server, keys)
        assert rows_of(server.server, OUTSIDE) == {key: server.rows[key] for key in OUTSIDE}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_partition_without_its_marker_are_refused(redis_server, client, config, lose, change):
    with Server(serve(config, redis_of(redis_server))) as server:
        lose()
        before = client.hgetall(PARTITION.values)
        for _ in range(2):
            with pytest.raises(StoreError, match=REFUSED):
                CHANGES[change](server)
        assert client.hgetall(PARTITION.values) == before
        server.insert(OUTSIDE[:1], 8)
        assert rows_of(server.server, OUTSIDE[:1]) == {OUTSIDE[0]: [8.0] * 3}


def test_a_load_fills_only_the_partition_that_is_lost(redis_server, config, lose):
    with Server(serve(config, redis_of(redis_server))) as server:
        server.insert(OUTSIDE[:1], 7)
        server.evict(OUTSIDE[1:2])
        rows = server.rows
        lose()
    for _ in range(2):
        with Server(serve(config, redis_of(redis_server)), rows) as server:
            server.check()
            assert held_by(server.stores[0]) == rows
            server.insert(INSIDE[:1], 9)
            server.evict(INSIDE[1:2])
            server.check()
            rows = server.rows


def test_a_start_warns_that_written_rows_are_lost_with_a_partition(redis_server, client, config, caplog):
    with Server(serve(config, redis_of(redis_server))) as server:
        server.insert([INSIDE[0], OUTSIDE[0]], 7)
    client.delete(PARTITION.marker, PARTITION.values)

    with Server(serve(config, redis_of(redis_server))):
        pass

    reason = "partitions have lost their rows and get the files' rows: rows that were written"
    assert f"1 of {PARTITIONS} {reason}" in caplog.text


def test_a_server_goes_on_when_another_process_has_filled_the_lost_partition(redis_server, config, lose):
    with Server(serve(config, redis_of(redis_server))) as server:
        lose()
        with pytest.raises(StoreError, match=REFUSED):
            server.check()
        with pytest.raises(StoreError, match=REFUSED):
            server.server.insert(TABLE, np.array(INSIDE[:1]), np.ones((1, 3), np.float32))
        serve(config, redis_of(redis_server)).close()
        server.insert(INSIDE[:1], 7)
        server.check()


def test_a_server_goes_on_when_its_model_is_loaded_again(redis_server, config, lose):
    with Server(serve(config, redis_of(redis_server))) as server:
        server.insert(OUTSIDE[:1], 7)
        lose()
        server.server.unload_model("m")
        server.server.load_model(config)
        server.check()
        server.insert(INSIDE[:1], 8)
        server.check()


@pytest.mark.parametrize("change", CHANGES)
def test_a_redis_that_is_flushed_refuses_every_call_until_the_model_is_loaded_again(
    redis_server, client, config, change, caplog
):
    with Server(serve(config, redis_of(redis_server))) as server:
        server.insert([3], 7)
        client.flushall()
        with pytest.raises(StoreError, match=REFUSED):
            CHANGES[change](server)
        with pytest.raises(StoreError, match=REFUSED):
            rows_of(server.server)
        assert not client.keys("*v")
        assert said(caplog, "tier redis") == ["tier redis answers with errors, model 'm'"]
        assert server.server.health("m").readiness().reason == "tier redis answers with errors, table 'm.t'"
    with Server(serve(config, redis_of(redis_server))) as server:
        server.check()
        CHANGES[change](server)
        server.check()


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_are_lost_just_before_a_change_are_noticed(redis_server, client, config, change, monkeypatch):
    with Server(serve(config, redis_of(redis_server))) as server:
        write_flags = RedisTable.write_flags

        def writing(table, **flags):
            write_flags(table, **flags)
            client.flushall()

        monkeypatch.setattr(RedisTable, "write_flags", writing)
        with pytest.raises(StoreError, match=REFUSED):
            CHANGES[change](server)
        assert not client.keys()


def test_in_a_cluster_a_node_that_is_flushed_gives_no_default_and_takes_no_change(redis_cluster, config):
    with Server(serve(config, redis_of(redis_cluster.nodes[0]))) as server:
        for node in redis_cluster.nodes[: redis_cluster.masters]:
            with node.client() as client:
                client.flushall()
        with pytest.raises(StoreError, match=REFUSED):
            rows_of(server.server)
        for change in CHANGES.values():
            with pytest.raises(StoreError, match=REFUSED):
                change(server)


def test_a_partition_whose_last_row_was_evicted_is_not_lost(redis_server, config):
    with Server(serve(config, redis_of(redis_server))) as server:
        server.evict(KEYS)
        server.check()
        server.insert(UNKNOWN, 7)
        server.check()
        rows = server.rows
    with Server(serve(config, redis_of(redis_server)), rows) as server:
        server.check()


def test_a_redis_that_restarts_with_its_rows_is_asked_again(own_server, config):
    with Server(serve(config, redis_of(own_server))) as server:
        server.insert([3, 777], 7)
        server.evict([4])
        own_server.kill()
        with pytest.raises(StoreError, match="Connection refused"):
            server.check()
        with pytest.raises(StoreError, match="Connection refused"):
            server.server.insert(TABLE, np.array([5]), np.ones((1, 3), np.float32))
        own_server.start()
        server.check()
        server.insert([5], 8)
        server.check()


def test_what_a_redis_has_after_a_restart_from_an_old_file_is_true(redis_binary, config, tmp_path):
    redis = RedisServer(tmp_path / "redis")
    try:
        with Server(serve(config, redis_of(redis))) as server, redis.client() as client:
            server.insert([3], 7)
            old = server.rows
            client.save()
            server.server.insert(TABLE, np.array([3]), np.ones((1, 3), np.float32))
            redis.kill()
            redis.start()
            assert rows_of(server.server) == old
            server.insert([5], 8)
            server.check()
    finally:
        redis.kill()


@pytest.mark.parametrize(
    ("policy", "limit", "lines"),
    [("allkeys-lru", "100mb", 1), ("allkeys-random", "0", 0), ("volatile-lru", "100mb", 0), ("noeviction", "100mb", 0)],
)
def test_a_redis_that_may_evict_rows_is_a_line_in_the_log(redis_binary, config, tmp_path, caplog, policy, limit, lines):
    redis = RedisServer(tmp_path / "redis", "--maxmemory", limit, "--maxmemory-policy", policy)
    warning = "redis: maxmemory-policy is allkeys-lru, so a full Redis loses rows: set it to noeviction"
    try:
        with Server(serve(config, redis_of(redis))) as server:
            server.server.unload_model("m")
            server.server.load_model(config)
            server.check()
        assert sum(line.startswith(warning) for line in caplog.messages) == lines
        assert sum("maxmemory-policy" in line for line in caplog.messages) == lines
        with serve_in_front(config, redis_of(redis), tmp_path / "db"):
            pass
        assert sum("maxmemory-policy" in line for line in caplog.messages) == lines
    finally:
        redis.kill()


def test_rows_of_other_files_are_an_error_to_a_server_of_the_old_files(redis_server, config, tmp_path):
    (tmp_path / "retrained").mkdir()
    retrained = write_model(tmp_path / "retrained", np.full((len(KEYS), 3), 5, np.float32))
    rows = dict.fromkeys(KEYS, [5.0] * 3)
    old = Server(serve(config, redis_of(redis_server)))
    with Server(serve(retrained, redis_of(redis_server)), rows) as server:
        server.check()
        for keys in (KEYS, KEYS[:1], UNKNOWN):
            with pytest.raises(StoreError, match=r"was loaded from other files .* load the model again"):
                rows_of(old.server, keys)
        with pytest.raises(StoreError, match="was loaded from other files"):
            old.server.insert(TABLE, np.array([3]), np.ones((1, 3), np.float32))
        server.check()
        with Server(serve(config, redis_of(redis_server))) as again:
            again.check()
            old.check()
            with pytest.raises(StoreError, match="was loaded from other files"):
                server.check()
