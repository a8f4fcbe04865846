"""Work that was queued last, as readers and writers of caches know it: what it has to be waited for."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from kernels.device import Event


class LatestWork(ABC):
    """Knows the events of work that was queued. Every method may be called from any thread."""

    def __init__(self) -> None:
        """Nothing is queued yet."""
        self._lock = threading.RLock()  # again, where a dropped cache is collected inside

    @abstractmethod
    def latest(self) -> list[Event]:
        """Return the events after which all that was queued so far has run."""

    def latest_at_once(self) -> list[Event] | None:
        """As ``latest``; None where another thread has the lock: for who must not wait for it."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self.latest()
        finally:
            self._lock.release()
