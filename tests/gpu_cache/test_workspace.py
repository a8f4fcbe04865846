"""A workspace serves request after request in parallel with writers and other workspaces, with graphs too."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest

from gpu_cache.bag_layout import BagRows, workspace_bytes, workspace_host_bytes
from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.readers import free_unused
from gpu_cache.request import RequestBuffer
from tests.gpu_cache.bags import (
    ORDERS,
    Bags,
    Tables,
    expected,
    finish,
    host_rows,
    random_request,
    scheduled,
    watch_waits,
)

SLOTS = (2, 1)
COMBINERS = ("mean", "sum")
REQUESTS = 4 if os.environ.get("HOTROW_RUNNER_SANITIZER") else 25  # the race check takes seconds for each


@pytest.fixture
def tables(device):
    return Tables(device, [("fp32", 5), ("int8", 20)])


@pytest.fixture
def work(tables):
    return tables.group(SLOTS, COMBINERS).workspace(20, 1000)


def is_right(device, tables, request, pooled):
    return all(
        got.tobytes() == expected(tables.rows[t], request[t], COMBINERS[t]).tobytes()
        for t, got in enumerate(host_rows(device, pooled))
    )


def test_a_workspace_forgets_the_misses_of_the_earlier_request(device, tables, work):
    rng = np.random.default_rng(0)
    for round_number in range(6):
        request = random_request(rng, rng.integers(1, 21), SLOTS, [0, 1, 5])
        pooled = work.pool(request)
        if round_number % 3 == 2:  # nobody asked for the misses of the earlier request
            continue
        missing = work.missing()
        absent = [bags.keys[bags.keys >= 200] for bags in request]
        assert [len(told.keys) for told in missing] == [np.unique(keys).size for keys in absent]
        assert missing.positions.tolist() == [keys.size for keys in absent]
        work.complete(tables.fetch(missing))
        assert work.missing() == ()
        assert is_right(device, tables, request, pooled)
    work.stream.synchronize()  # nobody asked for those of the last request either


def test_keys_that_a_cache_evicts_meanwhile_are_missing_again(device, tables, work):
    request = random_request(np.random.default_rng(1), 20, SLOTS, [3])
    pooled = work.pool(request)
    rounds = []
    while missing := work.missing():
        for cache, held in zip(tables.caches, ([*range(0, 100)], [*range(100, 200)]), strict=True):
            cache.erase(np.array(held))
        rounds.append(missing)
        work.complete(tables.fetch(missing))

    assert len(rounds) == 2
    for bags, first, second in zip(request, *rounds, strict=True):
        assert not set(first.keys.tolist()) & set(second.keys.tolist())
        assert set(second.keys.tolist()) <= set(bags.keys.tolist())
        assert second.keys.max() < 200
    assert is_right(device, tables, request, pooled)


def test_rows_may_have_gaps(device, tables, work):
    request = random_request(np.random.default_rng(1), 20, SLOTS, [3])
    pooled = work.pool(request)

    work.complete([np.asfortranarray(rows) for rows in tables.fetch(work.missing())])

    assert work.missing() == ()
    assert is_right(device, tables, request, pooled)


def no_room(shape, dtype):
    raise MemoryError("no room")


def test_keys_stay_missing_if_there_is_no_memory_for_their_rows(device, tables, work, monkeypatch):
    request = random_request(np.random.default_rng(1), 20, SLOTS, [3])
    pooled = work.pool(request)
    rows = tables.fetch(work.missing())
    with monkeypatch.context() as full:
        full.setattr(device, "empty", no_room)
        with pytest.raises(MemoryError):
            work.complete(rows)

    assert work.missing()
    work.complete(rows)

    assert work.missing() == ()
    assert is_right(device, tables, request, pooled)


def test_the_caches_count_pooled_lookups(tables, work):
    request = random_request(np.random.default_rng(3), 20, SLOTS, [1, 4])

    work.pool(request)
    work.complete(tables.fetch(work.missing()))
    work.missing()

    for cache, bags in zip(tables.caches, request, strict=True):
        stats = cache.stats()
        assert (stats.found_keys, stats.missed_keys) == ((bags.keys < 200).sum(), (bags.keys >= 200).sum())


def test_a_workspace_dropped_before_its_work_has_run_keeps_its_memory_until_then(runner):
    tables = Tables(runner, [("fp32", 5)])
    work = tables.group((1,), ("sum",)).workspace(1, 10)
    released, out = threading.Event(), weakref.ref(work._buffer.out)
    blocker, eraser, stream = runner.stream(), runner.stream(), work.stream
    blocker.submit(released.wait)
    eraser.wait(blocker.record())
    tables.caches[0].erase(np.array([1]), stream=eraser)  # later queries wait for it

    work.pool([Bags(np.array([1, 300]), np.array([0, 2], np.int32))])
    del work
    gc.collect()

    assert out() is not None
    released.set()
    stream.synchronize()
    eraser.synchronize()  # its erasure is the group's last write
    free_unused()
    assert out() is None


def test_a_row_that_was_pooled_outlasts_unused_rows(device):
    cache = EmbeddingCache(4, 15, device)
    assert cache.capacity.slots == 15  # one line
    cache.replace(np.arange(15), np.zeros((15, 4), np.float32))
    cache.stream.synchronize()
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 100)

    for key in range(7):  # one by one: simultaneous uses of one line count as one
        work.pool([Bags(np.array([key]), np.array([0, 1], np.int32))])
    work.stream.synchronize()
    for _ in range(3):
        cache.replace(np.arange(100, 103), np.ones((3, 4), np.float32), np.full(3, 2, np.uint32))

    held = set(cache.dump()[0].tolist())
    assert set(range(7)) <= held
    assert held & {100, 101, 102}


def test_a_row_pooled_twice_for_one_request_counts_as_one_use(device):
    cache = EmbeddingCache(4, 15, device)
    cache.replace(np.arange(15), np.zeros((15, 4), np.float32))
    cache.stream.synchronize()
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 100)

    for key in range(15):  # one by one, together with a key that is fetched
        work.pool([Bags(np.array([key, 99]), np.array([0, 2], np.int32))])
        work.missing()
        work.complete([np.ones((1, 4), np.float32)])
    work.stream.synchronize()
    for newcomer in (100, 101):  # the first finds all rows in use and lowers their counters by one
        cache.replace(np.array([newcomer]), np.ones((1, 4), np.float32), np.full(1, 2, np.uint32))

    held = set(cache.dump()[0].tolist())
    assert 100 not in held
    assert 101 in held


@pytest.mark.parametrize(("keys", "keys_of_block"), [(1000, 120), (300_000, 240)])
def test_blocks_of_large_requests_take_a_whole_round_of_keys(device, keys, keys_of_block):
    packed = RequestBuffer(device, [BagRows(1, "sum")] * 2, [4, 4], keys // 20, 2 * keys)
    bags = Bags(np.zeros(keys, np.int64), np.arange(0, keys + 1, 20, dtype=np.int32))

    packed.pack([bags, bags], None)

    assert (packed.head["item_bags"] * 20 == keys_of_block).all()


def test_blocks_that_take_several_items_pool_the_same_rows(device, tables, monkeypatch):
    monkeypatch.setattr("gpu_cache.workspace._MOST_BLOCKS", 2)
    request = random_request(np.random.default_rng(5), 20, SLOTS, [0, 1, 5, 100])
    work = tables.group(SLOTS, COMBINERS).workspace(20, 6000)

    pooled = work.pool(request)

    assert work._request.items >= 6
    assert finish(work, tables) == 1
    assert is_right(device, tables, request, pooled)


@pytest.mark.parametrize("seed", ORDERS)
def test_several_blocks_list_a_cold_batch_in_order_of_first_appearance(device, tables, seed):
    rng = np.random.default_rng(seed)
    work = tables.group(SLOTS, COMBINERS).workspace(400, 4000)

    for _ in range(2):
        keys = [rng.integers(1000, 4000, 400 * of_table) for of_table in SLOTS]
        request = [Bags(of_table, np.arange(of_table.size + 1, dtype=np.int32)) for of_table in keys]
        with scheduled(device, seed, 4):
            work.pool(request)
            missing = work.missing()

        for of_table, told in zip(keys, missing, strict=True):
            assert told.keys.tolist() == list(dict.fromkeys(of_table.tolist()))
            assert told.times.tolist() == [np.count_nonzero(of_table == key) for key in told.keys]


def test_a_graph_of_a_launch_serves_requests_of_other_sizes(device, tables):
    rng = np.random.default_rng(4)
    work = tables.group(SLOTS, COMBINERS).workspace(20, 1000, dense_dim=3)
    graph = device.capture(work.stream, lambda: work.queue(20))

    for samples, lengths in ((20, [0, 1, 5]), (1, [0]), (7, [30]), (20, [1])):
        request = random_request(rng, samples, SLOTS, lengths)
        dense = rng.standard_normal((samples, 3), dtype=np.float32)
        work.load(request, dense=dense)
        with work.reading():
            graph.launch(work.stream)
        finish(work, tables)
        assert is_right(device, tables, request, work.rows)
        assert device.to_host(work.dense[:samples]).tobytes() == dense.tobytes()


def test_a_launch_after_missed_keys_pools_nothing_until_the_next_request(device, tables, work):
    request = random_request(np.random.default_rng(6), 20, SLOTS, [1, 4])
    graph = device.capture(work.stream, lambda: work.queue(20))

    for _ in range(2):
        work.load(request)
        work.launch()
        work.complete(tables.fetch(work.missing()))
        with work.reading():
            graph.launch(work.stream)
        assert work.missing() == ()
        assert is_right(device, tables, request, work.rows)
    for cache, bags in zip(tables.caches, request, strict=True):
        assert cache.stats().found_keys == 2 * (bags.keys < 200).sum()


def test_a_request_is_one_upload_of_exactly_its_bytes(device, tables, monkeypatch):
    work = tables.group(SLOTS, COMBINERS).workspace(20, 1000, dense_dim=3)
    request = random_request(np.random.default_rng(7), 5, SLOTS, [1, 4])
    weights = np.ones(request[1].keys.size, np.float32)
    uploaded = []
    upload = device.upload
    monkeypatch.setattr(device, "upload", lambda host, *rest: uploaded.append(host.nbytes) or upload(host, *rest))

    work.load(request, [None, weights], np.zeros((5, 3), np.float32))
    work.stream.synchronize()

    keys = sum(bags.keys.nbytes for bags in request)
    row_ptrs = sum(bags.row_ptrs.nbytes for bags in request if np.unique(np.diff(bags.row_ptrs)).size > 1)
    [size] = uploaded
    assert 0 <= size - (2 * 64 + 5 * 3 * 4 + row_ptrs + keys + weights.nbytes) < 2 * 16  # each part is aligned


def test_successive_requests_of_one_form_use_their_own_keys_weights_and_features(device, tables):
    work = tables.group(SLOTS, COMBINERS).workspace(20, 1000, dense_dim=3)
    rng = np.random.default_rng(9)
    for weighted, has_dense in [(0, 1), (0, 1), (1, 1), (1, 1), (2, 0), (2, 0), (0, 0), (1, 0)]:
        request = random_request(rng, 6, SLOTS, [4])
        drawn = [rng.standard_normal(bags.keys.size, dtype=np.float32) for bags in request]
        weights = [one if place == weighted - 1 else None for place, one in enumerate(drawn)]
        dense = rng.standard_normal((6, 3), dtype=np.float32)

        work.load(request, weights if weighted else None, dense if has_dense else None)
        work.launch()
        finish(work, tables)

        for t, got in enumerate(host_rows(device, work.rows)):
            assert got.tobytes() == expected(tables.rows[t], request[t], COMBINERS[t], weights[t]).tobytes()
        if has_dense:
            assert device.to_host(work.dense[:6]).tobytes() == dense.tobytes()


def test_a_refused_request_does_not_change_the_earlier_request(device, tables, work):
    request = random_request(np.random.default_rng(10), 20, SLOTS, [1, 4])
    pooled = work.pool(request)
    falling = Bags(np.arange(9), np.array([0, 5, *[4] * 4, *[9] * 2], np.int32))
    with pytest.raises(ValueError, match="falls from 5 to 4"):
        work.pool([Bags(np.arange(9), np.array([0, *[9] * 14], np.int32)), falling])

    work.complete(tables.fetch(work.missing()))

    assert work.missing() == ()
    assert is_right(device, tables, request, pooled)


def test_the_host_waits_once_for_a_request(device, tables, work, monkeypatch):
    request = random_request(np.random.default_rng(8), 20, SLOTS, [1], share_held=1.0)
    work.pool(request)
    work.missing()
    waits = []
    watch_waits(monkeypatch, work.stream, lambda: waits.append(None), lambda: waits.append(None))

    for number in range(1, 3):
        pooled = work.pool(request)
        assert work.missing() == ()
        assert len(waits) == number
    assert is_right(device, tables, request, pooled)
    work.pool(request)  # nobody asks for its misses
    assert is_right(device, tables, request, work.pool(request))
    assert len(waits) == 3


@pytest.mark.parametrize("seed", ORDERS)
def test_workspaces_pool_only_whole_rows_during_writes(device, tables, seed):
    group = tables.group(SLOTS, COMBINERS)
    wrong = []
    done = threading.Event()

    def read(number):
        rng = np.random.default_rng(number)
        work = group.workspace(8, 400)
        for _ in range(REQUESTS):
            request = random_request(rng, 8, SLOTS, [0, 1, 5])
            pooled = work.pool(request)
            finish(work, tables)
            if not is_right(device, tables, request, pooled):
                wrong.append(request)

    def write():
        rng = np.random.default_rng(99)
        streams = [device.stream() for _ in tables.caches]
        while not done.is_set():
            for cache, rows, stream in zip(tables.caches, tables.rows, streams, strict=True):
                keys = rng.choice(400, 60, replace=False)
                cache.erase(keys[:20], stream)
                cache.replace(keys, rows[keys], np.full(60, 2, np.uint32), stream)
                cache.update(keys[:30], rows[keys[:30]], stream)
                stream.synchronize()

    with scheduled(device, seed, 2):
        readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        writer = threading.Thread(target=write)
        for thread in (*readers, writer):
            thread.start()
        for thread in readers:
            thread.join()
        done.set()
        writer.join()

    assert not wrong


@pytest.mark.parametrize("sizes", [(1, 1), (20, 1000, 3), (33, 4097, 1), (1, 500, 0, 500), (20, 1000, 3, 7)])
def test_the_memory_of_a_workspace_is_known_in_advance(device, tables, sizes, monkeypatch):
    group = tables.group(SLOTS, COMBINERS)
    taken, pinned = [], []

    def counted(take, taken):
        def take_and_count(shape, dtype):
            array = take(shape, dtype)
            taken.append(array.nbytes)
            return array

        return take_and_count

    for name, counts in (("empty", taken), ("zeros", taken), ("pinned", pinned)):
        monkeypatch.setattr(device, name, counted(getattr(device, name), counts))
    group.workspace(*sizes)

    assert sum(taken) == workspace_bytes(group.tables, group.dims, *sizes)
    assert sum(pinned) == workspace_host_bytes(group.tables, *sizes[:3])


def test_lookups_allocate_no_memory_beyond_the_workspace(device, tables, monkeypatch):
    work = tables.group(SLOTS, COMBINERS).workspace(2, 1000, max_single_keys=1000)
    request = random_request(np.random.default_rng(12), 2, SLOTS, [1])
    held = [np.arange(count) % 200 for count in (700, 300)]
    of_widest = [held[0][:0], np.arange(1000) % 200]

    def refuse(shape, dtype):
        raise MemoryError("no room")

    for name in ("empty", "pinned"):
        monkeypatch.setattr(device, name, refuse)
    for keys in (held, of_widest):
        rows = work.lookup(keys)
        assert work.missing() == ()
        for got, of_table, wanted in zip(rows, tables.rows, keys, strict=True):
            assert device.to_host(got).tobytes() == of_table[wanted].tobytes()
        assert work.whole.size <= work.most_floats
        work.pool(request)
        work.missing()


def test_an_answer_is_one_buffer_and_buffers_keep_their_addresses(device, tables, work):
    rng = np.random.default_rng(5)
    for samples, is_whole in [(3, True), (3, False), (20, True), (1, False), (1, True)]:
        request = random_request(rng, samples, SLOTS, [0, 1, 5])
        pooled = work.pool(request, is_whole=is_whole)
        finish(work, tables)

        assert is_right(device, tables, request, pooled)
        if is_whole:
            assert work.whole.size == sum(-(-part.size // 4) * 4 for part in pooled)
        else:
            assert is_right(device, tables, request, [part[:samples] for part in work.buffers])
