"""A tier's time budget: how long a request waits for the tier, and what later requests do after a timeout."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic as now_s
from typing import Any, TypeVar

from serving.errors import StoreError, StoreTimeoutError, StoreUnreachableError

T = TypeVar("T")

# Calls of one tier at a time, including those that hang.
MOST_THREADS = 16
LONGEST_BACK_OFF_S = 30.0


class CallThreads:
    """Up to a given number of daemon threads, started when they are needed.

    A call may hang in its thread. ``ThreadPoolExecutor`` would join that thread when the process ends.
    """

    def __init__(self, name: str, most_threads: int) -> None:
        """Start no thread yet."""
        self._name = name
        self._most_threads = most_threads
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two counts below
        self._threads = 0
        self._calls = 0  # waiting or running

    @property
    def is_full(self) -> bool:
        """Whether another call would have to wait for an earlier call."""
        return self._calls >= self._most_threads

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` as soon as a thread is free."""
        future: Future[T] = Future()
        with self._lock:
            self._calls += 1
            is_short = self._threads < min(self._calls, self._most_threads)
            self._threads += is_short
        if is_short:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put((future, call))
        return future

    def close(self) -> None:
        """End each thread when it is free; nothing may be submitted afterwards."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            result, error = None, None
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as err:  # noqa: BLE001 - the thread's top; the waiting caller gets it
                    error = err
            with self._lock:
                self._calls -= 1
            if not future.cancelled():
                future.set_exception(error) if error is not None else future.set_result(result)
            del job, future, call, result, error  # an idle thread keeps no rows


class CircuitBreaker:
    """Runs calls on its own threads and waits no longer than the time budget.

    A call that takes longer ends in an error. For a back-off time, later calls fail at once. The back-off starts at the
    budget and doubles each time. After it, one small call, the probe, runs in the background. When the probe is
    answered within the budget, calls run again. Every method may be called from any thread.
    """

    def __init__(self, store: str, timeout_ms: int) -> None:
        """Set the budget of the tier called ``store``.

        Raises:
            ValueError: it is less than 1 ms.
        """
        if timeout_ms < 1:
            raise ValueError(f"timeout_ms of {store}: expected at least 1, got {timeout_ms}")
        self._store = store
        self._timeout_s = timeout_ms / 1000
        self._reason = f"no answer within {timeout_ms} ms (timeout_ms)"
        self._threads = CallThreads(f"hotrow-{store}", MOST_THREADS)
        self._lock = threading.Lock()  # guards the three fields below
        self._is_open = False
        self._back_off_s = self._timeout_s
        self._probe_at = 0.0

    def call(self, table: str, call: Callable[[], T], probe: Callable[[], object]) -> T:
        """Return what ``call`` returns.

        An abandoned call continues: its output may still be written after this has raised.

        Args:
            table: the table, for messages.
            call: the call.
            probe: a smaller call that shows whether the tier answers.

        Raises:
            StoreTimeoutError: the call took longer than the budget.
            StoreUnreachableError: an earlier call did, and no probe has been answered since.
            StoreError: the call raised it.
        """
        if self._is_open:
            self._probe_when_due(probe)
            raise StoreUnreachableError(self._store, table, f"{self._reason} to an earlier call; it is being probed")
        answer = self._threads.submit(call)
        try:
            result = answer.result(self._timeout_s)
        except TimeoutError:
            answer.cancel()
            self._open()
            raise StoreTimeoutError(self._store, table, self._reason) from None
        finally:
            del answer  # it may have the error, whose traceback leads to this variable
        self._back_off_s = self._timeout_s
        return result

    def close(self) -> None:
        """End the threads; a thread whose call hangs ends with the call, or with the process."""
        self._threads.close()

    def _open(self) -> None:
        with self._lock:
            if not self._is_open:
                self._is_open = True
                self._probe_at = now_s() + self._back_off_s

    def _probe_when_due(self, probe: Callable[[], object]) -> None:
        with self._lock:
            # Where calls hang on every thread, the next call that returns makes room for a probe.
            if now_s() < self._probe_at or self._threads.is_full:
                return
            self._back_off_s = min(2 * self._back_off_s, max(LONGEST_BACK_OFF_S, self._timeout_s))
            self._probe_at = now_s() + self._back_off_s
        self._threads.submit(partial(self._probe, probe))

    def _probe(self, probe: Callable[[], object]) -> None:
        started = now_s()
        with suppress(StoreError):  # an error is an answer too: the next request will report it
            probe()
        if now_s() - started <= self._timeout_s:
            with self._lock:
                self._is_open = False
