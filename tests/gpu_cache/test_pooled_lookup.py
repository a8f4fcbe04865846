"""Pooled lookups of a group match the host's loops, bit for bit, with any content of the caches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_cache.bag_layout import COMBINERS
from tests.gpu_cache.bags import LINES, TABLE_KEYS, Bags, Tables, expected, finish, host_rows, random_request, scheduled

FORMS = [("fp32", 1), ("fp32", 33), ("fp16", 7), ("bf16", 16), ("int8", 20), ("uint8", 130), ("fp8", 64)]
LENGTHS = [0, 1, 2, 4, 20, 200]


@pytest.fixture(scope="module")
def tables(device):
    return Tables(device, FORMS)


def random_weights(rng, request, kind):
    """Weights for some tables, including zeros and negative weights, or None."""
    if kind == "none":
        return None
    weights = [rng.standard_normal(bags.keys.size, dtype=np.float32) for bags in request]
    for of_table in weights:
        of_table[rng.random(of_table.size) < 0.2] = 0.0
    return [None if kind == "some" and t % 2 else of_table for t, of_table in enumerate(weights)]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 6),
    combiner=st.sampled_from(COMBINERS),
    longest=st.integers(1, len(LENGTHS)),
    share_held=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    weighted=st.sampled_from(["none", "some", "all"]),
    schedule=st.integers(0, 3),
)
def test_pooled_rows_match_the_host(device, tables, seed, samples, combiner, longest, share_held, weighted, schedule):
    rng = np.random.default_rng(seed)
    slots = rng.integers(1, 4, len(FORMS)).tolist()
    combiners = [combiner, *rng.choice(COMBINERS, len(FORMS) - 1).tolist()]
    request = random_request(rng, samples, slots, LENGTHS[:longest], share_held)
    weights = random_weights(rng, request, weighted)
    work = tables.group(slots, combiners).workspace(8, 40_000)

    with scheduled(device, schedule, 1 + schedule % 2):
        pooled = work.pool(request, weights)
        rounds = finish(work, tables)

    assert rounds == (any((bags.keys >= 200).any() for bags in request))
    for t, got in enumerate(host_rows(device, pooled)):
        want = expected(tables.rows[t], request[t], combiners[t], weights and weights[t])
        assert got.tobytes() == want.tobytes(), f"table {t}"


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_line_and_memory_gives_the_same_rows(device, line):
    tables = Tables(device, [("fp32", 5), ("int8", 20)], **line)
    request = random_request(np.random.default_rng(0), 20, (2, 1), [0, 1, 7])
    work = tables.group((2, 1), ("mean", "sum")).workspace(20, 1000)

    pooled = work.pool(request)

    assert finish(work, tables) == 1
    for t, (got, combiner) in enumerate(zip(host_rows(device, pooled), ("mean", "sum"), strict=True)):
        assert got.tobytes() == expected(tables.rows[t], request[t], combiner).tobytes()


@pytest.fixture(scope="module")
def two_tables(device):
    return Tables(device, [("fp32", 5), ("int8", 20)])


def test_a_bag_of_several_rounds_of_keys_is_summed_in_one_order(device, two_tables):
    rng = np.random.default_rng(1)
    counts = [[256, 0, 1, 255, 1000, 0, 300], [0, 513, 0, 0, 2, 600, 256]]
    request = [
        Bags(rng.integers(0, TABLE_KEYS, sum(of_table)), np.concatenate(([0], np.cumsum(of_table))).astype(np.int32))
        for of_table in counts
    ]
    weights = [rng.standard_normal(bags.keys.size, dtype=np.float32) for bags in request]
    work = two_tables.group((1, 1), ("sqrtn", "mean")).workspace(7, 4000)

    pooled = work.pool(request, weights)

    assert finish(work, two_tables) == 1
    for t, (got, combiner) in enumerate(zip(host_rows(device, pooled), ("sqrtn", "mean"), strict=True)):
        assert got.tobytes() == expected(two_tables.rows[t], request[t], combiner, weights[t]).tobytes()


@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.parametrize("schedule", [0, 2])
def test_long_bags_of_every_form_are_summed_in_one_order(device, tables, max_norm, schedule):
    rng = np.random.default_rng(schedule)
    row_ptrs = np.cumsum([0, 0, 300, 20, 1, 600]).astype(np.int32)
    count, ones, norms = row_ptrs[-1], [1] * len(FORMS), [max_norm] * len(FORMS)
    keys = [rng.integers(0, 200, count) + 200 * (rng.random(count) < 0.1) for _ in FORMS]
    request = [Bags(of_table, row_ptrs) for of_table in keys]
    weights = [rng.standard_normal(count, dtype=np.float32) if t % 2 else None for t in range(len(FORMS))]
    work = tables.group(ones, ["mean"] * len(FORMS), max_norms=norms).workspace(5, 10_000)
    single = tables.group(ones, ["sum"] * len(FORMS), max_norms=norms).workspace(TABLE_KEYS, 10_000)
    bags = Bags(np.arange(TABLE_KEYS), np.arange(TABLE_KEYS + 1, dtype=np.int32))
    scaled = single.pool([bags] * len(FORMS))
    finish(single, tables)

    with scheduled(device, schedule, 1 + schedule % 2):
        pooled = work.pool(request, weights)
        assert finish(work, tables) == 1

    for t, (got, rows) in enumerate(zip(host_rows(device, pooled), host_rows(device, scaled), strict=True)):
        assert got.tobytes() == expected(rows, request[t], "mean", weights[t]).tobytes(), f"table {t}"


def test_missing_keys_are_reported_in_order_of_first_appearance(device, two_tables):
    request = random_request(np.random.default_rng(2), 150, (2, 3), [0, 1, 3])
    work = two_tables.group((2, 3), ("sum", "sum")).workspace(150, 4000)

    with scheduled(device, 5, 2):
        work.pool(request)
        missing = work.missing()

    for t, (bags, told) in enumerate(zip(request, missing, strict=True)):
        absent = bags.keys[bags.keys >= 200]
        first = list(dict.fromkeys(absent.tolist()))
        lacking = np.unique(np.searchsorted(bags.row_ptrs, np.flatnonzero(bags.keys >= 200), side="right"))
        assert told.keys.tolist() == first
        assert told.times.tolist() == [np.count_nonzero(absent == key) for key in first]
        assert (missing.positions[t], missing.bags[t]) == (absent.size, lacking.size)


def test_no_key_is_missing_if_the_caches_hold_every_key(device, two_tables):
    request = random_request(np.random.default_rng(3), 10, (1, 1), [1, 4], share_held=1.0)
    work = two_tables.group((1, 1), ("sum", "sum")).workspace(10, 100)

    work.pool(request)

    assert work.missing() == ()


def test_a_request_without_keys_is_pooled_to_zeros(device, two_tables):
    empty = Bags(np.empty(0, np.int64), np.zeros(11, np.int32))
    work = two_tables.group((1, 1), ("mean", "sqrtn")).workspace(10, 1)

    pooled = work.pool([empty, empty], [np.empty(0, np.float32), None])

    assert work.missing() == ()
    assert all(not got.any() and not np.signbit(got).any() for got in host_rows(device, pooled))


def test_a_missing_key_counts_as_the_default_value_until_its_row_is_fetched(device, two_tables):
    request = random_request(np.random.default_rng(4), 10, (1, 1), [1, 4])
    work = two_tables.group((1, 1), ("sum", "mean"), default_values=(0.5, -1.25)).workspace(10, 100)

    pooled = work.pool(request)

    assert work.missing()
    for t, got in enumerate(host_rows(device, pooled)):
        rows = two_tables.rows[t].copy()
        rows[200:] = (0.5, -1.25)[t]
        assert got.tobytes() == expected(rows, request[t], ("sum", "mean")[t]).tobytes()


def test_a_reserved_key_counts_as_the_default_value_and_is_not_reported(device, two_tables):
    reserved = np.array([-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1])
    bags = Bags(np.concatenate((reserved, [3])), np.array([0, 2, 5], np.int32))
    none = Bags(np.empty(0, np.int64), np.zeros(3, np.int32))
    work = two_tables.group((1, 1), ("sum", "sum"), default_values=(0.25, 0.0)).workspace(2, 10)

    pooled = work.pool([bags, none])

    assert work.missing() == ()
    row = two_tables.rows[0][3]
    assert host_rows(device, pooled)[0].tolist() == [[0.5] * 5, (np.float32(0.5) + row).tolist()]


def test_tables_that_share_a_cache_miss_their_keys_separately(device, two_tables):
    shared = Tables(device, [("fp32", 5)])
    shared.caches, shared.rows = shared.caches * 2, shared.rows * 2
    keys = np.array([300, 301, 300, 5])
    request = [Bags(keys, np.array([0, 4], np.int32)), Bags(keys[1:], np.array([0, 3], np.int32))]
    work = shared.group((1, 1), ("sum", "mean")).workspace(1, 10)

    pooled = work.pool(request)
    missing = work.missing()
    work.complete(shared.fetch(missing))

    assert [told.keys.tolist() for told in missing] == [[300, 301], [301, 300]]
    assert work.missing() == ()
    for t, combiner in enumerate(("sum", "mean")):
        want = expected(shared.rows[t], request[t], combiner)
        assert host_rows(device, pooled)[t].tobytes() == want.tobytes()


@pytest.mark.parametrize("share_held", [0.0, 0.5, 1.0])
def test_rows_longer_than_max_norm_are_scaled_to_it(device, tables, share_held):
    request = random_request(np.random.default_rng(6), 12, [1] * len(FORMS), [0, 1, 5], share_held)
    norms = [None, *(0.6 * np.sqrt(dim) for dim in tables.dims[1:])]
    work = tables.group([1] * len(FORMS), ["sum"] * len(FORMS), max_norms=norms).workspace(12, 2000)

    pooled = work.pool(request)
    finish(work, tables)

    for t, got in enumerate(host_rows(device, pooled)):
        rows = tables.rows[t].astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        if norms[t] is not None:
            rows *= np.minimum(1, norms[t] / lengths)
        want = np.add.reduceat(np.vstack((rows[request[t].keys], rows[:1] * 0)), request[t].row_ptrs[:-1])
        want[np.diff(request[t].row_ptrs) == 0] = 0
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)  # float32 sums of five


def test_a_scaled_row_has_the_same_bits_in_the_cache_and_fetched(device, tables):
    ones = [1] * len(FORMS)
    held = random_request(np.random.default_rng(7), 12, ones, [1, 5], share_held=1.0)
    work = tables.group(ones, ["mean"] * len(FORMS), max_norms=[0.5] * len(FORMS)).workspace(12, 2000)
    first = host_rows(device, (work.pool(held), work.missing())[0])

    for cache in tables.caches:
        cache.erase(np.arange(200))
    fetched = work.pool(held)
    rounds = finish(work, tables)
    second = host_rows(device, fetched)
    for cache, rows in zip(tables.caches, tables.rows, strict=True):
        cache.replace(np.arange(200), rows[:200])

    assert rounds == 1
    assert [got.tobytes() for got in second] == [got.tobytes() for got in first]


def test_a_row_is_scaled_before_it_is_weighted(device, two_tables):
    keys = np.arange(100, 300)
    bags = Bags(keys, np.arange(201, dtype=np.int32))  # one key in each
    weights = np.random.default_rng(9).standard_normal(200, dtype=np.float32)
    work = two_tables.group((1, 1), ("sum", "sum"), max_norms=(1.5, None)).workspace(200, 400)

    pooled = work.pool([bags, bags], [weights, None])
    finish(work, two_tables)

    rows = two_tables.rows[0][keys]
    squares = rows * rows
    norms = np.sqrt((squares[:, 0] + squares[:, 1] + squares[:, 2] + squares[:, 3]) + squares[:, 4])
    factors = np.where(norms > 1.5, np.float32(1.5) / norms, np.float32(1))
    want = rows * factors[:, None] * weights[:, None]
    assert host_rows(device, pooled)[0].tobytes() == want.tobytes()


def test_the_pooled_rows_of_all_tables_are_parts_of_one_buffer_at_multiples_of_16_bytes(device, tables):
    ones = [1] * len(FORMS)
    work = tables.group(ones, ["sum"] * len(FORMS)).workspace(9, 1000)

    pooled = work.pool(random_request(np.random.default_rng(8), 5, ones, [1]))

    assert [array.shape for array in pooled] == [(5, 1, dim) for dim in tables.dims]
    assert all(array.flags.c_contiguous for array in pooled)
    starts = work._request.head["first_float"]  # the kernel gets these offsets
    assert all(start % 4 == 0 for start in starts)
    work.stream.synchronize()
