"""A parameter server whose RAM evicts: answers stay exact, memory stays bounded, updates and promotions make room."""

import numpy as np
import pytest

from kernels.host import HostTable
from serving.config import read_inference_config
from serving.parameter_server import FirstRows, ParameterServer, TierSettings
from serving.storage import MemoryStore, RocksDbStore

TABLE = "dcn.table0"
POLICIES = ["evict_random", "evict_least_used", "evict_oldest"]
WAIT_S = 60


def keys_of(model):
    return np.array(list(model.tables[0]), dtype=np.int64)


def opened(model, tmp_path, policy="evict_oldest", bound=1000, **options):
    memory = MemoryStore(capacity_rows_of_each_table=bound, overflow_policy=policy)
    server = ParameterServer([memory, RocksDbStore(tmp_path / "db", num_threads=1)], promote=True, **options)
    server.load_model(read_inference_config(model.config_file, "dcn"))
    return server, memory


def assert_exact(server, keys, rows):
    answer, found = server.lookup(TABLE, keys)
    assert found.all()
    assert answer.tobytes() == b"".join(rows[key].tobytes() for key in keys.tolist())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_four_times_its_bound_serves_exact_answers_and_its_memory_stays(write_model, tmp_path, policy):
    model = write_model(write_model.table(rows=4000, dim=4))
    keys, rows = keys_of(model), model.tables[0]
    rng = np.random.default_rng(0)
    server, memory = opened(model, tmp_path, policy)
    with server:
        for _ in range(40):
            assert_exact(server, rng.choice(keys, 400), rows)
            assert server.wait_for_promotions(WAIT_S)
            assert memory.tables[TABLE].count() <= 1000
            assert memory.tables[TABLE].size_bytes == HostTable.memory_bytes(4, 1000, overflow_policy=policy)
        tier = server.counters()[TABLE].tiers[0]
        evicted = memory.tables[TABLE].evicted_rows
        assert_exact(server, keys, rows)

    assert tier.promoted_rows >= evicted > 1000
    assert tier.dropped_promotions == 0


@pytest.mark.parametrize("policy", ["evict_least_used", "evict_oldest"])
def test_the_hit_rate_rises_from_that_of_the_file_towards_that_of_the_best_fixed_rows(write_model, tmp_path, policy):
    model = write_model(write_model.table(rows=4000, dim=4))
    keys = np.random.default_rng(0).permutation(keys_of(model))
    weights = 1 / np.arange(1, 4001) ** 1.05
    best = weights[:1000].sum() / weights.sum()
    rng = np.random.default_rng(1)
    server, memory = opened(model, tmp_path, policy)
    rates = []
    with server:
        for _ in range(10):
            before = server.counters()[TABLE].hits.get("memory", 0)
            for _ in range(25):
                server.lookup(TABLE, rng.choice(keys, 100, p=weights / weights.sum()))
                assert server.wait_for_promotions(WAIT_S)
            rates.append((server.counters()[TABLE].hits.get("memory", 0) - before) / 2500)

        assert memory.tables[TABLE].evicted_rows

    assert rates[0] < rates[-1] <= best + 0.02
    assert np.mean(rates[-3:]) > 0.88 * best


def test_an_update_of_new_keys_makes_room_in_ram_and_is_found_in_both_tiers(write_model, tmp_path):
    model = write_model(write_model.table(rows=300, dim=4))
    server, memory = opened(model, tmp_path, bound=100)
    fresh = np.arange(50) + 10**6
    rows = np.random.default_rng(0).standard_normal((50, 4), dtype=np.float32)
    with server:
        server.insert(TABLE, fresh, rows)

        assert_exact(server, fresh, dict(zip(fresh.tolist(), rows, strict=True)))
        assert server.counters()[TABLE].hits == {"memory": 50}
        assert_exact(server, keys_of(model), model.tables[0])
        assert memory.tables[TABLE].count() <= 100
        out = np.empty((50, 4), dtype=np.float32)
        assert server.stores[1].tables[TABLE].fetch(fresh, out).all()


def test_an_updated_row_that_was_evicted_comes_back_as_it_was_updated(write_model, tmp_path):
    model = write_model(write_model.table(rows=300, dim=4))
    server, memory = opened(model, tmp_path, bound=100)
    keys = keys_of(model)
    changed, rows = keys[:1], np.full((1, 4), 7.0, dtype=np.float32)
    with server:
        server.insert(TABLE, changed, rows)
        server.lookup(TABLE, keys[100:250])
        assert server.wait_for_promotions(WAIT_S)
        assert not memory.tables[TABLE].fetch(changed, np.empty((1, 4), dtype=np.float32)).any()

        assert_exact(server, changed, {int(changed[0]): rows[0]})


def test_ram_that_starts_empty_fills_itself_with_what_is_asked_for(write_model, tmp_path):
    model = write_model(write_model.table(rows=300, dim=4))
    empty = {"memory": TierSettings(first_rows=FirstRows(cache_rate=0.0))}
    server, memory = opened(model, tmp_path, bound=100, settings=empty)
    keys = keys_of(model)
    with server:
        assert memory.tables[TABLE].count() == 0
        server.lookup(TABLE, keys[:60])
        assert server.wait_for_promotions(WAIT_S)

        assert memory.tables[TABLE].count() == 60
        assert_exact(server, keys, model.tables[0])


def test_without_a_slower_tier_what_was_evicted_is_unknown(write_model):
    model = write_model(write_model.table(rows=95, dim=4))
    memory = MemoryStore(capacity_rows_of_each_table=100, overflow_policy="evict_oldest")
    fresh = np.arange(10) + 10**6
    with ParameterServer([memory]) as server:
        server.load_model(read_inference_config(model.config_file, "dcn"))
        server.insert(TABLE, fresh, np.ones((10, 4), dtype=np.float32))

        _, found = server.lookup(TABLE, keys_of(model))

        assert np.count_nonzero(~found) == memory.tables[TABLE].evicted_rows == 15
