"""Keys that no tier holds are remembered: later lookups answer them with the default value and miss nothing."""

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError
from gpu_cache.layout import Capacity, Layout
from gpu_cache.missing import ABSENT
from gpu_cache.readers import Readers
from tests.gpu_cache.bags import KINDS, ORDERS, Bags, host_rows, scheduled

DEFAULTS = (0.25, -2.0)
SLOTS, COMBINERS = (2, 1), ("mean", "sum")
KEPT = 100  # keys from here on are in no tier


@pytest.fixture(params=KINDS)
def caches(device, request):
    key_type, line_keys, kind = request.param
    readers = Readers()
    return [
        EmbeddingCache(dim, 400, device, key_type=key_type, line_keys=line_keys, kind=kind, readers=readers)
        for dim in (3, 8)
    ]


@pytest.fixture
def work(caches):
    return CacheGroup(caches, SLOTS, COMBINERS, DEFAULTS).workspace(20, 1000, max_single_keys=100)


def rows_of(keys, dim, default):
    keys = np.asarray(keys)[:, None]
    return np.where(keys < KEPT, keys, default).repeat(dim, axis=1).astype(np.float32)


def answer(work):
    """Complete the request as a server does whose tiers hold the keys below ``KEPT``, insert, and return the misses."""
    asked, misses = [[], []], []
    while missing := work.missing():
        tables = zip(missing, (3, 8), DEFAULTS, strict=True)
        work.complete([rows_of(part.keys, dim, default) for part, dim, default in tables])
        misses += [np.where(part.keys < KEPT, part.times, part.times | ABSENT) for part in missing]
        for of_table, part in zip(asked, missing, strict=True):
            of_table.extend(part.keys.tolist())
    if misses:
        work.insert(np.concatenate(misses))
    return asked


def bags_of(rng, of_table, samples=20):
    row_ptrs = np.concatenate(([0], np.cumsum(rng.integers(0, 5, samples * of_table)))).astype(np.int32)
    return Bags(rng.integers(KEPT - 40, KEPT + 40, row_ptrs[-1]), row_ptrs)


@pytest.mark.parametrize("seed", ORDERS)
def test_a_request_with_absent_keys_misses_nothing_and_has_the_bits_of_the_first_answer(device, caches, work, seed):
    rng = np.random.default_rng(seed)
    request = [bags_of(rng, of_table) for of_table in SLOTS]
    with scheduled(device, seed, 2):
        pooled = work.pool(request)
        assert answer(work) == [list(dict.fromkeys(bags.keys.tolist())) for bags in request]
        first = [rows.tobytes() for rows in host_rows(device, pooled)]

        pooled = work.pool(request)

        assert work.missing() == ()
    assert [rows.tobytes() for rows in host_rows(device, pooled)] == first
    assert work.absent.tolist() == [np.count_nonzero(bags.keys >= KEPT) for bags in request]
    for cache, bags in zip(caches, request, strict=True):
        absent = {key for key in bags.keys.tolist() if key >= KEPT}
        stats = cache.stats()
        assert set(cache.absent_keys().tolist()) == absent
        assert (stats.absent_keys, stats.absent_answers) == (len(absent), np.count_nonzero(bags.keys >= KEPT))
        assert stats.missed_keys == bags.keys.size  # all by the first request
        assert stats.found_keys == np.count_nonzero(bags.keys < KEPT)
        assert max(cache.dump()[0]) < KEPT, "a default is never stored"


def test_single_keys_know_absent_keys_too(device, work):
    keys = [np.array([99, 100, 101, 100]), np.array([5, 105])]
    rows = work.lookup(keys)
    answer(work)
    first = [device.to_host(of_table).tobytes() for of_table in rows]

    rows = work.lookup(keys)

    assert work.missing() == ()
    assert [device.to_host(of_table).tobytes() for of_table in rows] == first
    assert work.absent.tolist() == [3, 1]
    work.lookup([keys[1], keys[1]])
    assert [of_table.keys.tolist() for of_table in work.missing()] == [[5, 105], []]


def test_bags_that_are_pooled_again_keep_the_default_values_of_absent_keys(device, work):
    work.lookup([np.array([100]), np.array([], np.int64)])
    answer(work)
    bag = Bags(np.array([100, 7, 100]), np.array([0, 3, 3], np.int32))
    none = Bags(np.empty(0, np.int64), np.zeros(2, np.int32))

    pooled = work.pool([bag, none])

    missing = work.missing()
    assert missing[0].keys.tolist() == [7]
    assert work.absent.tolist() == [2, 0]
    work.complete([rows_of([7], 3, 0.25), np.empty((0, 8), np.float32)])
    assert work.missing() == ()
    assert work.absent.tolist() == [2, 0]
    mean = np.float32(7.5) / np.float32(3)
    assert (host_rows(device, pooled)[0][0] == mean).all()


def test_the_count_of_absent_keys_is_of_one_request(work):
    for asked in ([100], [100], [99], [100]):
        work.lookup([np.array(asked), np.empty(0, np.int64)])
        answer(work)
    assert work.missing() == ()
    assert work.missing() == ()
    assert work.absent.tolist() == [1, 0]


@pytest.mark.parametrize("verb", ["erase", "replace", "update"])
def test_a_write_that_names_an_absent_key_ends_its_absence(caches, work, verb):
    work.lookup([np.array([100, 101]), np.array([100])])
    answer(work)
    named = np.array([100, 300])
    rows = np.ones((2, 3), np.float32)

    if verb == "erase":
        caches[0].erase(named)
    else:
        getattr(caches[0], verb)(named, rows)

    assert caches[0].absent_keys().tolist() == [101]
    assert caches[0].stats().absent_keys == 1
    work.lookup([np.array([100, 101]), np.array([100])])
    missing = work.missing()
    assert [of_table.keys.tolist() for of_table in missing] == ([] if verb == "replace" else [[100], []])


def test_a_lookup_queued_after_an_erasure_does_not_find_the_key_absent(runner):
    cache = EmbeddingCache(3, 20, runner)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 10, max_single_keys=10)
    work.lookup([np.array([100])])
    work.missing()
    work.complete([np.zeros((1, 3), np.float32)])
    work.insert(np.array([ABSENT | np.uint32(1)]))
    writer, late = runner.stream(), []
    writer.submit(lambda: late.append(1))

    cache.erase(np.array([100]), stream=writer)
    work.lookup([np.array([100])])

    assert work.missing()[0].keys.tolist() == [100]


def test_full_lines_of_absent_keys_replace_keys_that_are_not_asked_for(device):
    cache = EmbeddingCache(3, 15, device)
    assert cache.capacity.absent_line_count == 1
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 100, max_single_keys=100)

    def ask(keys, times):
        work.lookup([np.array(keys)])
        missing = work.missing()
        if missing:
            work.complete([np.zeros((missing[0].keys.size, 3), np.float32)])
            work.insert(np.full(missing[0].keys.size, times, np.uint32) | ABSENT)
        return [of_table.keys.tolist() for of_table in missing]

    ask(range(100, 115), 1)
    for key in range(100, 107):  # one by one: simultaneous uses of one line count as one
        assert ask([key], 1) == []
    for key in range(200, 204):
        ask([key], 2)

    held = set(cache.absent_keys().tolist())
    assert len(held) == cache.stats().absent_keys == 15
    assert set(range(100, 107)) <= held
    assert held & set(range(200, 204))
    assert cache.stats().rows == 0


def test_keys_that_lines_cannot_hold_are_never_absent(device):
    cache = EmbeddingCache(3, 15, device, key_type="U32")
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 100, max_single_keys=100)
    key = 2**32 + 5  # its lower half is another key
    for keys in ([key, 5], [key]):
        work.lookup([np.array([key, 5])])
        assert work.missing()[0].keys.tolist() == keys
        work.complete([np.zeros((len(keys), 3), np.float32)])
        work.insert(np.full(len(keys), 1, np.uint32) | ABSENT)
        assert cache.absent_keys().tolist() == [5]


def test_a_query_answers_an_absent_key_as_missing(device):
    cache = EmbeddingCache(3, 15, device)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 100, max_single_keys=100)
    work.lookup([np.array([100])])
    work.missing()
    work.complete([np.zeros((1, 3), np.float32)])
    work.insert(np.array([ABSENT | np.uint32(1)]))

    found = cache.query(np.array([100]), stream=work.stream)

    work.stream.synchronize()
    assert found.missing_count[0] == 1


def test_lines_for_absent_keys_are_an_eighth_of_the_lines():
    layout = Layout(4)
    assert [Capacity(layout, "dynamic", lines).absent_line_count for lines in (1, 8, 9, 800)] == [1, 1, 2, 100]


def test_noted_keys_are_absent_until_a_write_names_them(device, caches, work):
    first, second = caches
    first.replace(np.array([1]), rows_of([1], 3, 0.0))
    first.note_absent(np.array([200, 300, 400]))
    first.stats()  # waits for the writes
    keys = [np.array([1, 200, 300, 500]), np.array([200])]

    rows = work.lookup(keys)

    assert [part.keys.tolist() for part in work.missing()] == [[500], [200]]  # the other table has keys of its own
    assert work.absent.tolist() == [2, 0]
    assert device.to_host(rows[0])[:3].tolist() == [[1.0] * 3, [DEFAULTS[0]] * 3, [DEFAULTS[0]] * 3]
    first.erase(np.array([200]))
    first.replace(np.array([300]), rows_of([300], 3, 0.0))
    assert first.absent_keys().tolist() == [400]
    assert (first.stats().absent_keys, second.stats().absent_keys) == (1, 0)


@pytest.mark.parametrize("seed", [1, 4])
def test_noting_many_keys_keeps_each_once_and_no_more_than_there_is_room_for(device, seed):
    cache = EmbeddingCache(2, 600, device)
    keys = np.random.default_rng(seed).permutation(3000)

    with scheduled(device, seed, 2):
        for part in np.array_split(keys, 6):
            cache.note_absent(part)
            cache.note_absent(part)

    noted = cache.absent_keys()
    assert 0 < np.unique(noted).size == noted.size == cache.stats().absent_keys <= cache.capacity.absent_line_count * 15
    assert cache.dump()[0].size == 0


def test_keys_are_noted_once_each_and_only_in_an_open_cache(device):
    cache = EmbeddingCache(2, 600, device)
    with pytest.raises(ValueError, match="expected each key once, got 5 at positions 0 and 1"):
        cache.note_absent(np.array([5, 5]))
    cache.note_absent(np.empty(0, np.int64))
    cache.close()
    with pytest.raises(CacheClosedError):
        cache.note_absent(np.array([5]))
