"""A pool of workspaces: each holds the buffers and the stream of one request on a device."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from kernels.device import Stream
from kernels.errors import HotrowError


class Workspace(Protocol):
    """A workspace that ``Workspaces`` lends."""

    @property
    def stream(self) -> Stream:
        """The stream of its work."""

    @property
    def max_keys(self) -> int:
        """Largest number of keys in a batch, over all tables."""


W = TypeVar("W", bound=Workspace)


class Workspaces(Generic[W]):
    """A bounded pool that makes workspaces when they are needed. Every method may be called from any thread."""

    def __init__(self, make: Callable[[int], W], most_workspaces: int, max_keys: int) -> None:
        """Make no workspace yet.

        Args:
            make: makes a workspace for batches of at most this many keys.
            most_workspaces: largest number of workspaces; if all are lent, a request waits.
            max_keys: room of the first workspaces. A larger batch replaces a workspace by a larger one, and later
                workspaces are made as large.
        """
        self._make = make
        self._max_keys = max_keys
        self._idle: deque[W] = deque()  # the one whose last work was queued longest ago first
        self._left = most_workspaces  # workspaces that may still be made
        self._condition = threading.Condition()  # guards the fields above

    @contextmanager
    def lend(self, keys: int) -> Iterator[W]:
        """Lend a workspace for a batch of ``keys`` keys, over all tables, until the block ends.

        A workspace is not lent again if the device's work failed in it. After any other error it is lent again once its
        work has run: a tier that is down must not cost every request new buffers and graphs.
        """
        work = self._taken(keys)
        try:
            yield work
        except BaseException:
            self._give_back(work if _is_idle(work) else None)
            raise
        self._give_back(work)

    def close(self) -> None:
        """Drop all workspaces; call it when none is lent, and lend none afterwards."""
        with self._condition:
            self._idle.clear()

    def _taken(self, keys: int) -> W:
        with self._condition:
            self._condition.wait_for(lambda: self._idle or self._left)
            work = self._idle.popleft() if self._idle else None
            if work is None:
                self._left -= 1
            wanted = self._max_keys
        if work is not None and work.max_keys >= keys:
            return work
        if work is not None:
            _is_idle(work)  # the insertion of its last request would keep its memory
        del work  # frees its memory before the larger workspace is made
        while wanted < keys:
            wanted *= 2
        try:
            made = self._make(wanted)
        except BaseException:
            self._give_back(None)
            raise
        with self._condition:  # only now: a size that did not fit must not be tried again
            self._max_keys = max(self._max_keys, wanted)
        return made

    def _give_back(self, work: W | None) -> None:
        """Take a workspace back; None: the workspace is gone, and another may be made."""
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
    except HotrowError:  # the error that ended the request says more
        return False
    return True
