"""A Redis that is down when a server starts: RocksDB answers, and Redis is used once it holds this model's rows."""

import json
import logging
import threading

import numpy as np
import pytest

from benchmarks.redis_servers import RedisServer, free_port, wait_until
from serving.errors import StoreError, StoreUnreachableError
from serving.parameter_server import ParameterServer, durable_load, late_tables
from serving.parameter_server.durable_load import CacheLoad
from serving.storage.redis.table import RedisTable
from tests.serving.storage.redis_stores import IMPATIENT, assert_served, said

ROW = np.full((1, 4), 7.0, dtype=np.float32)
pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
def with_rows(own_server, model, ps_file):
    """A ps.json with a Redis that was given the model's rows, and is down."""
    ParameterServer.from_config(ps_file(own_server.port)).close()
    own_server.kill()
    return ps_file(own_server.port)


def wait_for_redis(server, key, table="dcn.table0"):
    """Ask for ``key`` until Redis answers."""

    def redis_answers():
        server.lookup(table, np.array([key], dtype=np.int64))
        return "redis" in server.counters()[table].hits

    wait_until(redis_answers, f"Redis answers about {table}")


def first_key(model, table=0):
    return next(iter(model.tables[table]))


def test_where_redis_never_comes_rocksdb_answers_and_the_outage_is_counted_and_logged_once(model, ps_file, caplog):
    port = free_port()
    with caplog.at_level(logging.WARNING), ParameterServer.from_config(ps_file(port)) as server:
        for _ in range(3):
            assert_served(server, model)
        rows, found = server.lookup("dcn.table0", np.array([10**9]))

        assert (rows.tolist(), found.tolist()) == ([[0.0] * 4], [False])
        assert server.counters()["dcn.table0"].tier_errors == {"redis": 4}
        assert server.counters()["dcn.table0"].hits == {"rocksdb": 900}
    assert said(caplog, "does not answer") == [f"tier redis does not answer, table 'dcn.table{n}'" for n in (0, 1)]
    assert f"127.0.0.1:{port}: cannot connect: Connection refused" in caplog.text
    assert not said(caplog, "answers again")


def test_a_redis_that_comes_later_is_filled_and_answers(late, model, ps_file, caplog):
    with caplog.at_level(logging.WARNING), ParameterServer.from_config(ps_file(late.port)) as server:
        assert_served(server, model)
        late.start()
        for table in (0, 1):
            wait_for_redis(server, first_key(model, table), f"dcn.table{table}")
        before = server.counters()["dcn.table0"].hits["redis"]
        assert_served(server, model)

        assert server.counters()["dcn.table0"].hits["redis"] == before + 300
        assert [server.stores[0].count(f"dcn.table{n}") for n in (0, 1)] == [300, 100]
    assert said(caplog, "answers again") == [f"tier redis answers again, table 'dcn.table{n}'" for n in (0, 1)]


def test_every_answer_is_exact_while_redis_comes(late, model, ps_file):
    with ParameterServer.from_config(ps_file(late.port)) as server:
        starting = threading.Thread(target=late.start)
        starting.start()
        while "redis" not in server.counters()["dcn.table1"].hits:
            assert_served(server, model)
        starting.join()
        assert_served(server, model)


def test_what_a_late_redis_holds_of_the_same_files_is_not_loaded_again(own_server, model, with_rows, monkeypatch):
    monkeypatch.setattr(RedisTable, "load", lambda *_, **__: pytest.fail("loaded again"))

    with ParameterServer.from_config(with_rows) as server:
        own_server.start()
        wait_for_redis(server, first_key(model))
        assert_served(server, model)


def test_a_late_redis_gets_the_rows_that_changed_in_rocksdb_before(own_server, model, with_rows):
    changed, gone, *_ = (int(key) for key in model.tables[0])
    document = json.loads(with_rows.read_text())
    without = with_rows.with_name("without.json")
    without.write_text(json.dumps(document | {"volatile_db": {"type": "disabled"}}))
    with ParameterServer.from_config(without) as server:
        server.insert("dcn.table0", np.array([changed]), ROW)
        server.evict("dcn.table0", np.array([gone]))

    with ParameterServer.from_config(with_rows) as server:
        own_server.start()
        wait_for_redis(server, changed)
        answer, found = server.lookup("dcn.table0", np.array([changed, gone]))

    assert (answer[0].tolist(), found.tolist()) == (ROW[0].tolist(), [True, False])


def test_a_late_redis_that_was_loaded_from_other_files_is_left_alone_and_not_used(
    own_server, model, with_rows, write_model, caplog
):
    other = write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100), seed=9)
    with caplog.at_level(logging.WARNING), ParameterServer.from_config(with_rows) as server:
        own_server.start()
        wait_until(lambda: "load the model again to have them replaced" in caplog.text, "the log tells of other files")
        assert_served(server, other)
        assert "redis" not in server.counters()["dcn.table0"].hits

    with ParameterServer.from_config(with_rows) as server:  # a start does replace them
        assert_served(server, other)
        assert "rocksdb" not in server.counters()["dcn.table0"].hits


def test_where_rocksdb_fails_while_a_late_redis_is_filled_a_refused_change_names_rocksdb(
    late, ps_file, monkeypatch, caplog
):
    with ParameterServer.from_config(ps_file(late.port)) as server:
        rocksdb = server.stores[1]

        def fail(table):
            raise StoreError("rocksdb", table, "rows/000009.sst: Corruption")

        monkeypatch.setattr(rocksdb, "loaded_from", fail)
        late.start()
        wait_until(lambda: "Corruption" in caplog.text, "the log tells of RocksDB")

        with pytest.raises(StoreError, match=r"rocksdb: table 'dcn\.table0': rows/000009\.sst: Corruption"):
            server.evict("dcn.table0", np.array([1]))


def test_a_change_is_refused_until_a_late_redis_has_the_table_and_nothing_was_written(late, model, ps_file):
    key = np.array([first_key(model)])
    with ParameterServer.from_config(ps_file(late.port)) as server:
        for change in (lambda: server.insert("dcn.table0", key, ROW), lambda: server.evict("dcn.table0", key)):
            with pytest.raises(StoreError, match=r"redis: table 'dcn\.table0': .* cannot connect: Connection refused"):
                change()
        assert_served(server, model)

        late.start()
        wait_for_redis(server, key[0])
        server.insert("dcn.table0", key, ROW)
        assert server.lookup("dcn.table0", key)[0].tolist() == ROW.tolist()
        rows = np.empty((1, 4), dtype=np.float32)
        assert server.stores[0].fetch("dcn.table0", key, rows).all()
        assert rows.tolist() == ROW.tolist()


def test_a_model_that_was_unloaded_before_redis_came_is_not_loaded_into_it(late, model, ps_file):
    with ParameterServer.from_config(ps_file(late.port)) as server:
        (config,) = server.models()
        server.unload_model("dcn")
        late.start()
        for thread in threading.enumerate():
            if thread.name == "hotrow-late-tables":
                thread.join(60)
        with late.client() as client:
            assert client.keys() == []

        server.load_model(config)
        assert_served(server, model)
        assert server.counters()["dcn.table0"].hits == {"redis": 300}


@pytest.mark.parametrize("end", ["unload_model", "close"])
def test_a_load_under_way_ends_with_its_model_or_server(late, model, ps_file, monkeypatch, end):
    began, go_on, load = threading.Event(), threading.Event(), RedisTable.load
    monkeypatch.setattr(durable_load, "LOAD_BATCH_ROWS", 50)

    def slow(batches):
        for batch in batches:
            began.set()
            assert go_on.wait(60)
            yield batch

    def load_slowly(table, batches, *args, **options):
        load(table, slow(batches), *args, **options)

    monkeypatch.setattr(RedisTable, "load", load_slowly)
    server = ParameterServer.from_config(ps_file(late.port))
    late.start()
    assert began.wait(60)
    ending = threading.Thread(target=server.close if end == "close" else lambda: server.unload_model("dcn"))
    ending.start()
    wait_until(lambda: not server._served._late._tables, "the load is cancelled")
    go_on.set()
    ending.join(60)

    assert not ending.is_alive()
    with late.client() as client:
        assert client.keys() == []
    server.close()


def test_a_model_is_loaded_again_into_a_redis_whose_late_load_failed_because_it_was_unloaded(
    late, model, ps_file, monkeypatch
):
    asked, go_on = threading.Event(), threading.Event()

    def fail(load):
        asked.set()
        assert go_on.wait(60)
        raise StoreUnreachableError("redis", load.source.spec.name, "timed out")

    monkeypatch.setattr(CacheLoad, "check_files", fail)
    with ParameterServer.from_config(ps_file(late.port)) as server:
        (config,) = server.models()
        (loading,) = (thread for thread in threading.enumerate() if thread.name == "hotrow-late-tables")
        assert asked.wait(60)
        server.unload_model("dcn")
        late.start()
        go_on.set()
        loading.join(60)
        server.load_model(config)

        assert_served(server, model)
        assert server.counters()["dcn.table0"].hits == {"redis": 300}
        server.insert("dcn.table0", np.array([first_key(model)]), ROW)


def test_a_redis_that_keeps_silent_at_the_start_is_waited_for_once_and_not_for_each_table(
    own_server, ps_file, monkeypatch
):
    monkeypatch.setattr(late_tables, "FIRST_PAUSE_S", 60)
    file = ps_file(own_server.port)
    document = json.loads(file.read_text())
    document["volatile_db"] |= IMPATIENT
    file.write_text(json.dumps(document))
    loads, run = [], CacheLoad.run
    monkeypatch.setattr(CacheLoad, "run", lambda load: (loads.append(load.source.spec.name), run(load)))
    own_server.freeze()

    with ParameterServer.from_config(file):
        assert loads == ["dcn.table0"]
    own_server.thaw()


def test_a_redis_that_keeps_silent_at_the_start_is_passed_over_and_used_when_it_answers(own_server, model, ps_file):
    file = ps_file(own_server.port)
    document = json.loads(file.read_text())
    document["volatile_db"] |= IMPATIENT
    file.write_text(json.dumps(document))
    own_server.freeze()

    with ParameterServer.from_config(file) as server:
        assert_served(server, model)
        own_server.thaw()
        wait_for_redis(server, first_key(model))
        assert_served(server, model)


def test_a_redis_that_dies_while_it_is_loaded_at_the_start_gets_its_tables_later(
    own_server, model, ps_file, monkeypatch
):
    load = RedisTable.load

    def load_and_die(table, *args, **options):
        load(table, *args, **options)
        if table.spec.name == "dcn.table0":
            own_server.kill()

    monkeypatch.setattr(RedisTable, "load", load_and_die)
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        assert_served(server, model)
        own_server.start()
        wait_for_redis(server, first_key(model, 1), "dcn.table1")
        assert_served(server, model)


def test_where_redis_is_the_slowest_tier_its_outage_at_the_start_is_an_error_that_names_it(ps_file):
    port = free_port()

    with pytest.raises(StoreUnreachableError, match=f"redis: 127.0.0.1:{port}: cannot connect: Connection refused"):
        ParameterServer.from_config(ps_file(port, alone=True))


def test_a_redis_that_refuses_the_user_at_the_start_is_an_error_whatever_is_behind_it(redis_binary, tmp_path, ps_file):
    server = RedisServer(tmp_path / "redis", "--requirepass", "secret")
    try:
        with pytest.raises(StoreError, match="refuses user 'default'"):
            ParameterServer.from_config(ps_file(server.port))
    finally:
        server.kill()


def test_a_model_that_is_loaded_again_begins_without_the_outage_of_its_last_load(own_server, model, ps_file):
    with ParameterServer.from_config(ps_file(own_server.port, alone=True)) as server:
        (config,) = server.models()
        own_server.kill()
        with pytest.raises(StoreError, match="Connection refused"):
            assert_served(server, model)
        server.unload_model("dcn")
        own_server.start()
        server.load_model(config)

        assert server.is_answering("dcn")
        assert_served(server, model)
