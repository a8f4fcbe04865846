"""A group and its workspaces refuse wrong arguments, name the table and the fault, and stay usable."""

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError
from gpu_cache.readers import Readers
from tests.gpu_cache.bags import Bags, Tables

COMBINERS = ("mean", "sum")
EMPTY = Bags(np.empty(0, np.int64), np.zeros(3, np.int32))
KEYS = Bags(np.arange(4), np.array([0, 1, 4], np.int32))


@pytest.fixture(scope="module")
def two(tables):
    return tables.group((2, 2), COMBINERS).workspace(2, 10)


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        ([KEYS], "expected bags of 2 tables, got 1"),
        (
            [KEYS, Bags(np.arange(4, dtype=np.int32), KEYS.row_ptrs)],
            r"table 1: keys: expected int64\[N\], got int32",
        ),
        ([Bags(np.zeros((2, 2), np.int64), KEYS.row_ptrs), KEYS], r"table 0: keys: .* got int64\[2, 2\]"),
        ([KEYS, Bags(KEYS.keys, np.array([0, 1, 4]))], "table 1: row_ptrs: expected int32"),
        ([KEYS, Bags(KEYS.keys, np.array([0, 4], np.int32))], r"table 1: row_ptrs: expected int32\[3\]"),
        ([Bags(KEYS.keys, np.array([0], np.int32)), KEYS], "expected 1 to 2 samples, got 0"),
        ([Bags(KEYS.keys, np.array([0, 0, 0, 0, 0, 0, 4], np.int32)), KEYS], "1 to 2 samples, got 3"),
        ([KEYS, Bags(KEYS.keys, np.array([0, 1, 3], np.int32))], "table 1: row_ptrs: .* 0 to 4, got 0 to 3"),
        ([Bags(KEYS.keys, np.array([1, 1, 4], np.int32)), KEYS], "table 0: row_ptrs: .* got 1 to 4"),
        ([EMPTY, Bags(KEYS.keys, np.array([0, 5, 4], np.int32))], "table 1: row_ptrs: falls from 5 to 4 at 2"),
        ([Bags(KEYS.keys, np.array([0, -1, 4], np.int32)), KEYS], "table 0: row_ptrs: falls from 0 to -1 at 1"),
        ([KEYS, Bags(np.arange(7), np.array([0, 1, 7], np.int32))], "at most 10 keys, .*, got 11"),
    ],
)
def test_wrong_bags_are_refused(two, bags, message):
    with pytest.raises(ValueError, match=message):
        two.pool(bags)
    two.pool([KEYS, EMPTY])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([None], "expected weights of 2 tables, got 1"),
        ([None, np.ones(3, np.float32)], r"table 1: weights: expected float32\[4\], got float32\[3\]"),
        ([np.ones(4), None], r"table 0: weights: expected float32\[4\], got float64"),
    ],
)
def test_wrong_weights_are_refused(two, weights, message):
    with pytest.raises(ValueError, match=message):
        two.pool([KEYS, KEYS], weights)


@pytest.mark.parametrize(
    ("dense", "got"),
    [
        (np.ones((2, 2), np.float32), r"float32\[2, 2\]"),
        (np.ones((1, 3), np.float32), r"float32\[1, 3\]"),
        (np.ones(6, np.float32), r"float32\[6\]"),
        (np.ones((2, 3)), r"float64\[2, 3\]"),
    ],
)
def test_wrong_dense_features_are_refused(tables, dense, got):
    work = tables.group((1, 1), COMBINERS).workspace(2, 10, dense_dim=3)

    with pytest.raises(ValueError, match=rf"dense: expected float32\[2, 3\], got {got}"):
        work.load([KEYS, KEYS], dense=dense)
    work.load([KEYS, KEYS], dense=np.ones((2, 3), np.float32))


def test_wrong_rows_are_refused(two):
    absent = Bags(np.array([300, 301]), np.array([0, 1, 2], np.int32))
    two.pool([absent, EMPTY])
    with pytest.raises(ValueError, match=r"expected a call of missing\(\)"):
        two.complete([])
    two.missing()
    none = np.empty((0, 20), np.float32)
    for rows, message in (
        ([none], "expected rows of 2 tables, got 1"),
        ([np.ones((1, 5), np.float32), none], r"table 0: rows: expected float32\[2, 5\], got float32\[1, 5\]"),
        ([np.ones((2, 5)), none], r"table 0: rows: expected float32\[2, 5\], got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            two.complete(rows)
    two.complete([np.ones((2, 5), np.float32), none])
    with pytest.raises(ValueError, match=r"expected a call of missing\(\)"):
        two.complete([])
    assert two.missing() == ()


@pytest.fixture(scope="module")
def tables(device):
    return Tables(device, [("fp32", 5), ("int8", 20)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": (1,)}, "slots: expected one for each of 2 tables, got 1"),
        ({"slots": (1, 0)}, "table 1: slots: expected at least 1, got 0"),
        ({"combiners": ("sum", "max")}, "table 1: combiner: expected one of sum, mean, sqrtn, got 'max'"),
        ({"default_values": (0.0, np.inf)}, "table 1: default_value: expected a finite number"),
        ({"default_values": (0.0, -1e39)}, "table 1: default_value: .* of float32, got -1e"),
        ({"max_norms": (0.0, None)}, "table 0: max_norm: expected a number above 0"),
        ({"max_norms": (None, -1.0)}, "table 1: max_norm"),
        ({"max_norms": (None, np.nan)}, "table 1: max_norm"),
        ({"max_norms": (1e39, None)}, "table 0: max_norm: .* of float32"),
        ({"max_norms": (1e-46, None)}, "table 0: max_norm: .* of float32"),
    ],
)
def test_a_wrong_group_is_refused(tables, changes, message):
    arguments = {"slots": (1, 1), "combiners": ("sum", "sum")} | changes

    with pytest.raises(ValueError, match=message):
        CacheGroup(tables.caches, **arguments)


def test_slots_and_caches_of_another_type_are_refused(tables):
    with pytest.raises(TypeError, match=r"table 1: slots: expected a whole number, got 1\.5"):
        CacheGroup(tables.caches, (1, 1.5), ("sum", "sum"))
    with pytest.raises(TypeError, match="table 1: expected an EmbeddingCache, got 'cache'"):
        CacheGroup([tables.caches[0], "cache"], (1, 1), ("sum", "sum"))


def test_a_group_with_a_closed_cache_is_refused_and_does_not_use_the_cache(device):
    caches = [EmbeddingCache(4, 10, device, readers=Readers())]
    group = CacheGroup(caches, (2,), ("sum",))
    works = [group.workspace(2, 10) for _ in range(2)]
    works[1].pool([KEYS])
    works[1].missing()
    caches[0].close()

    calls = [
        lambda: works[0].pool([KEYS]),
        lambda: works[0].lookup([KEYS.keys]),
        lambda: works[1].complete([np.ones((4, 4), np.float32)]),
        lambda: CacheGroup(caches, (2,), ("sum",)),
    ]
    for call in calls:
        with pytest.raises(CacheClosedError, match="was closed"):
            call()


def test_caches_that_one_launch_cannot_query_are_refused(device, tables):
    first = tables.caches[0]
    with pytest.raises(ValueError, match="expected at least one"):
        CacheGroup([], (), ())
    with pytest.raises(ValueError, match="table 1: its cache has other Readers"):
        CacheGroup([first, EmbeddingCache(4, 10, device)], (1, 1), ("sum", "sum"))
    with pytest.raises(ValueError, match="table 1: its cache has another key type or other lines"):
        CacheGroup([first, EmbeddingCache(4, 10, device, line_keys=7, readers=first.readers)], (1, 1), ("sum", "sum"))


def test_caches_of_two_devices_are_refused(runner):
    first = EmbeddingCache(4, 10, runner)
    with pytest.raises(ValueError, match="table 1: its cache is on runner:1, the cache of table 0 on runner"):
        CacheGroup([first, EmbeddingCache(4, 10, "runner:1", readers=first.readers)], (1, 1), ("sum", "sum"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 10), "max_samples"),
        ((1, 0), "max_keys"),
        ((1, 2**30 + 1), "max_keys: expected 1 to 1073741824"),
        ((1, 1, -1), "dense_dim: expected at least 0, got -1"),
        ((1, 1, 0, -1), "max_single_keys: expected 0 to 1, got -1"),
        ((1, 10, 0, 11), "max_single_keys: expected 0 to 10, got 11"),
        ((1, 10, 0, 1.5), "max_single_keys: expected a whole number, got 1.5"),
        ((1.5, 10), "max_samples: expected a whole number, got 1.5"),
        ((1, "10"), "max_keys: expected a whole number, got '10'"),
    ],
)
def test_a_workspace_of_an_invalid_size_is_refused(tables, sizes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tables.group((1, 1), ("sum", "sum")).workspace(*sizes)
