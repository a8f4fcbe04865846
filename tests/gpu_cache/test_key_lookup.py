"""Single keys get their tables' rows, bit for bit, with any content of the caches."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from tests.gpu_cache.bags import HELD_KEYS, LINES, Bags, Tables, finish, scheduled

FORMS = [("fp32", 1), ("fp32", 33), ("fp16", 7), ("bf16", 16), ("int8", 20), ("uint8", 130), ("fp8", 64)]


@pytest.fixture(scope="module")
def tables(device):
    return Tables(device, FORMS)


@pytest.fixture(scope="module")
def two_tables(device):
    return Tables(device, [("fp32", 5), ("int8", 20)])


@pytest.fixture
def work(two_tables):
    return workspace(two_tables)


def workspace(tables, max_keys=4000, **options):
    ones = [1] * len(tables.caches)
    return tables.group(ones, ["sum"] * len(ones), **options).workspace(1, max_keys, max_single_keys=max_keys)


def random_keys(rng, counts, share_held=0.5):
    keys = [rng.integers(0, HELD_KEYS, count) for count in counts]
    return [of_table + HELD_KEYS * (rng.random(of_table.size) >= share_held) for of_table in keys]


def is_right(tables, keys, rows):
    return [tables.device.to_host(got).tobytes() for got in rows] == [
        of_table[wanted].tobytes() for of_table, wanted in zip(tables.rows, keys, strict=True)
    ]


@pytest.mark.kernels
@settings(deadline=None, max_examples=8 if os.environ.get("HOTROW_RUNNER_SANITIZER") else 25)
@given(
    seed=st.integers(0, 2**32 - 1),
    most=st.sampled_from([0, 1, 40, 600]),
    share_held=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    schedule=st.integers(0, 4),
)
def test_rows_match_the_tables(device, tables, seed, most, share_held, schedule):
    rng = np.random.default_rng(seed)
    keys = random_keys(rng, rng.integers(0, most + 1, len(FORMS)), share_held)
    work = workspace(tables)

    with scheduled(device, schedule, 1 + schedule % 3):
        rows = work.lookup(keys)
        rounds = finish(work, tables)

    assert rounds == any((of_table >= HELD_KEYS).any() for of_table in keys)
    assert is_right(tables, keys, rows)


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_line_and_memory_gives_the_same_rows(device, line):
    tables = Tables(device, [("fp32", 5), ("int8", 20)], **line)
    keys = random_keys(np.random.default_rng(0), (300, 200))
    work = workspace(tables)

    rows = work.lookup(keys)

    assert finish(work, tables) == 1
    assert is_right(tables, keys, rows)


def test_a_row_keeps_bits_that_a_sum_would_lose(device):
    cache = EmbeddingCache(3, 10, device)
    row = np.array([[-0.0, 1e-45, -np.inf]], np.float32)
    cache.replace(np.array([1]), row)
    cache.stream.synchronize()
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 10, max_single_keys=10)

    (rows,) = work.lookup([np.array([1, 2])])
    work.missing()
    work.complete([row])

    assert work.missing() == ()
    assert device.to_host(rows).tobytes() == 2 * row.tobytes()


def test_a_graph_of_a_request_looks_up_its_keys_again(device, two_tables, work):
    keys = random_keys(np.random.default_rng(0), (300, 200), share_held=1.0)
    rows = work.lookup(keys)
    assert work.missing() == ()
    graph = device.capture(work.stream, work.queue_request)
    with device.using(work.stream):
        for of_table in rows:
            of_table[...] = 0

    with work.reading():
        graph.launch(work.stream)

    assert work.missing() == ()
    assert is_right(two_tables, keys, rows)


def test_missing_keys_are_reported_once_each_in_order_of_first_appearance(device, two_tables, work):
    rng = np.random.default_rng(1)
    for count in (2000, 100):
        keys = [rng.integers(0, 5000, count), rng.integers(150, 300, count)]

        with scheduled(device, count, 3):
            work.lookup(keys)
            missing = work.missing()

        absent_keys = [of_table[of_table >= HELD_KEYS] for of_table in keys]
        assert missing.positions.tolist() == missing.bags.tolist() == [absent.size for absent in absent_keys]
        for absent, told in zip(absent_keys, missing, strict=True):
            assert told.keys.tolist() == list(dict.fromkeys(absent.tolist()))
            assert told.times.tolist() == [np.count_nonzero(absent == key) for key in told.keys]


def test_a_missing_key_has_the_default_value_until_its_row_is_fetched(device, two_tables):
    work = workspace(two_tables, default_values=(0.5, -1.25))
    keys = random_keys(np.random.default_rng(2), (50, 300))

    rows = work.lookup(keys)

    assert work.missing()
    for t, (got, of_table) in enumerate(zip(rows, keys, strict=True)):
        want = np.where(of_table[:, None] < HELD_KEYS, two_tables.rows[t][of_table], np.float32((0.5, -1.25)[t]))
        assert device.to_host(got).tobytes() == want.tobytes()


def test_a_reserved_key_has_the_default_value_and_is_not_reported(device, two_tables):
    work = workspace(two_tables, default_values=(0.25, 0.0))
    keys = np.array([-(2**63), -(2**63) + 1, 3, 2**63 - 2, 2**63 - 1])

    rows, none = work.lookup([keys, keys[:0]])

    assert work.missing() == ()
    assert none.shape == (0, 20)
    assert device.to_host(rows).tolist() == [[0.25] * 5] * 2 + [two_tables.rows[0][3].tolist()] + [[0.25] * 5] * 2


def test_requests_of_bags_and_of_keys_of_any_size_alternate(device, two_tables):
    work = two_tables.group((1, 1), ("sum", "sum")).workspace(10, 4000, max_single_keys=3000)
    rng = np.random.default_rng(3)
    for count in (10, 0, 900, 3, 1000):
        keys = random_keys(rng, (count, 2 * count))
        rows = work.lookup(keys)
        finish(work, two_tables)
        assert is_right(two_tables, keys, rows)
        assert work.whole.size == sum(-(-part.size // 4) * 4 for part in rows)

        keys = random_keys(rng, (10, 10))
        pooled = work.pool([Bags(of_table, np.arange(11, dtype=np.int32)) for of_table in keys])
        finish(work, two_tables)
        assert is_right(two_tables, keys, pooled)  # a bag of one key is its row, except the sign of zeros


def test_blocks_that_take_several_items_look_up_the_same_rows(device, two_tables, monkeypatch):
    monkeypatch.setattr("gpu_cache.workspace._MOST_BLOCKS", 2)
    keys = random_keys(np.random.default_rng(4), (1500, 1000))
    work = workspace(two_tables)

    rows = work.lookup(keys)

    assert work._request.items >= 8
    assert finish(work, two_tables) == 1
    assert is_right(two_tables, keys, rows)


def test_tables_that_share_a_cache_miss_their_keys_separately(device):
    shared = Tables(device, [("fp32", 5)])
    shared.caches, shared.rows = shared.caches * 2, shared.rows * 2
    keys = [np.array([300, 301, 300, 5]), np.array([301, 300, 5])]
    work = workspace(shared)

    rows = work.lookup(keys)

    assert [told.keys.tolist() for told in work.missing()] == [[300, 301], [301, 300]]
    finish(work, shared)
    assert is_right(shared, keys, rows)


def test_a_launch_after_a_completed_request_changes_nothing(device, two_tables, work):
    keys = random_keys(np.random.default_rng(5), (300, 300))

    rows = work.lookup(keys)
    finish(work, two_tables)
    work.launch()

    assert work.missing() == ()
    assert is_right(two_tables, keys, rows)


def test_the_caches_count_lookups(device):
    tables = Tables(device, [("fp32", 5), ("int8", 20)])
    work = workspace(tables)
    keys = random_keys(np.random.default_rng(6), (300, 700))

    work.lookup(keys)
    finish(work, tables)

    for cache, of_table in zip(tables.caches, keys, strict=True):
        stats = cache.stats()
        assert (stats.found_keys, stats.missed_keys) == ((of_table < HELD_KEYS).sum(), (of_table >= HELD_KEYS).sum())


def test_a_row_that_was_looked_up_outlasts_unused_rows(device):
    cache = EmbeddingCache(4, 15, device)  # one line
    cache.replace(np.arange(15), np.zeros((15, 4), np.float32))
    cache.stream.synchronize()
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 100, max_single_keys=100)

    for key in range(7):  # one by one: simultaneous uses of one line count as one
        work.lookup([np.array([key])])
    work.stream.synchronize()
    for _ in range(3):
        cache.replace(np.arange(100, 103), np.ones((3, 4), np.float32), np.full(3, 2, np.uint32))

    held = set(cache.dump()[0].tolist())
    assert set(range(7)) <= held
    assert held & {100, 101, 102}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([np.arange(4)], "expected keys of 2 tables, got 1"),
        ([np.arange(4), np.arange(4, dtype=np.int32)], r"table 1: keys: expected int64\[N\], got int32"),
        ([np.zeros((2, 2), np.int64), np.arange(4)], r"table 0: keys: .* got int64\[2, 2\]"),
        ([np.arange(7), np.arange(4)], "at most 10 single keys"),
    ],
)
def test_wrong_keys_are_refused(two_tables, keys, message):
    work = workspace(two_tables, max_keys=10)
    with pytest.raises(ValueError, match=message):
        work.lookup(keys)

    rows = work.lookup([np.arange(5), np.arange(5)])
    work.stream.synchronize()
    assert is_right(two_tables, [np.arange(5)] * 2, rows)


def test_more_single_keys_than_the_workspace_holds_are_refused(two_tables):
    group = two_tables.group((1, 1), ("sum", "sum"))
    for most in (0, 7):
        work = group.workspace(20, 1000, max_single_keys=most)
        with pytest.raises(ValueError, match=f"expected at most {most} single keys, .*, got {most + 1}"):
            work.lookup([np.arange(most), np.arange(1)])

    rows = work.lookup([np.arange(3), np.arange(4)])
    assert work.missing() == ()
    assert is_right(two_tables, [np.arange(3), np.arange(4)], rows)
