"""Work queued after a write never finds what the write removes, even while the write's stream is busy."""

import gc
import threading
import weakref

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.readers import Readers, defer_free, free_unused
from kernels.device import open_device
from tests.gpu_cache.bags import Bags

DIM = 4
WAIT_S = 30


@pytest.fixture
def device():
    return open_device("runner")  # tests can block its streams


@pytest.fixture
def held_up(device):
    """A stream that does nothing until the event is set."""
    released = threading.Event()
    blocker, stream = device.stream(), device.stream()
    blocker.submit(released.wait)
    stream.wait(blocker.record())
    yield stream, released
    released.set()
    stream.synchronize()


@pytest.fixture
def cache(device):
    """A cache of one line, filled with the keys 0 to 14."""
    with_rows = EmbeddingCache(DIM, 15, device)
    keys = np.arange(15, dtype=np.int64)
    with_rows.replace(keys, rows_of(keys))
    with_rows.stream.synchronize()
    yield with_rows
    with_rows.close()


def rows_of(keys):
    return np.repeat(keys[:, None], DIM, axis=1).astype(np.float32)


def missing_of(cache, answer, stream):
    stream.synchronize()
    return sorted(cache.device.to_host(answer.missing_keys)[: int(answer.missing_count[0])].tolist())


@pytest.mark.parametrize("write", ["replace", "update", "erase"])
def test_a_query_queued_after_a_write_does_not_overtake_it(cache, device, held_up, write):
    stream, released = held_up
    keys = np.array([1, 2, 3], np.int64)
    if write == "replace":
        cache.replace(
            np.array([100], np.int64), rows_of(np.array([100])), misses=np.array([2], np.uint32), stream=stream
        )
    elif write == "update":
        cache.update(keys, rows_of(keys + 1000), stream=stream)
    else:
        cache.erase(keys, stream=stream)
    asked = device.stream()

    answer = cache.query(np.arange(15, dtype=np.int64), stream=asked)

    queried = asked.record()
    assert not queried.is_done()  # otherwise it finds rows that are about to be overwritten
    released.set()
    missing = missing_of(cache, answer, asked)
    found = sorted(set(range(15)) - set(missing))
    rows = device.to_host(answer.rows)[:15]
    if write == "replace":
        assert len(missing) <= 1  # the victim
        assert (rows[found] == rows_of(np.array(found))).all()
    elif write == "update":
        assert {key for key in found if (rows[key] != rows_of(np.array([key]))[0]).any()} <= {1, 2, 3}
        for key in set(found) & {1, 2, 3}:
            assert (rows[key] == 1000 + key).all()  # the new row, never the old one
    else:
        assert missing == [1, 2, 3]


def test_a_query_queued_before_a_write_keeps_its_rows(cache, device, held_up):
    stream, released = held_up
    keys = np.arange(15, dtype=np.int64)

    answer = cache.query(keys, out=cache.answer(15), stream=stream)
    cache.update(keys, rows_of(keys + 1000), stream=device.stream())
    released.set()
    cache.stats()  # after all writes

    # keys locked before the query ran are missed; no row changes during the query
    missing = missing_of(cache, answer, stream)
    found = sorted(set(range(15)) - set(missing))
    assert (device.to_host(answer.rows)[found] == rows_of(np.array(found))).all()


def test_a_cache_dropped_before_its_work_has_run_keeps_its_memory_and_blocks_nobody(device, held_up):
    stream, released = held_up
    cache = EmbeddingCache(DIM, 15, device)
    keys = np.arange(15, dtype=np.int64)
    cache.replace(keys, rows_of(keys), stream=stream)
    rows = weakref.ref(cache._table.slab)

    del cache
    gc.collect()  # this may happen on any thread: a stream's own thread would wait for itself

    assert rows() is not None
    released.set()
    stream.synchronize()
    free_unused()
    assert rows() is None


class Piece:
    """A piece of memory."""


@pytest.mark.parametrize("locked", ["readers", "writers"])
def test_dropping_a_cache_while_another_thread_queues_work_waits_for_no_lock(device, locked):
    readers, stream = Readers(), device.stream()
    held = [Piece()]
    piece = weakref.ref(held[0])
    dropping = threading.Thread(target=lambda: defer_free(readers, (held.pop(),)), daemon=True)

    with readers.reading(stream) if locked == "readers" else readers.writers.turn(stream):
        dropping.start()
        dropping.join(WAIT_S)
        assert not dropping.is_alive()
        assert piece() is not None

    stream.synchronize()
    free_unused()
    assert piece() is None


def test_readers_are_not_locked_during_compilation_and_allocation(device, monkeypatch):
    """A thread that holds the locks for these may wait for the readers' lock, and then all requests would wait."""
    cache = EmbeddingCache(DIM, 15, device)
    is_locked = []

    def noting(call):
        def note(*args, **kwargs):
            other = threading.Thread(target=lambda: is_locked.append(cache.readers.latest_without_waiting() is None))
            other.start()
            other.join(WAIT_S)
            return call(*args, **kwargs)

        return note

    for name in ("kernel", "empty", "pinned"):
        monkeypatch.setattr(device, name, noting(getattr(device, name)))
    work = CacheGroup([cache], (1,), ("sum",)).workspace(1, 10, max_single_keys=2)
    bags = Bags(np.array([3]), np.array([0, 1], np.int32))
    for ask in (lambda: work.lookup([np.array([1, 2])]), lambda: work.pool([bags])):
        ask()
        (lacking,) = work.missing()
        work.complete([np.ones((lacking.keys.size, DIM), np.float32)])
        assert work.missing() == ()
        work.insert(lacking.times)
    keys = np.arange(3)
    cache.update(keys, rows_of(keys))
    cache.erase(keys)
    cache.dump(with_rows=True)
    cache.query(keys, out=cache.answer(3))

    assert is_locked
    assert not any(is_locked)
