"""The cache returns the rows that it was given, and its stats are right."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheFullError
from kernels.host import round_rows

FORMS = {
    "15 x i64": {},
    "7 x i64": {"line_keys": 7},
    "15 x u32": {"key_type": "U32"},
    "uvm": {"kind": "uvm"},
    "static": {"kind": "static"},
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture
def make_cache(device):
    """Make caches that are closed after the test."""
    made = []

    def make(capacity_rows=600, dim=4, **options):
        made.append(EmbeddingCache(dim, capacity_rows, device=device, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def rows_of(keys, dim=4, version=0):
    return (np.asarray(keys)[:, None] * 3.0 + np.arange(dim) + version * 1000).astype(np.float32)


def ask(cache, keys):
    """Return rows, and which keys were found."""
    answer = cache.query(np.asarray(keys, dtype=np.int64))
    cache.stream.synchronize()
    with cache.device.using(cache.stream):
        rows, positions = cache.device.to_host(answer.rows), cache.device.to_host(answer.missing_positions)
    found = np.ones(len(keys), dtype=bool)
    found[positions[: answer.missing_count[0]]] = False
    return rows, found


def test_replaced_keys_are_found_and_other_rows_are_zeros(make_cache, form):
    cache = make_cache(**form)
    keys = np.arange(200, dtype=np.int64) * 7

    cache.replace(keys, rows_of(keys))
    rows, found = ask(cache, np.arange(1400))

    expected = rows_of(np.arange(1400))
    expected[np.arange(1400) % 7 != 0] = 0
    np.testing.assert_array_equal(found, np.arange(1400) % 7 == 0)
    np.testing.assert_array_equal(rows, expected)


def test_device_arrays_work_like_host_arrays(make_cache, form):
    cache = make_cache(**form)
    keys = np.arange(50, dtype=np.int64)
    misses, asarray = np.ones(50, np.uint32), cache.device.xp.asarray

    with cache.device.using(cache.stream):
        cache.replace(asarray(keys), asarray(rows_of(keys)), misses=asarray(misses))
        answer = cache.query(asarray(keys))
        cache.update(asarray(keys[:5]), asarray(rows_of(keys[:5], version=1)))
        cache.erase(asarray(keys[40:]))
    cache.stream.synchronize()

    assert answer.missing_count[0] == 0
    np.testing.assert_array_equal(cache.device.to_host(answer.rows), rows_of(keys))
    rows, found = ask(cache, keys)
    np.testing.assert_array_equal(found, keys < 40)
    np.testing.assert_array_equal(rows[:5], rows_of(keys[:5], version=1))


def test_replace_keeps_the_row_of_a_held_key_and_update_writes_the_new_row(make_cache, form):
    cache, keys = make_cache(**form), np.arange(30, dtype=np.int64)
    cache.replace(keys, rows_of(keys))

    cache.replace(keys, rows_of(keys, version=1))
    np.testing.assert_array_equal(ask(cache, keys)[0], rows_of(keys))

    cache.update(np.arange(20, 40, dtype=np.int64), rows_of(np.arange(20, 40), version=2))
    rows, found = ask(cache, np.arange(40))
    np.testing.assert_array_equal(found, np.arange(40) < 30)
    np.testing.assert_array_equal(rows[:20], rows_of(keys[:20]))
    np.testing.assert_array_equal(rows[20:30], rows_of(keys[20:], version=2))


def test_an_answer_can_be_reused(make_cache):
    cache, keys = make_cache(), np.arange(10, dtype=np.int64)
    cache.replace(keys, rows_of(keys))
    answer = cache.answer(max_keys=100)

    for count in (100, 3, 0):
        assert cache.query(np.arange(5, 5 + count, dtype=np.int64), out=answer) is answer
        cache.stream.synchronize()
        assert answer.missing_count[0] == max(0, count - 5)
    np.testing.assert_array_equal(cache.device.to_host(answer.rows)[:3], rows_of([5, 6, 7]))


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16", "int8", "uint8"])
def test_rows_come_back_rounded_as_on_the_host(make_cache, row_dtype):
    cache, keys = make_cache(dim=5, row_dtype=row_dtype), np.arange(40, dtype=np.int64)
    rows = np.random.default_rng(0).standard_normal((40, 5), dtype=np.float32)
    expected = np.empty_like(rows)
    round_rows(rows, row_dtype, expected)

    cache.replace(keys, rows)

    np.testing.assert_array_equal(ask(cache, keys)[0], expected)


def test_replace_skips_a_row_that_does_not_fit_and_update_erases_its_key(make_cache):
    cache, keys = make_cache(row_dtype="fp16"), np.arange(3, dtype=np.int64)
    rows = rows_of(keys)
    rows[1, 2] = 1e6

    cache.replace(keys, rows)
    assert ask(cache, keys)[1].tolist() == [True, False, True]

    rows[1, 2], rows[2, 0] = 0, 1e6
    cache.update(keys, rows)
    assert ask(cache, keys)[1].tolist() == [True, False, False]
    stats = cache.stats()
    assert (stats.rows, stats.unfit_rows) == (1, 2)


def test_a_static_cache_holds_as_many_rows_as_its_capacity(make_cache):
    for line_keys in (15, 7):
        cache = make_cache(1000, kind="static", line_keys=line_keys)
        keys = np.random.default_rng(line_keys).choice(10**9, cache.capacity.rows, replace=False)

        cache.replace(keys, rows_of(keys))

        assert ask(cache, keys)[1].all()


def test_a_static_cache_reports_how_many_keys_had_no_slot_and_holds_the_others(make_cache):
    cache, keys = make_cache(10, kind="static"), np.arange(40, dtype=np.int64)

    with pytest.raises(CacheFullError, match="25 keys had no slot: the cache holds 15 rows and was made for 12"):
        cache.replace(keys, rows_of(keys))

    assert ask(cache, keys)[1].sum() == 15
    with pytest.raises(CacheFullError, match="1 keys"):
        cache.replace(np.array([77]), rows_of([77]))


@pytest.mark.parametrize("name", [name for name in FORMS if name != "static"])
def test_a_cache_never_exceeds_its_capacity_or_holds_a_key_twice(make_cache, name):
    cache, rng = make_cache(60, **FORMS[name]), np.random.default_rng(1)

    for _ in range(20):
        keys = rng.choice(500, 100, replace=False)
        ask(cache, keys)
        cache.replace(keys, rows_of(keys), misses=rng.integers(1, 3, 100).astype(np.uint32))
        held, rows = cache.dump(with_rows=True)
        assert len(set(held.tolist())) == len(held) <= cache.capacity.rows
        np.testing.assert_array_equal(rows, rows_of(held))

    stats = cache.stats()
    assert stats.replaced_rows > 0
    assert stats.rows == len(held) == stats.inserted_rows


def test_a_dump_in_many_parts_has_all_keys(make_cache, monkeypatch):
    monkeypatch.setattr("gpu_cache.device_table._PART_BYTES", 3 * 15 * 4 * 4)
    cache, keys = make_cache(), np.arange(200, dtype=np.int64)
    cache.replace(keys, rows_of(keys))

    held, rows = cache.dump(with_rows=True)

    order = np.argsort(held)
    np.testing.assert_array_equal(held[order], keys)
    np.testing.assert_array_equal(rows[order], rows_of(keys))
    assert cache.dump()[1] is None


def test_stats_count_every_call(make_cache):
    cache = make_cache(15)
    assert cache.stats().hit_ratio == 1.0
    cache.replace(np.arange(15), rows_of(range(15)))
    ask(cache, [0, 0, 1, 99])
    cache.update(np.array([3, 98]), rows_of([3, 98]))
    cache.erase(np.array([4, 97]))

    stats = cache.stats()

    assert (stats.found_keys, stats.missed_keys, stats.hit_ratio) == (3, 1, 0.75)
    assert (stats.rows, stats.inserted_rows, stats.updated_rows, stats.erased_rows) == (14, 15, 1, 1)
    assert (stats.capacity_rows, stats.host_bytes) == (15, 0)


def test_calls_on_different_streams_run_in_order(make_cache):
    cache, keys = make_cache(), np.arange(100, dtype=np.int64)
    streams = [cache.device.stream() for _ in range(3)]

    cache.replace(keys, rows_of(keys), stream=streams[0])
    for version in range(1, 10):
        cache.update(keys, rows_of(keys, version=version), stream=streams[version % 3])
    held, rows = cache.dump(with_rows=True)

    np.testing.assert_array_equal(rows, rows_of(held, version=9))
    assert len(held) == 100


def test_a_call_without_keys_does_nothing(make_cache, form):
    cache, none = make_cache(**form), np.empty(0, np.int64)

    cache.replace(none, rows_of(none))
    cache.update(none, rows_of(none))
    cache.erase(none)

    assert ask(cache, none)[1].size == 0
    assert cache.stats().rows == 0
    assert cache.dump(with_rows=True)[1].shape == (0, 4)


def test_a_cache_shows_its_capacity(make_cache, device):
    cache = make_cache(capacity_rows=600)

    assert repr(cache) == f"EmbeddingCache({cache.capacity.rows} rows of 4, fp32, {device.name})"


def test_a_dropped_cache_waits_for_its_queued_work(device):
    cache, keys = EmbeddingCache(4, 100, device=device), np.arange(100, dtype=np.int64)
    stream = cache.stream
    cache.replace(keys, rows_of(keys))
    answer = cache.query(keys)

    del cache

    with device.using(stream):
        found = np.setdiff1d(keys, device.to_host(answer.missing_positions)[: answer.missing_count[0]])
        np.testing.assert_array_equal(device.to_host(answer.rows)[found], rows_of(found))


def test_of_two_threads_the_thread_whose_keys_have_no_slot_is_told(device):
    cache = EmbeddingCache(4, 12, device, kind="static")
    keys = np.arange(15)
    cache.replace(keys, np.zeros((15, 4), np.float32))

    def offer(keys):
        refused = 0
        for _ in range(20):
            try:
                cache.replace(keys, np.zeros((keys.size, 4), np.float32))
            except CacheFullError as err:
                refused += err.left_out_rows
        return refused

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(offer, [keys, np.array([100, 101])]))

    assert told == [0, 2 * 20]
