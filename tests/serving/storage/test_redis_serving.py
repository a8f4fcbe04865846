"""Redis as a tier of a parameter server: what is loaded when, and who answers when it is down."""

import json
import logging

import numpy as np
import pytest

from serving.config import RedisConfig, RedisOverflow
from serving.errors import ConfigError, StoreError
from serving.parameter_server import ParameterServer
from serving.parameter_server.counters import table_samples
from serving.storage import RedisStore, RocksDbStore
from serving.storage.redis.table import RedisTable
from tests.serving.small_server import errors_of
from tests.serving.storage.redis_stores import IMPATIENT, assert_served, evicted_rows, said
from tests.tools.redis_servers import wait_until


def test_redis_answers_before_rocksdb_and_holds_every_row(redis_server, model, ps_file):
    with ParameterServer.from_config(ps_file(redis_server.port)) as server:
        assert [store.name for store in server.stores] == ["redis", "rocksdb"]
        assert_served(server, model)
        assert not server.lookup("dcn.table0", np.array([10**9]))[1].any()
        assert server.counters()["dcn.table0"].hits == {"redis": 300}


def test_bags_are_pooled_from_the_rows_that_redis_holds(redis_server, model, ps_file):
    rows = model.tables[0]
    keys = np.array(list(rows)[:6], dtype=np.int64)

    with ParameterServer.from_config(ps_file(redis_server.port, alone=True)) as server:
        pooled, found = server.lookup_pooled("dcn.table0", keys, np.array([0, 2, 2, 6], dtype=np.int32), "sum")

    assert found.all()
    vectors = [rows[key] for key in keys.tolist()]
    expected = [vectors[0] + vectors[1], np.zeros_like(vectors[0]), vectors[2] + vectors[3] + vectors[4] + vectors[5]]
    np.testing.assert_allclose(pooled, np.array(expected), rtol=1e-6, atol=1e-6)  # the order of additions may differ


def test_what_redis_holds_from_the_same_files_is_not_loaded_again(redis_server, model, ps_file, monkeypatch):
    ParameterServer.from_config(ps_file(redis_server.port, alone=True)).close()
    monkeypatch.setattr(RedisTable, "load", lambda *_, **__: pytest.fail("loaded again"))

    with ParameterServer.from_config(ps_file(redis_server.port, alone=True)) as server:
        assert_served(server, model)


@pytest.mark.parametrize("drop", [False, True])
def test_an_unloaded_model_stays_in_redis_unless_it_is_dropped(redis_server, model, ps_file, drop):
    with ParameterServer.from_config(ps_file(redis_server.port, alone=True)) as server:
        (server.erase_model if drop else server.unload_model)("dcn")

    with redis_server.client() as client:
        assert bool(client.dbsize()) == (not drop)


def test_while_redis_is_down_rocksdb_answers_and_the_outage_is_logged_once(own_server, model, ps_file, caplog):
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        own_server.kill()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert_served(server, model)
        assert said(caplog, "does not answer") == ["tier redis does not answer, model 'dcn'"]
        assert errors_of(server, "dcn.table0") == {"redis": 3}
        assert server.counters()["dcn.table0"].hits == {"rocksdb": 900}

        own_server.start()

        def redis_answers():
            assert_served(server, model)
            return all("redis" in server.counters()[f"dcn.table{n}"].hits for n in (0, 1))

        wait_until(redis_answers, "Redis answers again")
        assert said(caplog, "answers again") == ["tier redis answers again, model 'dcn'"]


def test_a_silent_redis_is_counted_as_late_once_and_rocksdb_answers(own_server, model, ps_file):
    file = ps_file(own_server.port)
    ParameterServer.from_config(file).close()  # loads Redis, which may take as long as it likes
    document = json.loads(file.read_text())
    document["volatile_db"] |= IMPATIENT
    file.write_text(json.dumps(document))
    with ParameterServer.from_config(file) as server:
        own_server.freeze()
        for _ in range(100):
            assert_served(server, model)
        counters = [server.counters()[f"dcn.table{number}"] for number in (0, 1)]
        own_server.thaw()

    redis, rocksdb = zip(*(table.tiers for table in counters), strict=True)
    assert [tier.errors for tier in redis] == [100, 100]
    assert sum(tier.timeouts for tier in redis) == 1  # the other calls did not wait
    assert sum(tier.hits for tier in rocksdb) == 100 * sum(len(rows) for rows in model.tables)
    assert [tier.errors for tier in rocksdb] == [0, 0]


def with_margin(file, **change):
    """Let the Redis of a ps.json evict rows beyond 10 per partition."""
    document = json.loads(file.read_text())
    document["volatile_db"] |= {"num_partitions": 5, "overflow_margin": 10, **change}
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize("policy", ["evict_random", "least_used", "evict_oldest"])
def test_what_redis_has_evicted_comes_from_rocksdb_and_back(redis_server, model, ps_file, policy):
    file = with_margin(ps_file(redis_server.port), overflow_policy=policy, cache_missed_embeddings=True)

    with ParameterServer.from_config(file) as server:
        redis, rocksdb = server.stores
        assert rocksdb.tables["dcn.table0"].count() == 300
        assert 0 < redis.tables["dcn.table0"].count() <= 50
        for _ in range(3):
            assert_served(server, model)
        assert not server.lookup("dcn.table0", np.array([10**9]))[1].any()
        wait_until(lambda: evicted_rows(redis, "dcn.table0") > 0, "rows that RocksDB held are copied into Redis")
        wait_until(lambda: redis.tables["dcn.table0"].count() <= 50, "each partition is within its margin")
        assert_served(server, model)


def test_the_metrics_show_the_partitions_of_each_node_and_what_was_evicted(redis_server, model, ps_file):
    file = with_margin(ps_file(redis_server.port))
    with ParameterServer.from_config(file) as server:
        counters = server.counters()["dcn.table0"]
        readings = list(table_samples("dcn.table0", counters, server.stores))

    shown = {(reading.name, dict(reading.labels).get("node")): reading for reading in readings}
    partitions = shown["hotrow_redis_partitions", f"127.0.0.1:{redis_server.port}"]
    assert (partitions.value, partitions.is_gauge) == (5, True)
    evicted = shown["hotrow_tier_evicted_rows", None]
    assert dict(evicted.labels) == {"model": "dcn", "version": "0", "table": "table0", "tier": "redis"}
    assert evicted.value == 0


def test_a_redis_that_evicts_does_not_count_as_holding_every_row(redis_server, model, ps_file):
    with pytest.raises(ConfigError, match=r"volatile_db\.overflow_margin.*add a persistent_db"):
        ParameterServer.from_config(with_margin(ps_file(redis_server.port, alone=True)))

    with ParameterServer.from_config(with_margin(ps_file(redis_server.port))) as server:
        (config,) = server.models()
    same = RedisConfig(addresses=(redis_server.address,), num_partitions=5, overflow=RedisOverflow(margin_rows=10))
    alone = ParameterServer([RedisStore(same)])
    with alone, pytest.raises(StoreError, match="a slower tier must hold all"):
        alone.load_model(config)


def test_a_tier_that_cannot_be_opened_closes_those_before_it(redis_server, ps_file, tmp_path):
    rocksdb = RocksDbStore(tmp_path / "rows", num_threads=1)

    with pytest.raises(StoreError, match="already open for writing"):
        ParameterServer.from_config(ps_file(redis_server.port))

    with redis_server.client() as client:
        wait_until(lambda: len(client.client_list()) == 1, "only this client is left")
    rocksdb.close()
