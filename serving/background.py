"""Work in background threads: a queue, a clock, work that gives way to requests, and a counter of calls in flight.

All threads are daemons, so a call that hangs never keeps the process alive.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from math import inf
from time import monotonic, sleep
from typing import TypeVar

from kernels.errors import HotrowError

logger = logging.getLogger(__name__)

# Pause between two runs of a worker that is always late. Without it the worker would take a lock again at once while
# other threads wait for that lock.
_SHORTEST_PAUSE_S = 0.01
LEAST_PRIORITY = 19
#: The longest wait until no call is in flight, because there may always be a call; and how often it looks.
LONGEST_WAIT_S, LOOK_S = 0.005, 0.0003

T = TypeVar("T")


# One entry for each call that a counter counts now. Lists are safe for threads.
_in_flight: list[None] = []


class _Caller(threading.local):
    is_next_to_requests = False


_caller = _Caller()


@contextmanager
def next_to_requests() -> Iterator[None]:
    """While the block runs, work that this thread passes to ``giving_way`` gives way."""
    before, _caller.is_next_to_requests = _caller.is_next_to_requests, True
    try:
        yield
    finally:
        _caller.is_next_to_requests = before


def giving_way(work: Callable[[], T]) -> T:
    """Run ``work`` and return what it returns; in a block of ``next_to_requests``, other threads run before it.

    So requests do not wait for a processor while a version loads. Before the first requests, loads take the whole
    machine. Work that gives way has a thread of its own, because a thread may not raise its priority again. The system
    gives the threads and processes that ``work`` starts the same low priority.

    ``work`` must be long and seldom hold Python's lock: while other processes keep a thread of low priority from a
    processor, every request waits for the lock that the thread holds.
    """
    if not _caller.is_next_to_requests:
        return work()
    future: Future[T] = Future()
    threading.Thread(target=_run_giving_way, args=(work, future), name="hotrow-load", daemon=True).start()
    try:
        return future.result()
    finally:
        del future  # an error keeps the frames that it passed, and they must not keep the error


def _run_giving_way(work: Callable[[], T], future: Future[T]) -> None:
    try:
        with suppress(OSError):  # a container may forbid the call
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)  # of this thread alone
        future.set_result(work())
    except BaseException as err:  # noqa: BLE001 - the thread's top; the waiting caller gets it
        future.set_exception(err)
    finally:
        del future


def make_way(took_s: float) -> None:
    """Pause between two pieces of work that hold Python's lock; the last piece took ``took_s``.

    The pause is as long as that piece, and then lasts until no request is in flight. A request takes the lock dozens of
    times. If it waited for a piece each time, it would take several times as long.
    """
    sleep(took_s)
    end_s = monotonic() + LONGEST_WAIT_S
    while _in_flight and monotonic() < end_s:
        sleep(LOOK_S)


class QueueWorker:
    """One thread that runs submitted work in order. Methods may be called from any thread."""

    def __init__(self, name: str, most_waiting: float = inf) -> None:
        """Start no thread; the first ``submit`` does.

        Args:
            name: the thread's name, also for log lines.
            most_waiting: how much work may wait while other work runs.
        """
        self._name = name
        self._most_waiting = most_waiting
        self._condition = threading.Condition()  # guards the fields below
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> bool:
        """Queue ``work`` without waiting; return False if the queue is full or closed."""
        with self._condition:
            if self._is_closed or len(self._waiting) >= self._most_waiting:
                return False
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify_all()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no work waits or runs; return whether that happened within ``timeout_s``."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting and not self._is_busy, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Drop waiting work and wait for the thread, at most ``timeout_s``. Closing twice is allowed."""
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._condition.notify_all()
            thread = self._thread
        _join(thread, timeout_s)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # the top of a thread
                logger.exception("%s failed", self._name)
            del work  # an idle thread must not keep rows alive that its last work used

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            self._is_busy = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            return self._waiting.popleft()


class PeriodicWorker:
    """One thread that repeats the same work. Methods may be called from any thread."""

    def __init__(
        self, name: str, work: Callable[[], None], interval_s: float, *, first_after_s: float | None = None
    ) -> None:
        """Start the thread.

        Args:
            name: the thread's name, also for log lines.
            work: runs again and again. The first of several failures is logged, and so is the first success after them.
            interval_s: from the start of one run to the start of the next; infinite if nothing follows the first run.
            first_after_s: time until the first run; None: the interval.
        """
        self._name = name
        self._work = work
        self._interval_s = interval_s
        self._first_after_s = interval_s if first_after_s is None else first_after_s
        self._is_failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop after the current run and wait for the thread, at most ``timeout_s``. Closing twice is allowed."""
        self._closed.set()
        _join(self._thread, timeout_s)

    def _run(self) -> None:
        due_s = monotonic() + self._first_after_s
        while not self._closed.wait(min(max(due_s - monotonic(), _SHORTEST_PAUSE_S), threading.TIMEOUT_MAX)):
            due_s = monotonic() + self._interval_s
            self._run_once()

    def _run_once(self) -> None:
        try:
            self._work()
        except HotrowError as err:
            if not self._is_failing and not self._closed.is_set():
                logger.warning("%s failed: %s", self._name, err)
            self._is_failing = True
        except Exception:  # the top of a thread
            if not self._is_failing and not self._closed.is_set():
                logger.exception("%s failed", self._name)
            self._is_failing = True
        else:
            if self._is_failing:
                logger.warning("%s works again", self._name)
            self._is_failing = False


class InFlightCounter:
    """Counts calls that use a resource, and releases the resource after the last of them.

    A call that ends never waits for the release. It may end on an event loop, and a release may wait for a lock.
    """

    def __init__(self, closed_error: Callable[[], HotrowError]) -> None:
        """Start at zero; ``closed_error`` makes the error for calls after ``close``."""
        self._closed_error = closed_error
        self._lock = threading.Lock()  # guards the two fields below
        self._condition = threading.Condition(self._lock)  # there are no calls; the lock alone is faster to take
        self._calls = 0
        self._is_closed = False
        self._releasing = threading.Lock()  # held by a release, and guards the field below
        self._is_released = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one call while the block runs; see ``begin``."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count one call until ``end``; raise ``closed_error`` if the counter is closed."""
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            self._calls += 1
        _in_flight.append(None)

    def end(self) -> None:
        """Uncount a call."""
        _in_flight.pop()
        with self._lock:
            self._calls -= 1
            if self._is_closed:
                self._condition.notify_all()

    def close(self, release: Callable[[], None], timeout_s: float) -> bool:
        """Refuse new calls, and run ``release`` after the last call in flight, unless an earlier ``close`` does.

        Args:
            release: runs here if all calls end within ``timeout_s``, otherwise in a thread of its own.
            timeout_s: how long to wait for the calls.

        Returns:
            whether all calls have ended.
        """
        all_ended = self._wait(timeout_s)
        if all_ended:
            self._release_once(release)
        else:
            threading.Thread(target=self._release_later, args=(release,), name="hotrow-release", daemon=True).start()
        return all_ended

    def _wait(self, timeout_s: float | None) -> bool:
        with self._condition:
            self._is_closed = True
            return self._condition.wait_for(lambda: not self._calls, timeout_s)

    def _release_later(self, release: Callable[[], None]) -> None:
        self._wait(None)
        try:
            self._release_once(release)
        except Exception:  # the top of a thread
            logger.exception("a release failed")

    def _release_once(self, release: Callable[[], None]) -> None:
        with self._releasing:
            is_released, self._is_released = self._is_released, True
            if not is_released:
                release()


def _join(thread: threading.Thread | None, timeout_s: float | None) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join(timeout_s)
