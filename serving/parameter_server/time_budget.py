"""A tier's time budget: how long a request waits for it, and what happens to the requests after one that waited."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic as now_s
from typing import TypeVar

from serving.errors import StoreError, StoreTimeoutError, StoreUnreachableError
from serving.parameter_server.call_threads import CallThreads

T = TypeVar("T")

# Calls of one tier at a time, those that hang included.
MOST_THREADS = 16
LONGEST_BACK_OFF_S = 30.0


class TimeBudget:
    """Makes calls on threads of its own and waits no longer than the budget: a circuit breaker.

    A call that takes longer ends in an error, and for a back-off, as long as the budget and doubled each time, those
    behind it end in one at once. Then a single small call, the probe, is made beside them; when it is answered within
    the budget, calls are made again. Every method may be called from any thread.
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
        self._is_backing_off = False
        self._back_off_s = self._timeout_s
        self._probe_at = 0.0

    def call(self, table: str, call: Callable[[], T], probe: Callable[[], object]) -> T:
        """Return what ``call`` returns.

        What it writes into may still be written when this has raised: an abandoned call goes on.

        Args:
            table: what it is about, for messages.
            call: the call.
            probe: a smaller one, which tells whether the tier answers.

        Raises:
            StoreTimeoutError: it took longer than the budget.
            StoreUnreachableError: a call before it did, and the tier has not been seen answering since.
            StoreError: the call raised it.
        """
        if self._is_backing_off:
            self._probe_when_due(probe)
            raise StoreUnreachableError(self._store, table, f"{self._reason} to an earlier call; it is being probed")
        answer = self._threads.submit(call)
        try:
            result = answer.result(self._timeout_s)
        except TimeoutError:
            answer.cancel()
            self._back_off()
            raise StoreTimeoutError(self._store, table, self._reason) from None
        self._back_off_s = self._timeout_s
        return result

    def close(self) -> None:
        """Let the threads end; one whose call hangs ends when the call does, or with the process."""
        self._threads.close()

    def _back_off(self) -> None:
        with self._lock:
            if not self._is_backing_off:
                self._is_backing_off = True
                self._probe_at = now_s() + self._back_off_s

    def _probe_when_due(self, probe: Callable[[], object]) -> None:
        with self._lock:
            # Where calls hang on every thread, the next to return makes room for a probe.
            if now_s() < self._probe_at or self._threads.is_full:
                return
            self._back_off_s = min(2 * self._back_off_s, max(LONGEST_BACK_OFF_S, self._timeout_s))
            self._probe_at = now_s() + self._back_off_s
        self._threads.submit(partial(self._probe, probe))

    def _probe(self, probe: Callable[[], object]) -> None:
        started = now_s()
        with suppress(StoreError):  # an answer, too: what is wrong is for the next request to tell
            probe()
        if now_s() - started <= self._timeout_s:
            with self._lock:
                self._is_backing_off = False
