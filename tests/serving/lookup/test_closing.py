"""Caches that are closed, and models that are unloaded, while requests are in flight."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpu_cache.errors import CacheClosedError
from serving.errors import UnknownModelError
from serving.lookup import LookupSession, cached_session
from serving.lookup.cached_session import CachedLookupSession
from tests.serving.lookup.cached import Sketch, request, same, served, with_cache, write_model
from tests.serving.lookup.test_cached_session import first_table
from tests.serving.small_server import DictStore

WAIT_S = 30
KEYS = np.array([0, 3, 6], dtype=np.int64)


class PausedStore(DictStore):
    """A store whose reads can be paused."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def fetch(self, table, keys, out):
        self.is_asked.set()
        assert self.may_answer.wait(WAIT_S)
        return super().fetch(table, keys, out)

    def pause(self):
        self.is_asked.clear()
        self.may_answer.clear()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), [Sketch(4, slots=1)], size_ratio=1.0, worker_buffers=1)


@pytest.fixture
def store():
    store = PausedStore()
    yield store
    store.may_answer.set()


@pytest.fixture
def server(config, store):
    with served(config, store) as server:
        yield server


@pytest.fixture
def lookup(server, config, device):
    lookup = CachedLookupSession(server, config, device)
    yield lookup
    lookup.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def is_closed(lookup):
    """Whether the memory was freed."""
    try:
        lookup._caches[0].cache.stats()
    except CacheClosedError:
        return True
    return False


def test_closing_waits_for_requests_in_flight_and_refuses_later_requests(server, config, store, lookup, pool):
    batch = first_table(config, KEYS)
    expected = LookupSession(server, config).lookup_pooled(batch)
    store.pause()
    at_work = pool.submit(lookup.lookup_pooled, batch)
    assert store.is_asked.wait(WAIT_S)
    in_line = pool.submit(lookup.lookup_pooled, batch)  # waits for the only workspace
    wait_until(lambda: lookup._calls._calls == 2)

    closing = pool.submit(lookup.close)
    assert lookup._closing.wait(WAIT_S)
    wait_until(lambda: lookup._calls._is_closed)

    with pytest.raises(UnknownModelError, match=r"the GPU cache of model 'm' on .* is closed"):
        lookup.lookup_pooled(batch)
    with pytest.raises(UnknownModelError, match="is closed"):
        lookup.refresh()
    assert list(lookup.readings()) == []
    assert not closing.done()
    assert not is_closed(lookup)

    store.may_answer.set()
    assert same(at_work.result(WAIT_S), expected)
    assert same(in_line.result(WAIT_S), expected)
    closing.result(WAIT_S)
    assert is_closed(lookup)


def wait_until(holds):
    """Wait for another thread to make ``holds`` true."""
    waiter = threading.Event()
    for _ in range(WAIT_S * 1000):
        if holds():
            return
        waiter.wait(0.001)
    pytest.fail("the condition never became true")


def test_a_request_that_hangs_does_not_block_closing_and_keeps_its_memory(
    server, config, store, lookup, pool, monkeypatch, caplog
):
    monkeypatch.setattr(cached_session, "_LONGEST_CLOSE_S", 0.01)
    batch = first_table(config, KEYS)
    expected = LookupSession(server, config).lookup_pooled(batch)
    store.pause()
    hanging = pool.submit(lookup.lookup_pooled, batch)
    assert store.is_asked.wait(WAIT_S)

    lookup.close()
    lookup.close()

    assert "closed while requests are in flight" in caplog.text
    assert not is_closed(lookup)
    store.may_answer.set()
    assert same(hanging.result(WAIT_S), expected)
    wait_until(lambda: is_closed(lookup))


def test_an_insertion_that_hangs_does_not_block_closing_and_keeps_its_memory(
    server, config, store, device, monkeypatch
):
    monkeypatch.setattr(cached_session, "_LONGEST_CLOSE_S", 0.01)
    lookup = CachedLookupSession(server, with_cache(config, mode="asynchronous", hit_rate_threshold=0.0), device)
    store.pause()
    assert lookup.lookup_pooled(first_table(config, KEYS)).defaulted_keys == KEYS.size
    assert store.is_asked.wait(WAIT_S)

    lookup.close()

    assert not is_closed(lookup)
    store.may_answer.set()
    wait_until(lambda: is_closed(lookup))


def test_closing_ends_a_refresh_early(config, store, server, device, pool):
    lookup = CachedLookupSession(server, with_cache(config, refresh_ratio=0.1, fills_at_start=True), device)
    store.pause()
    refreshing = pool.submit(lookup.refresh)
    assert store.is_asked.wait(WAIT_S)
    fetches = store.calls["fetch"]

    closing = pool.submit(lookup.close)
    assert lookup._closing.wait(WAIT_S)
    store.may_answer.set()

    closing.result(WAIT_S)
    refreshing.result(WAIT_S)
    assert store.calls["fetch"] == fetches + 1  # of ten


def close(lookup, _server):
    lookup.close()


def unload(_lookup, server):
    server.unload_model("m")


def erase(_lookup, server):
    server.erase_model("m")


@pytest.mark.parametrize("end", [close, unload, erase])
def test_while_a_model_ends_every_request_is_answered_correctly_or_refused(config, device, pool, end):
    """Meanwhile rows change, caches are refreshed and metrics are read."""
    config = with_cache(config, worker_buffers=3)
    rng = np.random.default_rng(3)
    batches = [request(config, rng) for _ in range(6)]
    answered = threading.Barrier(4)

    def ask(of):
        answers = []
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if len(answers) == 5:
                answered.wait(WAIT_S)
            try:
                answers.append((of, lookup.lookup_pooled(batches[of])))
            except UnknownModelError:
                return answers
        raise AssertionError("never refused")

    def use(call):
        while True:
            try:
                call()
            except UnknownModelError:
                return
            if lookup._closing.is_set():
                return

    with served(config) as server:
        expected = [LookupSession(server, config).lookup_pooled(batch) for batch in batches]
        rows = server.lookup("m.t0", KEYS)[0]
        lookup = CachedLookupSession(server, config, device)
        asking = [pool.submit(ask, of) for of in range(3)]
        using = [
            pool.submit(use, call)
            for call in (
                lambda: server.insert("m.t0", KEYS, rows),
                lookup.refresh,
                lambda: list(lookup.readings()),
            )
        ]
        answered.wait(WAIT_S)
        end(lookup, server)
        answers = [answer for one in asking for answer in one.result(WAIT_S)]
        lookup.close()
        for one in using:
            one.result(WAIT_S)

    assert len(answers) >= 15
    assert all(same(answer, expected[of]) for of, answer in answers)
