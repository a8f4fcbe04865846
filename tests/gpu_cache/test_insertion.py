"""The rows that a request fetched enter the caches of all its tables in one insertion, queued behind the answer."""

import threading

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError
from gpu_cache.missing import ABSENT
from gpu_cache.readers import Readers
from tests.gpu_cache.bags import KINDS, ORDERS, Bags, Tables, expected, finish, host_rows, random_request, scheduled

SLOTS, COMBINERS = (2, 1, 1, 1), ("mean", "sum", "sqrtn", "sum")
FORMS = [("fp32", 5), ("int8", 20), ("fp16", 64), ("fp32", 5)]


@pytest.fixture(params=KINDS)
def tables(device, request):
    key_type, line_keys, kind = request.param
    return Tables(device, FORMS, key_type=key_type, line_keys=line_keys, kind=kind)


def complete(work, tables):
    """Complete the request; return ``MissingKeys`` of all its rounds."""
    rounds = []
    while missing := work.missing():
        work.complete(tables.fetch(missing))
        rounds.extend(missing)
    return rounds


def times_of(missing):
    return np.concatenate([of_table.times for of_table in missing])


def is_right(device, tables, request, pooled):
    return all(
        got.tobytes() == expected(tables.rows[t], request[t], COMBINERS[t]).tobytes()
        for t, got in enumerate(host_rows(device, pooled))
    )


def one_key_bags(keys):
    return Bags(np.array(keys, np.int64), np.arange(len(keys) + 1, dtype=np.int32))


def one_line(device, readers=None, kind="dynamic", held=15, dim=4):
    """A cache of one line with the keys 0 to ``held - 1``, whose rows have the value of the key."""
    cache = EmbeddingCache(dim, 12 if kind == "static" else 15, device, kind=kind, readers=readers)
    keys = np.arange(held)
    cache.replace(keys, rows_of(keys, dim))
    cache.stream.synchronize()
    return cache


def rows_of(keys, dim=4):
    return np.repeat(np.asarray(keys)[:, None], dim, axis=1).astype(np.float32)


@pytest.mark.parametrize("seed", ORDERS)
def test_the_next_request_finds_the_inserted_rows_of_all_tables(device, tables, seed):
    request = random_request(np.random.default_rng(seed), 20, SLOTS, [0, 1, 4])
    work = tables.group(SLOTS, COMBINERS).workspace(20, 1000)
    with scheduled(device, seed, 2):
        work.pool(request)
        work.insert(times_of(complete(work, tables)))

        pooled = work.pool(request)

        assert work.missing() == ()
    assert is_right(device, tables, request, pooled)
    for cache, rows, bags in zip(tables.caches, tables.rows, request, strict=True):
        keys, held = cache.dump(with_rows=True)
        assert sorted(keys) == sorted({*range(200), *bags.keys.tolist()})
        assert held.tobytes() == rows[keys].tobytes()
        assert cache.stats().rows == cache.stats().inserted_rows == keys.size


def test_rows_of_single_keys_are_inserted(device, tables):
    work = tables.group(SLOTS, COMBINERS).workspace(1, 1000, max_single_keys=100)
    keys = [np.array([1, 300, 301]), np.empty(0, np.int64), np.array([300, 5, 300]), np.array([399])]
    work.lookup(keys)
    work.insert(times_of(complete(work, tables)))

    rows = work.lookup(keys)

    assert work.missing() == ()
    for got, of_table, wanted in zip(rows, tables.rows, keys, strict=True):
        assert device.to_host(got).tobytes() == of_table[wanted].tobytes()


def test_keys_without_misses_or_with_the_mark_of_absent_keys_are_left_out(device, tables):
    request = [one_key_bags([201, 202, 203, 204])] + [one_key_bags([205, 206])] * 3
    work = tables.group((2, 1, 1, 1), COMBINERS).workspace(2, 1000)
    work.pool(request)
    complete(work, tables)

    work.insert(np.array([1, 0, ABSENT | np.uint32(1), 2, 0, 1, 1, 0, 0, 0], np.uint32))

    entered = [set(cache.dump()[0].tolist()) - set(range(200)) for cache in tables.caches]
    assert entered == [{201, 204}, {206}, {205}, set()]


def test_all_rounds_of_a_request_are_inserted(device, tables):
    request = random_request(np.random.default_rng(1), 20, SLOTS, [3])
    work = tables.group(SLOTS, COMBINERS).workspace(20, 1000)
    work.pool(request)
    rounds = []
    while missing := work.missing():
        for cache, begin in zip(tables.caches, (0, 100, 0, 50), strict=True):
            cache.erase(np.arange(begin, begin + 100))
        rounds.extend(missing)
        work.complete(tables.fetch(missing))
    assert len(rounds) == 2 * len(SLOTS)
    work.insert(times_of(rounds))
    for t, (cache, rows) in enumerate(zip(tables.caches, tables.rows, strict=True)):
        keys, held = cache.dump(with_rows=True)
        assert held.tobytes() == rows[keys].tobytes()
        assert {key for of_table in rounds[t :: len(SLOTS)] for key in of_table.keys.tolist()} <= set(keys.tolist())


def test_keys_that_the_last_launch_missed_and_nobody_fetched_are_left_out(device):
    cache = one_line(device, held=2)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(4, 10)
    work.pool([Bags(np.array([0, 100]), np.array([0, 2], np.int32))])
    missing = work.missing()
    cache.erase(np.array([0]))
    work.complete([rows_of(missing[0].keys)])
    assert work.missing()[0].keys.tolist() == [0]

    work.insert(missing[0].times)

    assert sorted(cache.dump()[0].tolist()) == [1, 100]


def test_the_policy_decides_which_keys_enter_a_full_line(device):
    cache = one_line(device)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(4, 10)

    def ask_and_insert(times):
        work.pool([one_key_bags([100])])
        work.complete([rows_of(work.missing()[0].keys)])
        work.insert(np.array([times], np.uint32))
        return cache.stats()

    assert ask_and_insert(1).refused_first_misses == 1
    assert ask_and_insert(1).replaced_rows == 1
    work.pool([one_key_bags([100])])
    assert work.missing() == ()


def test_a_group_that_brings_more_keys_than_fit_replaces_a_fifth_at_most(device):
    cache = EmbeddingCache(1, 1500, device)
    cache.replace(np.arange(4000), np.zeros((4000, 1), np.float32))
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 3000)
    before = cache.stats()
    work.pool([Bags(np.arange(200_000, 203_000), np.array([0, 3000], np.int32))])
    work.missing()
    work.complete([np.zeros((3000, 1), np.float32)])

    work.insert(np.full(3000, 2, np.uint32))

    after = cache.stats()
    replaced = after.replaced_rows - before.replaced_rows
    assert 0 < replaced < 1500 / 5 * 2.5  # a key that was missed twice has twice the share
    assert after.refused_by_cap > 2000


def test_each_table_has_its_own_cap(device):
    readers = Readers()
    caches = [one_line(device, readers) for _ in range(2)]
    work = CacheGroup(caches, (1, 1), ("sum", "sum")).workspace(100, 200)
    three = Bags(np.array([100, 101, 102]), np.minimum(np.arange(101), 3).astype(np.int32))
    work.pool([one_key_bags(range(100, 200)), three])
    missing = work.missing()
    work.complete([rows_of(of_table.keys) for of_table in missing])

    work.insert(np.full(103, 2, np.uint32))

    many, few = (cache.stats() for cache in caches)
    assert many.refused_by_cap > 50
    assert (few.refused_by_cap, few.replaced_rows) == (0, 3)


def test_a_full_static_cache_counts_the_keys_that_it_leaves_out(device):
    cache = one_line(device, kind="static", held=12)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(5, 10)
    work.pool([one_key_bags([100, 101, 102, 103, 104])])
    work.missing()
    work.complete([rows_of([100, 101, 102, 103, 104])])

    work.insert(np.ones(5, np.uint32))

    stats = cache.stats()
    assert (stats.rows, stats.refused_without_slot) == (15, 2)
    cache.replace(np.array([1, 2]), rows_of([1, 2]))  # has no part in the insertion's refused keys


def test_a_row_that_the_cache_cannot_hold_is_left_out(device):
    readers = Readers()
    caches = [EmbeddingCache(4, 15, device, row_dtype, readers=readers) for row_dtype in ("fp32", "fp16")]
    work = CacheGroup(caches, (1, 1), ("sum", "sum")).workspace(1, 10)
    work.pool([one_key_bags([1])] * 2)
    work.missing()
    work.complete([np.full((1, 4), 1e6, np.float32)] * 2)

    work.insert(np.ones(2, np.uint32))

    stats = [cache.stats() for cache in caches]
    assert [(of_cache.rows, of_cache.unfit_rows) for of_cache in stats] == [(1, 0), (0, 1)]


def test_a_cache_of_two_tables_holds_no_key_twice(device):
    cache = EmbeddingCache(4, 60, device)
    work = CacheGroup([cache, cache], (1, 1), ("sum", "sum")).workspace(30, 100)
    work.pool([one_key_bags(range(30)), one_key_bags(range(10, 40))])
    missing = work.missing()
    work.complete([rows_of(of_table.keys) for of_table in missing])

    work.insert(times_of(missing))

    assert sorted(cache.dump()[0].tolist()) == list(range(30))


@pytest.mark.slow  # not under the sanitizers, which see the same work in the tests above
def test_an_insertion_is_one_upload_and_two_launches_whatever_the_number_of_tables(device, monkeypatch):
    tables = Tables(device, [("fp32", 4)] * 9)
    work = tables.group([1] * 9, ["sum"] * 9).workspace(3, 100)
    work.pool([one_key_bags([1, 2, 300])] * 9)
    missing = complete(work, tables)
    launched, uploaded = [], []
    for name in ("_claim", "_fill"):
        kernel = getattr(work._insertion, name)
        monkeypatch.setattr(
            work._insertion, name, lambda *given, name=name, kernel=kernel: launched.append(name) or kernel(*given)
        )
    upload = device.upload
    monkeypatch.setattr(device, "upload", lambda host, *rest: uploaded.append(host.nbytes) or upload(host, *rest))

    work.insert(times_of(missing))

    assert launched == ["_claim", "_fill"]
    assert uploaded == [9 * (16 + 4)]
    assert all(300 in cache.dump()[0] for cache in tables.caches)


@pytest.mark.parametrize(
    ("misses", "message"),
    [
        (np.ones(2, np.int64), r"expected uint32\[2\], got int64\[2\]"),
        (np.ones(3, np.uint32), r"expected uint32\[2\], got uint32\[3\]"),
        (np.ones((2, 1), np.uint32), r"got uint32\[2, 1\]"),
    ],
)
def test_misses_of_another_form_are_refused(device, misses, message):
    work = CacheGroup([one_line(device, held=1)], (1,), ("sum",)).workspace(2, 10)
    work.pool([one_key_bags([100, 101])])
    work.missing()
    work.complete([rows_of([100, 101])])

    with pytest.raises(ValueError, match=message):
        work.insert(misses)


def test_an_insertion_into_a_closed_cache_is_refused(device):
    cache = one_line(device, held=1)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(2, 10)
    work.pool([one_key_bags([100])])
    work.missing()
    work.complete([rows_of([100])])
    work.missing()
    cache.close()

    with pytest.raises(CacheClosedError):
        work.insert(np.ones(1, np.uint32))


@pytest.fixture
def held_up(runner):
    """A stream that does nothing until the event is set."""
    released = threading.Event()
    blocker, stream = runner.stream(), runner.stream()
    blocker.submit(released.wait)
    stream.wait(blocker.record())
    yield stream, released
    released.set()
    stream.synchronize()


def test_an_insertion_waits_for_readers_on_the_device_and_not_on_the_host(runner, held_up):
    reader, released = held_up
    cache = one_line(runner)
    group = CacheGroup([cache], (1,), ("sum",))
    work = group.workspace(4, 10)
    work.pool([one_key_bags([100])])
    work.missing()
    work.complete([rows_of([100])])
    work.missing()
    keys = np.arange(15)
    answer = cache.query(keys, out=cache.answer(15), stream=reader)  # runs when it is released

    work.insert(np.full(1, 2, np.uint32))
    work.load([one_key_bags([1])])  # the next request does not wait for the insertion on the host either

    assert not work.stream.record().is_done()
    released.set()
    work.launch()
    work.stream.synchronize()
    reader.synchronize()
    assert 100 in cache.dump()[0]
    missed = set(runner.to_host(answer.missing_positions)[: answer.missing_count[0]].tolist())
    found = sorted(set(range(15)) - missed)
    assert (runner.to_host(answer.rows)[found] == rows_of(found)).all()


def test_two_insertions_of_one_request_do_not_share_their_upload(runner, held_up):
    """The second call's numbers must not reach the first call's launch."""
    _, released = held_up
    cache = one_line(runner, held=1)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(4, 10)
    work.pool([one_key_bags([100, 101])])
    work.missing()
    work.complete([rows_of([100, 101])])
    work.missing()
    work.stream.wait(held_up[0].record())
    work.insert(np.array([1, 0], np.uint32))
    second = threading.Thread(target=work.insert, args=(np.array([0, 1], np.uint32),))

    second.start()
    second.join(0.2)
    released.set()
    second.join()

    assert sorted(cache.dump()[0].tolist()) == [0, 100, 101]


def test_a_key_that_was_erased_before_the_insertion_and_left_out_stays_missing(device):
    cache = one_line(device, held=5)
    work = CacheGroup([cache], (1,), ("sum",)).workspace(4, 10)
    work.pool([one_key_bags([100, 101])])
    missing = work.missing()
    work.complete([rows_of(missing[0].keys)])
    cache.erase(np.array([100]))

    work.insert(np.array([0, 1], np.uint32))

    work.pool([one_key_bags([100, 101])])
    assert work.missing()[0].keys.tolist() == [100]
    assert finish(work, _Rows()) == 1


class _Rows:
    """Rows with the value of their key."""

    @staticmethod
    def fetch(missing):
        return [rows_of(of_table.keys) for of_table in missing]
