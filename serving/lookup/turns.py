"""Turns at what only so many may do at a time."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A semaphore that serves whoever waits longest. Any thread may take a turn.

    Python's own may be taken again at once by the thread that gives it back: who refreshes by the clock, and is late,
    would never let others come.
    """

    def __init__(self, at_once: int = 1) -> None:
        """Let so many have a turn ``at_once``."""
        self._condition = threading.Condition()  # guards the fields below
        self._free = at_once
        self._waiting: deque[object] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One turn, as long as the block lasts; waits until it has come."""
        me = object()
        with self._condition:
            self._waiting.append(me)
            try:
                self._condition.wait_for(lambda: self._free and self._waiting[0] is me)
                self._free -= 1
            finally:
                self._waiting.remove(me)
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._free += 1
                self._condition.notify_all()
