"""Who reads rows of which caches, so that no row is overwritten under a reader: RCU, ordered by streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_cache.latest_work import LatestWork
from kernels.device import Event, Stream


class Readers(LatestWork):
    """The last launch of every stream that asked caches. Shared by all caches that are asked in one launch.

    A writer first queues what hides keys (it locks the slots that it is going to write, or erases), and says so by
    ``hiding``. Launches that were queued before may have found these keys: the writer lets its stream wait for them
    before it writes rows. Launches that are queued later wait on their streams until the keys are hidden, and find none
    of them, whatever else the writer's stream had to do first. So no reader waits for rows to be written, and nobody on
    the host waits at all.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        """Begin without readers."""
        super().__init__()
        self._latest: dict[Stream, Event] = {}
        self._hiding: list[Event] = []  # of writes whose keys may not be hidden yet

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        """Queue launches that read caches, or replay a graph of such launches, inside this context.

        The lock is held meanwhile: a launch is queued either before a ``hiding`` or after it.

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
        """Say that what hides keys has been queued on the writer's stream.

        Returns:
            the events after which every launch that may have found these keys has read their rows.
        """
        with self._lock:
            self._hiding.append(stream.record())
            return self.latest()

    def latest(self) -> list[Event]:
        """See ``LatestWork.latest``: every launch queued so far has read its rows then."""
        with self._lock:
            self._latest = {stream: event for stream, event in self._latest.items() if not event.is_done()}
            return list(self._latest.values())
