"""Workspaces, the buffers and the stream of one request on a device: a few, lent to one request at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from kernels.device import Stream
from kernels.errors import HotrowError


class Workspace(Protocol):
    """What is lent."""

    @property
    def stream(self) -> Stream:
        """Where its work is queued."""

    @property
    def max_keys(self) -> int:
        """The most keys that a batch may have, over all tables."""


W = TypeVar("W", bound=Workspace)


class Workspaces(Generic[W]):
    """At most so many workspaces, made when they are first needed. Every method may be called from any thread."""

    def __init__(self, make: Callable[[int], W], most: int, max_keys: int) -> None:
        """Make none yet.

        Args:
            make: makes one for batches of so many keys.
            most: how many there may be; a request that finds all of them lent waits for one.
            max_keys: what they are made for at first; one that is too small for a batch is replaced, and from then on
                they are made as large as that one.
        """
        self._make = make
        self._max_keys = max_keys
        self._idle: list[W] = []
        self._left = most  # to be made
        self._condition = threading.Condition()  # guards the fields above

    @contextmanager
    def lend(self, keys: int) -> Iterator[W]:
        """A workspace for a batch of ``keys`` keys, over all tables; it is back when the block ends.

        One in which the device's work failed is not lent again. One whose request failed for another reason is, once
        that work has run: a tier that is down must not cost every request new buffers and graphs.
        """
        work = self._taken(keys)
        try:
            yield work
        except BaseException:
            self._give_back(work if _is_idle(work) else None)
            raise
        self._give_back(work)

    def close(self) -> None:
        """Drop them all: none is lent, and none will be."""
        with self._condition:
            self._idle.clear()

    def _taken(self, keys: int) -> W:
        with self._condition:
            self._condition.wait_for(lambda: self._idle or self._left)
            work = self._idle.pop() if self._idle else None
            if work is None:
                self._left -= 1
            wanted = self._max_keys
        if work is not None and work.max_keys >= keys:
            return work
        del work  # its memory first
        while wanted < keys:
            wanted *= 2
        try:
            made = self._make(wanted)
        except BaseException:
            self._give_back(None)
            raise
        with self._condition:  # not before: what had no room for one batch must not be tried for all later ones
            self._max_keys = max(self._max_keys, wanted)
        return made

    def _give_back(self, work: W | None) -> None:
        """Take one back; None: it is gone, and another may be made in its place."""
        with self._condition:
            if work is None:
                self._left += 1
            else:
                self._idle.append(work)
            self._condition.notify()


def _is_idle(work: Workspace) -> bool:
    """Wait for the workspace's stream, which uses its buffers; return whether all has run."""
    try:
        work.stream.synchronize()
    except HotrowError:  # what ended the request says more
        return False
    return True
