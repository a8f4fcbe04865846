"""Calls of rocksdict that another thread is in when Python ends.

Such a call lets go of Python's global lock. One that wants it back while Python ends has its thread ended by CPython
("Initialization, Finalization, and Threads", C API), which unwinds the stack, and Rust aborts the process there.
Python joins other threads before; daemon threads, a time budget's or the user's own, it does not.
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
    """Lets calls through until Python ends, then only those of the thread that ends it. Safe from any thread."""

    def __init__(self) -> None:
        """Begin open."""
        self._inside: set[int] = set()  # threads; one act of a set is atomic, so that callers take no lock
        self._ending_thread: int | None = None

    def call(self, function: Callable[[A], T], argument: A) -> T:
        """Return what ``function`` gives of ``argument``; takes some 0.1 us more than that does.

        Raises:
            SystemExit: Python is ending. It ends a thread silently, as Python itself is about to, but lets go of the
                locks that the thread holds: the thread that ends Python may still close stores.
        """
        thread = get_ident()
        self._inside.add(thread)  # before the look at the gate, which is closed before the look at who is inside
        try:
            if self._ending_thread is not None and self._ending_thread != thread:
                raise SystemExit
            return function(argument)
        finally:
            self._inside.discard(thread)

    def close(self, most_wait_s: float = MOST_WAIT_S) -> bool:
        """Let through nothing but the calling thread; wait until nobody is inside.

        Args:
            most_wait_s: how long to wait.

        Returns:
            whether all have come out.
        """
        self._ending_thread = get_ident()
        deadline = time.monotonic() + most_wait_s
        while self._inside and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self._inside

    def forget_threads(self) -> None:
        """Begin anew in a forked child, which has none of the threads that were inside."""
        self._inside.clear()


exit_gate = ExitGate()
atexit.register(exit_gate.close)
os.register_at_fork(after_in_child=exit_gate.forget_threads)
