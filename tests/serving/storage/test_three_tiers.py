"""RAM, Redis and RocksDB behind each other, as a ``ps.json`` says it: a real server, a real database, and a dict."""

import numpy as np
import pytest

from serving.cli.main import main
from serving.errors import StoreError
from serving.opening import Runtime
from serving.parameter_server import ParameterServer
from serving.repository import ModelRepository
from tests.serving.ps_files import listed, write_ps
from tests.serving.storage.redis_stores import PATIENT, assert_served
from tests.tools.redis_servers import free_port

UNKNOWN = 10**9
RAM = {"type": "hash_map", "capacity_rows_per_table": {"dcn.table0": 60, "dcn.table1": 20}}
COPIES = {"cache_missed_embeddings": True}


@pytest.fixture
def write(model, tmp_path):
    """Write a ps.json with the model, RAM, a Redis at ``port``, and RocksDB unless ``alone``."""

    def write(port, ram=RAM, redis=None, alone=False):
        shared = {"type": "redis_cluster", "address": f"127.0.0.1:{port}"} | PATIENT | (redis or {})
        disk = {} if alone else {"persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 1}}
        return write_ps(tmp_path, [listed(model.config_file, gpucache=False)], volatile_db=[ram, shared], **disk)

    return write


def keys_of(model, table=0):
    return np.array(list(model.tables[table]), dtype=np.int64)


def hits(server, table="dcn.table0"):
    return dict(server.counters()[table].hits)


def test_each_tier_is_asked_for_what_the_faster_ones_lack(redis_server, model, write):
    with ParameterServer.from_config(write(redis_server.port)) as server:
        assert [store.name for store in server.stores] == ["memory", "redis", "rocksdb"]
        assert_served(server, model)
        assert not server.lookup("dcn.table0", np.array([UNKNOWN]))[1].any()

        assert hits(server) == {"memory": 60, "redis": 240}


def test_new_files_of_the_model_refill_redis_and_the_log_asks_for_nothing(
    redis_server, write_model, model, write, caplog
):
    ParameterServer.from_config(write(redis_server.port)).close()
    newer = write_model(*model.sketches, seed=1)

    with ParameterServer.from_config(write(redis_server.port)) as server:
        assert_served(server, newer)

    assert "tier redis was refilled, table 'dcn.table0': it was loaded from other files" in caplog.text
    assert "load the model again" not in caplog.text


# Redis holds 8 * 15 rows of each table at most, so that RocksDB must answer too.
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_a_dict_whatever_is_looked_up_inserted_and_evicted(redis_server, model, write, seed):
    rng = np.random.default_rng(seed)
    evicting = {"overflow_policy": "evict_oldest"} | COPIES
    small = {"num_partitions": 8, "overflow_margin": 15} | COPIES
    rows = {int(key): row for key, row in model.tables[0].items()}
    pool = np.array([*rows, *range(1, 100)], dtype=np.int64)

    with ParameterServer.from_config(write(redis_server.port, RAM | evicting, small)) as server:
        for _ in range(60):
            keys = rng.choice(pool, 40)
            match rng.integers(0, 4):
                case 0:
                    fresh = rng.normal(size=(keys.size, 4)).astype(np.float32)
                    server.insert("dcn.table0", keys, fresh)
                    rows.update(zip(keys.tolist(), fresh, strict=True))
                case 1:
                    server.evict("dcn.table0", keys[:5])
                    for key in keys[:5].tolist():
                        rows.pop(key, None)
                case _:
                    assert_is(server, rows, keys)
        answered = hits(server)
        assert_is(server, rows, pool)

    assert all(answered[tier] > 0 for tier in ("memory", "redis", "rocksdb"))
    with ParameterServer.from_config(write(redis_server.port, RAM | evicting, small)) as server:  # a restart
        assert_is(server, rows, pool)


def assert_is(server, rows, keys):
    """Look up ``keys``: what a dict holds, alone and pooled."""
    expected = np.array([rows.get(key, np.zeros(4)) for key in keys.tolist()], dtype=np.float32)
    answer, found = server.lookup("dcn.table0", keys)
    assert found.tolist() == [key in rows for key in keys.tolist()]
    assert answer.tobytes() == expected.tobytes()
    ends = np.arange(keys.size + 1, dtype=np.int32)
    assert server.lookup_pooled("dcn.table0", keys, ends, "sum")[0].tobytes() == expected.tobytes()


def test_rows_of_a_slower_tier_are_copied_into_the_tiers_that_say_so(redis_server, model, write):
    empty = {"type": "hash_map", "initialize_after_startup": False} | COPIES
    keys = keys_of(model)

    with ParameterServer.from_config(write(redis_server.port, empty, {"initialize_after_startup": False})) as server:
        memory, redis, _ = server.stores
        server.lookup("dcn.table0", keys)
        assert server.wait_for_promotions(60)
        assert (memory.tables["dcn.table0"].count(), redis.tables["dcn.table0"].count()) == (300, 0)
        assert_served(server, model)

        assert hits(server) == {"rocksdb": 300, "memory": 300}


def test_rows_that_redis_held_are_copied_into_ram_though_nothing_is_behind_it(redis_server, model, write):
    empty = {"type": "hash_map", "initialize_after_startup": False} | COPIES

    with ParameterServer.from_config(write(redis_server.port, empty, alone=True)) as server:
        for _ in range(2):
            assert_served(server, model)
            assert server.wait_for_promotions(60)

        assert hits(server) == {"redis": 300, "memory": 300}


def test_a_row_that_changes_changes_in_every_tier_and_stays_so(redis_server, model, write):
    changed, gone, *_ = keys_of(model)
    row = np.full((1, 4), 7.0, dtype=np.float32)
    with ParameterServer.from_config(write(redis_server.port)) as server:
        server.insert("dcn.table0", np.array([changed]), row)
        server.evict("dcn.table0", np.array([gone]))

        for store in server.stores:
            out = np.empty((2, 4), dtype=np.float32)
            assert store.tables["dcn.table0"].fetch(np.array([changed, gone]), out).tolist() == [True, False], (
                store.name
            )
            assert out[0].tolist() == row[0].tolist()

    with ParameterServer.from_config(write(redis_server.port)) as server:
        answer, found = server.lookup("dcn.table0", np.array([changed, gone]))
    assert (found.tolist(), answer[0].tolist()) == ([True, False], row[0].tolist())


def test_while_a_redis_with_nothing_behind_it_is_down_only_what_ram_holds_is_answered(own_server, model, write):
    with ParameterServer.from_config(write(own_server.port, alone=True)) as server:
        own_server.kill()
        keys = keys_of(model)
        rows = np.zeros((keys.size, 4), dtype=np.float32)
        in_ram = keys[server.stores[0].tables["dcn.table0"].fetch(keys, rows)]

        answer, found = server.lookup("dcn.table0", in_ram)
        assert found.all()
        assert answer.tobytes() == b"".join(model.tables[0][key].tobytes() for key in in_ram.tolist())
        assert in_ram.size == 60
        for missing in (np.setdiff1d(keys, in_ram)[:1], np.array([UNKNOWN])):
            with pytest.raises(StoreError, match="redis"):
                server.lookup("dcn.table0", missing)


def test_a_repository_is_served_from_three_tiers(redis_server, model, write):
    with ModelRepository(write(redis_server.port), Runtime("numpy")) as repository:
        repository.load()
        assert "tiers memory, redis, rocksdb" in list(repository.describe())
        dense, bags = model.draw_request(np.random.default_rng(1), 5)
        keys, row_ptrs, _ = model.flatten(bags)

        answer = repository.session("dcn").predict(dense, keys, row_ptrs)

    # float32 against float64, with sums of a few products
    np.testing.assert_allclose(np.asarray(answer).ravel(), model.expected(dense, bags).ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("command", ["check", "plan"])
def test_the_commands_read_three_tiers_and_connect_to_nobody(write, capsys, command):
    assert main([command, str(write(free_port()))]) == 0

    shown = capsys.readouterr()
    assert "table0" in shown.out
    assert not shown.err
    if command == "check":
        assert "volatile_db.capacity_rows_per_table limits 2 of the tables" in shown.out
