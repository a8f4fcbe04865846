"""Threads of a tier's own, on which a call may hang without hanging anything else."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class CallThreads:
    """Up to a given number of daemon threads, started as they are needed.

    Those of ``ThreadPoolExecutor`` are joined when the process ends, so that a call that hangs would hang the end, too.
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
        """Whether another call would have to wait for one of those before it."""
        return self._calls >= self._most_threads

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made as soon as a thread is free."""
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
        """Let threads end as soon as they are free; a call that hangs keeps its own. Nothing may be submitted then."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            result, error = None, None
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as err:  # noqa: BLE001 - the thread's top; whoever waits gets it
                    error = err
            with self._lock:
                self._calls -= 1
            if not future.cancelled():
                future.set_exception(error) if error is not None else future.set_result(result)
            del job, future, call, result, error  # an idle thread keeps no rows
