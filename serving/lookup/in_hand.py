"""Calls that use what is going to be closed: it is released when the last of them has ended."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import UnknownModelError


class CallsInHand:
    """Counts the calls that are under way. Every method may be called from any thread."""

    def __init__(self, name: str) -> None:
        """None is under way; ``name`` says what they use, for messages."""
        self._name = name
        self._condition = threading.Condition()  # guards the fields below
        self._calls = 0
        self._is_closed = self._is_released = False
        self._release: Callable[[], None] | None = None  # for the last call, where nobody waits for it any more

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call, as long as the block lasts.

        Raises:
            UnknownModelError: closed.
        """
        with self._condition:
            if self._is_closed:
                raise UnknownModelError(f"{self._name} is closed")
            self._calls += 1
        try:
            yield
        finally:
            if release := self._ended():
                release()

    def close(self, release: Callable[[], None], most_wait_s: float) -> bool:
        """Let no call begin any more, and call ``release`` once when all have ended, but not before.

        Args:
            release: called here, or, if some have not ended after ``most_wait_s``, in the thread of the last of them.
            most_wait_s: how long to wait for them.

        Returns:
            whether all have ended.
        """
        with self._condition:
            self._is_closed = True
            all_ended = self._condition.wait_for(lambda: not self._calls, most_wait_s)
            if not all_ended:
                self._release = release
            is_for_us = all_ended and not self._is_released
            self._is_released |= all_ended
        if is_for_us:
            release()
        return all_ended

    def _ended(self) -> Callable[[], None] | None:
        """One has ended; what is to be called now, if anything."""
        with self._condition:
            self._calls -= 1
            self._condition.notify_all()
            if self._calls or self._release is None:
                return None
            self._is_released = True
            return self._release
