"""Calls of rocksdict that run in a daemon thread while Python ends.

A call of rocksdict releases Python's global lock. If it takes the lock again while Python ends, CPython ends the thread
by unwinding its stack ("Initialization, Finalization, and Threads", C API), and Rust then aborts the process. Python
joins other threads before it ends, but not daemon threads.
"""

import atexit
import os
import time
from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")

MOST_WAIT_S = 2.0  # a disk that hangs must not hang the end of the process
_POLL_S = 0.001


class ExitGate:
    """Lets calls through until Python ends, then only calls of the thread that ends Python. Thread-safe."""

    def __init__(self) -> None:
        """Begin open."""
        self._inside: set[int] = set()  # threads; each operation of a set is atomic, so callers take no lock
        self._ending_thread: int | None = None

    def call(self, function: Callable[[A], T], argument: A) -> T:
        """Return ``function(argument)``; adds about 0.1 us.

        Raises:
            SystemExit: Python is ending. It ends the thread silently, and releases the thread's locks, so that the
                thread that ends Python can still close stores.
        """
        thread = get_ident()
        self._inside.add(
            thread
        )  # enter before checking the gate: close() closes the gate before it checks who is inside
        try:
            if self._ending_thread is not None and self._ending_thread != thread:
                raise SystemExit
            return function(argument)
        finally:
            self._inside.discard(thread)

    def close(self, most_wait_s: float = MOST_WAIT_S) -> bool:
        """Let only the calling thread through, and wait for running calls; return whether all of them ended."""
        self._ending_thread = get_ident()
        deadline = time.monotonic() + most_wait_s
        while self._inside and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._inside

    def forget_threads(self) -> None:
        """Forget the parent's threads in a forked child, which does not have them."""
        self._inside.clear()


exit_gate = ExitGate()
atexit.register(exit_gate.close)
os.register_at_fork(after_in_child=exit_gate.forget_threads)
