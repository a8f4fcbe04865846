"""Queue workers, periodic workers and the in-flight counter."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from math import inf

import pytest

from serving import background
from serving.background import (
    LEAST_PRIORITY,
    LONGEST_WAIT_S,
    LOOK_S,
    InFlightCounter,
    PeriodicWorker,
    QueueWorker,
    giving_way,
    make_way,
    next_to_requests,
)
from serving.errors import StoreError, UnknownModelError

WAIT_S = 30
LONG_S = 3600.0


@pytest.fixture
def queue():
    worker = QueueWorker("test queue", 2)
    yield worker
    worker.close()


class Runs:
    """Work that counts its runs; ``fault`` makes it fail."""

    def __init__(self, fault=None):
        self.fault = fault
        self.count = 0
        self.condition = threading.Condition()

    def __call__(self):
        with self.condition:
            self.count += 1
            self.condition.notify_all()
        if self.fault is not None:
            raise self.fault

    def reach(self, count):
        with self.condition:
            return self.condition.wait_for(lambda: self.count >= count, WAIT_S)


class Blocked:
    """Work that waits until it may go on."""

    def __init__(self):
        self.is_running, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.is_running.set()
        assert self.may_go_on.wait(WAIT_S)


def test_a_queue_worker_runs_work_in_order_in_one_daemon_thread(queue):
    done = []

    for number in range(2):
        assert queue.submit(lambda number=number: done.append((number, threading.current_thread())))
    assert queue.wait(WAIT_S)

    assert [number for number, _ in done] == [0, 1]
    threads = {thread for _, thread in done}
    assert len(threads) == 1
    assert all(thread.daemon and thread.name == "test queue" for thread in threads)


def test_a_queue_worker_starts_its_thread_with_the_first_work(queue):
    assert queue.wait(0)

    assert "test queue" not in [thread.name for thread in threading.enumerate()]


def test_a_full_queue_refuses_work(queue):
    blocked = Blocked()
    queue.submit(blocked)
    assert blocked.is_running.wait(WAIT_S)

    taken = [queue.submit(lambda: None) for _ in range(3)]
    assert not queue.wait(0.001)
    blocked.may_go_on.set()

    assert taken == [True, True, False]
    assert queue.wait(WAIT_S)


def test_a_closed_queue_drops_waiting_work_and_refuses_new_work(queue):
    blocked, dropped = Blocked(), Runs()
    queue.submit(blocked)
    assert blocked.is_running.wait(WAIT_S)
    queue.submit(dropped)

    queue.close(timeout_s=0)
    blocked.may_go_on.set()
    queue.close()

    assert dropped.count == 0
    assert not queue.submit(dropped)
    assert queue.wait(WAIT_S)


def test_a_queue_worker_logs_a_failure_and_goes_on(queue, caplog):
    after = Runs()

    queue.submit(Runs(ZeroDivisionError("oh")))
    queue.submit(after)
    assert queue.wait(WAIT_S)

    assert after.count == 1
    assert "test queue failed" in caplog.text
    assert "ZeroDivisionError: oh" in caplog.text


def test_work_may_close_its_own_queue(queue):
    queue.submit(queue.close)

    assert queue.wait(WAIT_S)


@pytest.mark.parametrize("first_after_s", [None, 0.0, 0.001])
def test_a_periodic_worker_repeats_its_work(first_after_s):
    runs = Runs()

    worker = PeriodicWorker("test clock", runs, 0.001, first_after_s=first_after_s)

    assert runs.reach(3)
    worker.close()


def test_an_infinite_interval_allows_one_first_run():
    runs = Runs()
    worker = PeriodicWorker("test clock", runs, inf, first_after_s=0.001)
    assert runs.reach(1)

    worker.close()

    assert runs.count == 1


def test_closing_a_periodic_worker_joins_its_thread_and_is_allowed_twice():
    runs = Runs()
    worker = PeriodicWorker("test clock", runs, LONG_S)

    worker.close()
    worker.close()

    assert runs.count == 0
    assert "test clock" not in [thread.name for thread in threading.enumerate()]


def test_closing_a_periodic_worker_waits_at_most_the_timeout():
    blocked = Blocked()
    worker = PeriodicWorker("test clock", blocked, LONG_S, first_after_s=0.0)
    assert blocked.is_running.wait(WAIT_S)

    worker.close(timeout_s=0.001)
    blocked.may_go_on.set()
    worker.close()


@pytest.mark.parametrize("fault", [StoreError("slow", "m.t", "no answer"), ZeroDivisionError("oh")])
def test_failures_are_logged_once_when_they_start_and_once_when_they_end(caplog, fault):
    runs = Runs(fault)
    worker = PeriodicWorker("test clock", runs, 0.001)
    with caplog.at_level(logging.WARNING):
        assert runs.reach(3)
        runs.fault = None
        assert runs.reach(runs.count + 3)
        worker.close()

    assert [message.split(":")[0] for message in caplog.messages] == ["test clock failed", "test clock works again"]
    assert str(fault) in caplog.text


def test_a_failure_during_close_is_not_logged(caplog):
    blocked = Blocked()

    def work():
        blocked()
        raise StoreError("slow", "m.t", "closed")

    worker = PeriodicWorker("test clock", work, LONG_S, first_after_s=0.0)
    assert blocked.is_running.wait(WAIT_S)
    worker.close(timeout_s=0)
    blocked.may_go_on.set()
    worker.close()

    assert not caplog.messages


@pytest.fixture
def calls():
    return InFlightCounter(lambda: UnknownModelError("it is closed"))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_closed_counter_refuses_calls(calls):
    calls.close(lambda: None, WAIT_S)

    with pytest.raises(UnknownModelError, match="it is closed"), calls.call():
        pass


def test_a_counter_closed_twice_releases_once(calls):
    released = []

    for _ in range(2):
        assert calls.close(lambda: released.append(1), WAIT_S)

    assert released == [1]


def test_of_two_closing_threads_one_releases(calls, pool):
    released = []
    with calls.call():
        patient = pool.submit(calls.close, lambda: released.append(1), WAIT_S)
        assert not calls.close(lambda: released.append(1), 0.0)
        assert released == []

    assert patient.result(WAIT_S)
    assert calls.close(lambda: released.append(1), WAIT_S)
    assert released == [1]


def test_a_call_that_ends_late_does_not_wait_for_the_release(calls):
    may_release, has_released = threading.Event(), threading.Event()
    with calls.call():
        assert not calls.close(lambda: has_released.set() if may_release.wait(WAIT_S) else None, 0.0)
    assert not has_released.is_set()
    may_release.set()

    assert has_released.wait(WAIT_S)


def test_a_release_that_fails_late_is_logged(calls, caplog):
    with calls.call():
        assert not calls.close(lambda: 1 / 0, 0.0)
    for thread in threading.enumerate():
        if thread.name == "hotrow-release":
            thread.join(WAIT_S)

    assert caplog.messages == ["a release failed"]


def test_closing_again_after_an_interrupted_close_releases(calls, monkeypatch):
    released = []

    def interrupt(_predicate, _timeout):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(calls._condition, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calls.close(lambda: released.append(1), WAIT_S)
    assert calls.close(lambda: released.append(1), WAIT_S)

    assert released == [1]


def own_priority():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_next_to_requests_has_a_low_priority_and_leaves_that_of_its_caller_alone():
    before = own_priority()
    with next_to_requests():
        during, own = giving_way(own_priority), own_priority()

    assert during == LEAST_PRIORITY
    assert before == own == own_priority() == giving_way(own_priority) < LEAST_PRIORITY


def test_work_runs_even_if_the_system_forbids_to_change_priorities(monkeypatch):
    def forbid(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbid)
    with next_to_requests():
        assert giving_way(own_priority) == own_priority()


class Sleeps(list):
    """The seconds of each sleep, in the place of the clock; ``then`` is called after each with their number."""

    def sleep(self, seconds):
        self.append(seconds)
        self.then(len(self))

    def then(self, _number):
        pass


@pytest.fixture
def sleeps(monkeypatch):
    sleeps = Sleeps()
    monkeypatch.setattr(background, "sleep", sleeps.sleep)
    monkeypatch.setattr(background, "monotonic", lambda: sum(sleeps))
    return sleeps


def test_work_makes_way_as_long_as_it_took_if_no_call_is_in_flight(calls, sleeps):
    with calls.call():
        pass

    make_way(0.25)

    assert sleeps == [0.25]


def test_work_makes_way_until_no_call_is_in_flight(calls, sleeps):
    calls.begin()
    calls.begin()
    sleeps.then = lambda number: calls.end() if number in (2, 4) else None

    make_way(0.25)

    assert sleeps == [0.25, LOOK_S, LOOK_S, LOOK_S]


def test_work_goes_on_though_there_is_always_a_call_in_flight(calls, sleeps):
    with calls.call():
        make_way(0.25)

    assert sum(sleeps) == pytest.approx(0.25 + LONGEST_WAIT_S, abs=LOOK_S)


def test_an_error_of_work_that_gives_way_reaches_its_caller():
    def fail():
        raise StoreError("memory", "model.table", "no room")

    with next_to_requests(), pytest.raises(StoreError, match="no room"):
        giving_way(fail)
