"""Redis is down, silent or wrong when a model is loaded, or is down when a model is erased."""

import json
import time

import numpy as np
import pytest

from serving.errors import StoreError, StoreUnreachableError
from serving.parameter_server import ParameterServer, TierSettings
from serving.parameter_server import models as served_models
from serving.storage.redis.table import RedisTable
from tests.serving.small_server import KEYS, write_model
from tests.serving.storage.contract import (
    ENDS,
    STARTS,
    TABLE,
    Server,
    late_redis,
    redis_of,
    rocksdb_in,
    serve,
    serve_in_front,
)
from tests.serving.storage.redis_stores import assert_served, said
from tests.tools.redis_servers import RedisServer, free_port, wait_until

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_redis_that_never_comes_fails_no_call(config, database, caplog):
    with serve_in_front(config, late_redis(("127.0.0.1", free_port())), database) as server:
        for value in range(3):
            server.insert([3], value)
            server.evict([4])
            server.check()
        rows, found = server.server.lookup(TABLE, np.array([10**9]))
        assert (rows.tolist(), found.tolist()) == ([[0.0] * 3], [False])
        assert server.tier.hits == 0
        assert server.tier.errors > 0
    assert said(caplog, "tier redis") == [STARTS]


@pytest.mark.parametrize("holds", ["nothing", "the files' rows", "rows of other files"])
def test_a_redis_that_comes_after_the_model_was_loaded_is_filled_with_the_changes_made_meanwhile(
    own_server, config, database, tmp_path, caplog, holds
):
    if holds != "nothing":
        other = tmp_path / "other"
        other.mkdir()
        loaded = config if holds == "the files' rows" else write_model(other, np.full((len(KEYS), 3), 5, np.float32))
        serve(loaded, redis_of(own_server), rocksdb_in(tmp_path / "other_db")).close()
    own_server.kill()
    with serve_in_front(config, late_redis(own_server.address), database) as server, server.asked():
        server.insert([3, 777], 7)
        server.evict([4])
        own_server.start()
        server.insert([5], 9)
        server.wait_for_redis()
        server.evict([6])
        server.wait_for_redis()
    assert [line for line in said(caplog, "tier redis") if line in (STARTS, ENDS)] == [STARTS, ENDS]


def test_a_redis_that_is_frozen_when_the_model_is_loaded_is_filled_later(own_server, config, database):
    own_server.freeze()
    redis = late_redis(own_server.address, timeout_ms=300, connect_timeout_ms=200)
    with serve_in_front(config, redis, database) as server:
        server.insert([3], 7)
        server.check()
        own_server.thaw()
        server.wait_for_redis()


def test_rows_of_the_same_files_in_a_late_redis_are_not_loaded_again(own_server, config, database):
    serve_in_front(config, redis_of(own_server), database).close()
    with own_server.client() as client:
        before = {key: client.dump(key) for key in client.keys("*v")}
    own_server.kill()
    with serve_in_front(config, late_redis(own_server.address), database) as server:
        own_server.start()
        server.wait_for_redis()
        with own_server.client() as client:
            assert {key: client.dump(key) for key in client.keys("*v")} == before
        assert server.tier.refills == 0


def test_a_redis_that_dies_while_it_is_filled_at_the_start_gets_its_other_table_later(
    own_server, model, ps_file, monkeypatch
):
    fill = RedisTable.fill

    def fill_and_die(table, truth, *, starting):
        was_written = fill(table, truth, starting=starting)
        if table.spec.name == "dcn.table0" and starting:
            own_server.kill()
        return was_written

    monkeypatch.setattr(RedisTable, "fill", fill_and_die)
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        assert_served(server, model)
        own_server.start()
        redis = server.stores[0]
        wait_until(
            lambda: redis.tables["dcn.table1"].is_whole and redis.tables["dcn.table1"].count() == 100, "Redis is filled"
        )
        assert_served(server, model)


def test_a_silent_redis_is_waited_for_once_at_the_start_and_not_for_each_table(own_server, ps_file, monkeypatch):
    monkeypatch.setattr(served_models, "LOOK_INTERVAL_S", 3600)
    file = ps_file(own_server.port)
    document = json.loads(file.read_text())
    document["volatile_db"] |= {"timeout_ms": 300, "connect_timeout_ms": 200}
    file.write_text(json.dumps(document))
    filled, fill = [], RedisTable.fill

    def counted(table, truth, *, starting):
        filled.append(table.spec.name)
        return fill(table, truth, starting=starting)

    monkeypatch.setattr(RedisTable, "fill", counted)
    own_server.freeze()
    with ParameterServer.from_config(file):
        assert filled == ["dcn.table0"]
    own_server.thaw()


def test_a_model_that_is_unloaded_before_redis_comes_is_not_loaded_into_it(own_server, model, ps_file):
    own_server.kill()
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        (config,) = server.models()
        server.unload_model("dcn")
        own_server.start()
        time.sleep(0.2)
        with own_server.client() as client:
            assert client.keys() == []
        server.load_model(config)
        assert_served(server, model)
        assert server.counters()["dcn.table0"].hits == {"redis": 300}


def test_where_redis_is_the_source_of_truth_its_outage_at_the_start_is_an_error_that_names_it(ps_file):
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
        assert server.health("dcn").readiness().is_ready
        assert_served(server, model)


def test_a_model_that_is_erased_while_redis_is_down_keeps_its_rows_until_it_is_erased_again(
    own_server, config, database
):
    with serve_in_front(config, redis_of(own_server), database) as server:
        server.insert([3], 7)
        rows = server.rows
        own_server.kill()
        advice = "its rows stay; a later erasure of any model tries again"
        with pytest.raises(StoreUnreachableError, match=f"redis: .*Connection refused; {advice}$"):
            server.server.erase_model("m")
        assert server.server.models() == ()
    own_server.start()
    with serve_in_front(config, redis_of(own_server), database, rows) as server:
        server.wait_for_redis()
        server.server.erase_model("m")
        with own_server.client() as client:
            assert client.keys() == []
    with serve_in_front(config, redis_of(own_server), database) as server:
        server.wait_for_redis()


def test_a_redis_that_keeps_what_it_has_is_not_filled_and_is_bypassed_if_it_may_have_missed_a_change(
    redis_server, client, config, database
):
    serve_in_front(config, redis_of(redis_server), database).close()
    with Server(serve(config, rocksdb_in(database))) as server:
        server.insert([3], 7)
        rows = server.rows
    kept = {"redis": TierSettings(fills_at_start=False)}
    with Server(serve(config, redis_of(redis_server), rocksdb_in(database), settings=kept), rows) as server:
        server.check()
        server.insert([5], 8)
        server.check()
        assert server.tier.hits == 0
