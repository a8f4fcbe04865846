"""Whose turn it is to write to a cache: calls of any thread and on any stream follow each other on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_cache.latest_work import LatestWork
from kernels.device import Event, Stream


class Writers(LatestWork):
    """The last write to a cache. Nobody on the host waits for it here.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        """Begin without a write."""
        super().__init__()
        self._last: Event | None = None

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[None]:
        """Queue a write inside this context; it runs after all earlier ones, whatever their streams.

        Args:
            stream: where all of it is queued.
        """
        with self._lock:
            if self._last is not None:
                stream.wait(self._last)
            try:
                yield
            finally:
                self._last = stream.record()

    def latest(self) -> list[Event]:
        """See ``LatestWork.latest``: of the last write, if there was one."""
        with self._lock:
            return [] if self._last is None else [self._last]
