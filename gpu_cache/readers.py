"""The order of reads and writes on streams, so that no row is overwritten, and no memory freed, under a reader: RCU."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from kernels.device import Event, Stream

_GOLDEN = 0x9E3779B97F4A7C15  # an odd number whose multiples have little in common


class LatestWork(ABC):
    """The events of the latest work; every method may be called from any thread."""

    def __init__(self) -> None:
        """Start without work."""
        # Reentrant, because the garbage collector may drop a cache while this thread holds the lock.
        self._lock = threading.RLock()

    @abstractmethod
    def latest(self) -> list[Event]:
        """Return the events after which all work queued so far has run."""

    def latest_without_waiting(self) -> list[Event] | None:
        """Return ``latest()``, or None if another thread holds the lock."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self.latest()
        finally:
            self._lock.release()


class Readers(LatestWork):
    """The last launch of every stream that asked caches. All caches that one launch asks share it, and their writers.

    A writer first queues the kernel that hides keys: it locks the slots that are about to be written, or erases keys.
    Then the writer calls ``hiding``. Launches queued before may have found these keys, so the writer's stream waits for
    them before rows are written. Launches queued later wait on their streams until the keys are hidden, and find none
    of them. So no reader waits for rows to be written, and no thread of the host waits at all.

    Every method may be called from any thread.

    Attributes:
        writers: the order of the writes to these caches.
    """

    def __init__(self) -> None:
        """Start without readers."""
        super().__init__()
        self.writers = Writers()
        self._latest: dict[Stream, Event] = {}
        self._hiding: list[Event] = []  # of writes whose keys may not be hidden yet

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        """Queue launches that read caches, or replay a graph of such launches, inside this context.

        The lock is held inside: a launch is queued either before a ``hiding`` or after it.

        Args:
            stream: where all of them are queued.
        """
        with self._lock:
            self._hiding = [event for event in self._hiding if not event.is_done()]
            for hidden in self._hiding:
                stream.wait(hidden)
            try:
                yield
            finally:
                self._latest[stream] = stream.record()

    def hiding(self, stream: Stream) -> list[Event]:
        """Report that the kernel that hides keys was queued on the writer's stream.

        Returns:
            the events after which every launch that may have found these keys has read their rows.
        """
        with self._lock:
            self._hiding.append(stream.record())
            return self.latest()

    def last(self, stream: Stream) -> Event | None:
        """Return the point after the last launches in ``reading`` on a stream; None if they have run."""
        return self._latest.get(stream)

    def latest(self) -> list[Event]:
        """Return the events after which every launch queued so far has read its rows."""
        with self._lock:
            self._latest = {stream: event for stream, event in self._latest.items() if not event.is_done()}
            return list(self._latest.values())


class Writers(LatestWork):
    """The last write to caches: writes follow each other on the device, and no thread of the host waits for them."""

    def __init__(self) -> None:
        """Start without a write."""
        super().__init__()
        self._last: Event | None = None
        self._insertions = 0

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[None]:
        """Queue a write on ``stream`` inside this context; it runs after all earlier writes on any stream."""
        with self._lock:
            if self._last is not None:
                stream.wait(self._last)
            try:
                yield
            finally:
                self._last = stream.record()

    def draw_salt(self) -> np.uint64:
        """Return the salt of policy.cuh for an insertion, inside its ``turn``: a different number for each."""
        self._insertions += 1
        return np.uint64(self._insertions * _GOLDEN % (1 << 64))

    def latest(self) -> list[Event]:
        """Return the event of the last write, if there was one."""
        with self._lock:
            return [] if self._last is None else [self._last]


_dropped: deque[tuple[Readers, tuple[object, ...]]] = deque()
_kept: deque[tuple[list[Event], tuple[object, ...]]] = deque()


def defer_free(readers: Readers, held: tuple[object, ...]) -> None:
    """Keep arrays, and objects that hold arrays, until all launches queued so far have run.

    Never waits, not even for a lock. The garbage collector calls it on any thread, in the middle of other work and with
    any lock held: a stream's own thread would wait for itself.
    """
    _dropped.append((readers, held))
    free_unused()


def free_unused() -> None:
    """Free the deferred memory whose work has run. Any thread may call it."""
    for _ in range(len(_dropped)):
        with suppress(IndexError):  # another thread has taken the last
            readers, held = _dropped.popleft()
            read, written = readers.latest_without_waiting(), readers.writers.latest_without_waiting()
            if read is None or written is None:  # try again later
                _dropped.append((readers, held))
            else:
                _kept.append(([*read, *written], held))
    for _ in range(len(_kept)):
        with suppress(IndexError):
            events, held = _kept.popleft()
            if not all(event.is_done() for event in events):
                _kept.append((events, held))
