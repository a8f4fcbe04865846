"""Caches with lines of 32-bit keys: the two largest uint32 mark slots there, but clients may use them as keys."""

import numpy as np
import pytest

from kernels.errors import HotrowError
from serving.config import TableConfig
from serving.lookup import LookupSession
from serving.lookup.cache_plan import plan_caches
from serving.model.sparse_file import write_sparse_directory
from tests.serving.lookup.cached import Sketch, cached, request, same, served, with_cache, write_model
from tests.serving.lookup.test_cached_session import counted, first_table, held

LARGEST = 2**32 - 1
LARGEST_HELD = LARGEST - 2
AROUND_THE_BOUND = np.array([LARGEST, LARGEST_HELD, LARGEST - 1, 0, LARGEST], dtype=np.int64)
NEW = np.array([[5.0] * 4, [6.0] * 4], dtype=np.float32)


def in_32_bits(config, **said):
    """Return the configuration with uint32 keys and lines of 32-bit keys."""
    return with_cache(config.model_copy(update={"key_type": "I32"}), key_bits=32, **said)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A table with the keys 0, 3, 6, ... and the largest three, and with a default that no row has."""
    folder = tmp_path_factory.mktemp("model")
    keys = np.array([*range(0, 60, 3), LARGEST_HELD, LARGEST - 1, LARGEST], dtype=np.int64)
    rows = np.random.default_rng(3).normal(0, 1, (keys.size, 4)).astype(np.float32)
    write_sparse_directory(folder / "wide", keys, rows)
    config = in_32_bits(write_model(folder, [Sketch(4, slots=1)], size_ratio=1.0))
    table = TableConfig(name="wide", dim=4, slots=1, combiner="sum", default_value=9.0, file=folder / "wide")
    return config.model_copy(update={"tables": (table,)})


@pytest.mark.parametrize("kind", ["dynamic", "static", "uvm"])
@pytest.mark.parametrize("fills_at_start", [True, False])
def test_the_two_largest_keys_are_answered_by_the_tiers_and_never_cached(device, config, kind, fills_at_start):
    config = with_cache(config, kind=kind, fills_at_start=fills_at_start)
    batch = first_table(config, AROUND_THE_BOUND)

    with served(config) as server, cached(server, config, device) as lookup:
        expected = LookupSession(server, config).lookup_pooled(batch)
        first = lookup.lookup_pooled(batch)
        (missed,) = counted(lookup, "misses")
        second = lookup.lookup_pooled(batch)

        assert same(first, expected)
        assert same(second, expected)
        assert expected.defaulted_keys == 0
        assert held(lookup) >= {0, LARGEST_HELD}
        assert not held(lookup) & {LARGEST, LARGEST - 1}
        assert counted(lookup, "misses") == [missed + 3]


def test_the_two_largest_keys_are_answered_one_by_one_too(device, config):
    with served(config) as server, cached(server, config, device) as lookup:
        expected = LookupSession(server, config).lookup([AROUND_THE_BOUND])
        for _ in range(2):
            assert same(lookup.lookup([AROUND_THE_BOUND]), expected)


def test_rows_of_the_two_largest_keys_may_change_behind_a_cache(device, config):
    largest = np.array([LARGEST - 1, LARGEST], dtype=np.int64)
    batch = first_table(config, largest)

    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup_pooled(batch)
        server.insert("m.wide", largest, NEW)
        changed = lookup.lookup_pooled(batch)
        lookup.refresh()
        server.evict("m.wide", largest)
        gone = lookup.lookup_pooled(batch)

    assert changed.embeddings[0].tolist() == [[[11.0] * 4]]
    assert (gone.embeddings[0].tolist(), gone.defaulted_keys) == ([[[18.0] * 4]], 2)


def test_a_key_beyond_uint32_is_refused_and_changes_nothing(device, config):
    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup_pooled(first_table(config, np.array([0], dtype=np.int64)))

        with pytest.raises(HotrowError, match="key 4294967296 at position 1 is not 0 to 4294967295"):
            server.insert("m.wide", np.array([0, 2**32], dtype=np.int64), NEW)

        assert held(lookup) == {0}


def test_the_asynchronous_mode_waits_for_rows_that_can_never_be_cached(device, config):
    config = with_cache(config, mode="asynchronous", hit_rate_threshold=0.0)
    batch, later = (first_table(config, np.array(keys, dtype=np.int64)) for keys in ([0, LARGEST], [3, 6]))

    with served(config) as server, cached(server, config, device) as lookup:
        for _ in range(2):
            assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))
        assert lookup.lookup_pooled(later).defaulted_keys == 2  # a request of ordinary keys does not wait


def test_all_tables_of_a_model_have_lines_of_32_bit_keys(device, tmp_path):
    config = in_32_bits(write_model(tmp_path), size_ratio=0.3)
    rng = np.random.default_rng(2)

    with served(config) as server, cached(server, config, device) as lookup:
        for _ in range(4):
            batch = request(config, rng, unknown_ratio=0.0)
            assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))
    assert {plan.capacity.layout.key_type for plan in lookup.plans} == {"U32"}


def test_lines_of_32_bit_keys_take_half_the_bytes_and_are_reported(config):
    plans, wide = plan_caches(config), plan_caches(with_cache(config, key_bits=64))

    assert (
        wide[0].capacity.device_bytes - plans[0].capacity.device_bytes == 3 * 64
    )  # lines for 23 rows and for absent keys
    assert str(plans[0]).startswith("wide dynamic 30 of 23 rows fp32, 32-bit keys, ")
