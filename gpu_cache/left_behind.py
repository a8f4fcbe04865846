"""Memory of caches and workspaces dropped while work that uses it was queued: it is kept until that has run."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from gpu_cache.readers import Readers
from gpu_cache.writers import Writers
from kernels.device import Event

_dropped: deque[tuple[Readers, Writers | None, tuple[object, ...]]] = deque()
_kept: deque[tuple[list[Event], tuple[object, ...]]] = deque()


def keep_until_unused(readers: Readers, writers: Writers | None, held: tuple[object, ...]) -> None:
    """Keep arrays, and what holds arrays, until all launches queued so far have run.

    It never waits, not even for a lock: garbage is collected by any thread, amid whatever that does and with the locks
    that it has. A stream's own would wait for itself, another for who reads the caches and wants one of these locks.
    Whether an event is done is asked without a lock, too (``Event.is_done``).
    """
    _dropped.append((readers, writers, held))
    release_unused()


def release_unused() -> None:
    """Let go of what has come out of use. Any thread may call."""
    for _ in range(len(_dropped)):
        with suppress(IndexError):  # another thread has taken the last
            readers, writers, held = _dropped.popleft()
            read, written = readers.latest_at_once(), [] if writers is None else writers.latest_at_once()
            if read is None or written is None:  # later
                _dropped.append((readers, writers, held))
            else:
                _kept.append(([*read, *written], held))
    for _ in range(len(_kept)):
        with suppress(IndexError):
            events, held = _kept.popleft()
            if not all(event.is_done() for event in events):
                _kept.append((events, held))
