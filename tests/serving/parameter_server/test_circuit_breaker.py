"""A tier that hangs costs one request its time budget, later requests nothing, and the process a few threads."""

import threading
import time

import numpy as np
import pytest

from serving.errors import StoreError, StoreTimeoutError
from serving.parameter_server import ParameterServer, TierSettings, circuit_breaker
from serving.parameter_server.circuit_breaker import CallThreads
from serving.storage import MemoryStore
from tests.serving.small_server import KEYS, ROWS, DictStore, HookedMemory, errors_of, keep, serve

WAIT_S = 60
TIMEOUT_MS = 800  # a tier that answers must do so within it, on a busy machine too


class HangingStore(DictStore):
    """A store whose reads really block, from ``hang`` to ``recover``."""

    def __init__(self, name="slow"):
        super().__init__(name)
        self.gate = threading.Event()
        self.gate.set()
        self.left = threading.Semaphore(0)  # one for every read that has ended
        self.reading = 0

    def fetch(self, table, keys, out):
        self.reading += 1
        assert self.gate.wait(WAIT_S)
        found = super().fetch(table, keys, out)
        self.reading -= 1
        self.left.release()
        return found

    def hang(self):
        self.gate.clear()

    def recover(self):
        self.gate.set()


@pytest.fixture
def clock(monkeypatch):
    """The clock of back-offs, which a test moves by hand; the waits for answers are real."""
    now = [0.0]
    monkeypatch.setattr(circuit_breaker, "now_s", lambda: now[0])
    return now


@pytest.fixture
def server(config, clock):
    """RAM with half of the rows, before a tier that can hang."""
    slow = HangingStore()
    with serve(config, MemoryStore(), slow, settings={"slow": TierSettings(timeout_ms=TIMEOUT_MS)}) as server:
        keep(server.stores[0], KEYS[:6])
        yield server
        slow.recover()


def counters(server):
    return server.counters()["m.t"].tiers[1]


def ask(server, keys=(12,)):
    return server.lookup("m.t", np.array(keys))


def test_a_tier_that_answers_in_time_is_asked(server):
    rows, found = ask(server, KEYS)

    assert found.all()
    assert rows.tobytes() == ROWS.tobytes()
    assert counters(server).errors == 0


def test_a_tier_that_hangs_ends_a_lookup_with_an_error_that_names_it_and_its_budget(server):
    server.stores[1].hang()

    with pytest.raises(StoreTimeoutError, match=r"^slow: table 'm\.t': no answer within 800 ms \(timeout_ms\)$"):
        ask(server)
    assert (counters(server).errors, counters(server).timeouts) == (1, 1)


def test_a_tier_that_hangs_is_bypassed_where_a_slower_tier_answers(config, clock):
    middle = HangingStore("middle")
    settings = {"middle": TierSettings(timeout_ms=TIMEOUT_MS)}
    with serve(config, MemoryStore(), middle, DictStore("slow"), settings=settings) as server:
        keep(server.stores[0], [])
        middle.hang()

        for _ in range(3):
            assert ask(server, KEYS)[0].tobytes() == ROWS.tobytes()
        middle.recover()

        assert server.counters()["m.t"].hits == {"slow": 36}
        assert errors_of(server) == {"middle": 3}


def test_rows_in_faster_tiers_are_answered_while_the_slow_one_hangs(server):
    server.stores[1].hang()
    with pytest.raises(StoreTimeoutError):
        ask(server)

    assert ask(server, KEYS[:6])[1].all()


def test_after_a_time_out_requests_do_not_wait_until_the_back_off_is_over(server):
    server.stores[1].hang()
    with pytest.raises(StoreTimeoutError):
        ask(server)

    for _ in range(100):
        with pytest.raises(StoreError, match="to an earlier call; it is being probed"):
            ask(server)

    assert server.stores[1].reading == 1
    assert (counters(server).errors, counters(server).timeouts) == (101, 1)


def test_a_probe_in_the_background_ends_the_outage(server, clock, caplog):
    slow = server.stores[1]
    slow.hang()
    with pytest.raises(StoreTimeoutError):
        ask(server)
    slow.recover()
    assert slow.left.acquire(timeout=WAIT_S)
    clock[0] += TIMEOUT_MS / 1000

    with pytest.raises(StoreError, match="being probed"):
        ask(server)  # starts the probe and does not wait for it
    assert slow.left.acquire(timeout=WAIT_S)

    until_answered(server)
    starts, ends = caplog.messages
    assert starts.startswith(
        "tier slow does not answer, model 'm': no answer within 800 ms (timeout_ms) (table 'm.t'): "
    )
    assert ends.startswith("tier slow answers again, model 'm': after ")


def until_answered(server):
    """Ask until the probe's thread, which has its answer, has ended the outage."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            return ask(server)
        except StoreError:
            pass
    pytest.fail("the probe did not end the outage")


def test_a_probe_that_hangs_keeps_the_tier_out_and_doubles_the_back_off(server, clock):
    slow = server.stores[1]
    slow.hang()
    with pytest.raises(StoreTimeoutError):
        ask(server)
    starts = []
    for tick in range(64):  # of the back-off's length each
        before = slow.reading
        clock[0] = tick * (1 + 1e-9) * TIMEOUT_MS / 1000
        with pytest.raises(StoreError):
            ask(server)
        settle(lambda: server._tiers[1].breaker._threads._calls == slow.reading)
        if slow.reading > before:
            starts.append(tick)

    assert starts == [1, 3, 7, 15, 31, 63]


def settle(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end


def test_no_more_threads_than_a_few_hang_however_long_the_outage(server, clock):
    slow = server.stores[1]
    slow.hang()
    for _ in range(4 * circuit_breaker.MOST_THREADS):
        with pytest.raises(StoreError):
            ask(server)
        clock[0] += 2 * circuit_breaker.LONGEST_BACK_OFF_S

    settle(lambda: slow.reading == circuit_breaker.MOST_THREADS)
    threads = server._tiers[1].breaker._threads
    assert threads._threads == threads._calls == circuit_breaker.MOST_THREADS
    slow.recover()
    for _ in range(circuit_breaker.MOST_THREADS):
        assert slow.left.acquire(timeout=WAIT_S)
    clock[0] += 2 * circuit_breaker.LONGEST_BACK_OFF_S
    until_answered(server)


def test_an_abandoned_call_that_ends_late_changes_no_answer(config, clock):
    slow = HangingStore()
    with serve(config, DictStore("fast"), slow, settings={"slow": TierSettings(timeout_ms=TIMEOUT_MS)}) as server:
        keep(server.stores[0], KEYS[:6])
        slow.hang()
        with pytest.raises(StoreTimeoutError):
            server.lookup_pooled("m.t", np.array(KEYS), np.array([0, 12]), "sum")
        rows, _ = ask(server, KEYS[:6])
        slow.recover()
        assert slow.left.acquire(timeout=WAIT_S)

        assert rows.tobytes() == ROWS[:6].tobytes()


def test_an_error_of_the_store_is_no_time_out_and_starts_no_back_off(server):
    server.stores[1].is_down = True
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no answer$"):
            ask(server)
    server.stores[1].is_down = False

    assert ask(server)[1].all()
    assert (counters(server).errors, counters(server).timeouts) == (2, 0)


def test_a_pooling_tier_has_a_budget_too(config, clock):
    class Hanging(HookedMemory):
        gate = threading.Event()

        def on_fetch_pooled(self, *args):
            assert self.gate.wait(WAIT_S)
            return super().on_fetch_pooled(*args)

    with serve(config, Hanging(), DictStore(), settings={"memory": TierSettings(timeout_ms=TIMEOUT_MS)}) as server:
        pooled, found = server.lookup_pooled("m.t", np.array([1, 2]), np.array([0, 2]), "sum")
        Hanging.gate.set()

        assert found.all()
        np.testing.assert_array_equal(pooled, ROWS[:1] + ROWS[1:2])


def test_a_server_closes_while_a_tier_hangs(config, clock):
    slow = HangingStore()
    with serve(config, slow, settings={"slow": TierSettings(timeout_ms=TIMEOUT_MS)}) as server:
        slow.hang()
        with pytest.raises(StoreTimeoutError):
            ask(server)

    assert slow.calls["close"] == 1
    slow.recover()


def test_a_budget_below_a_millisecond_and_settings_of_no_store_are_refused():
    with pytest.raises(ValueError, match="timeout_ms of dict: expected at least 1, got 0"):
        ParameterServer([DictStore()], settings={"dict": TierSettings(timeout_ms=0)})
    with pytest.raises(ValueError, match=r"settings for \['disk'\], but the stores are \['dict'\]"):
        ParameterServer([DictStore()], settings={"disk": TierSettings()})


def test_threads_are_started_as_they_are_needed_and_end_when_they_are_closed():
    threads = CallThreads("calls", 2)
    gates = [threading.Event() for _ in range(3)]
    futures = [threads.submit(lambda gate=gate: gate.wait(WAIT_S)) for gate in gates]
    assert threads.is_full
    assert sum(thread.name == "calls" for thread in threading.enumerate()) == 2

    for gate in gates:
        gate.set()
    assert [future.result(WAIT_S) for future in futures] == [True] * 3
    assert threads.submit(lambda: 7).result(WAIT_S) == 7
    threads.close()
    settle(lambda: not any(thread.name == "calls" for thread in threading.enumerate()))


def test_the_error_of_a_call_reaches_the_caller():
    threads = CallThreads("calls", 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(WAIT_S)
    threads.close()
