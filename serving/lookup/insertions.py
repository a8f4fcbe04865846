"""Insertions that nobody waits for: keys that a cache lacked, whose rows are read and put into it later."""

import logging
import threading
from collections.abc import Callable

import numpy as np

from kernels.errors import HotrowError
from serving.storage.store import Keys

logger = logging.getLogger(__name__)

# Keys that wait, over all tables. More are dropped: a key that is asked for often misses again soon.
MOST_WAITING_KEYS = 1 << 20


class Insertions:
    """Threads that insert what waits, a table at a time. Methods may be called from any thread.

    Whoever takes a table takes all keys that wait for it, each once: however often a key missed meanwhile, its row is
    read once.
    """

    def __init__(
        self, insert: Callable[[int, Keys], None], most_threads: int, most_keys: int = MOST_WAITING_KEYS
    ) -> None:
        """Start no thread yet.

        Args:
            insert: reads the rows of a table's keys, int64[N], distinct, and inserts them; the table is told by its
                place in the model.
            most_threads: a thread is started when there are tables that wait and none is idle, up to so many.
            most_keys: most keys that wait.
        """
        self._insert = insert
        self._most_threads = most_threads
        self._most_keys = most_keys
        self._condition = threading.Condition()  # guards the fields below
        self._waiting: dict[int, list[Keys]] = {}  # by table, the one that waits longest first
        self._waiting_keys = 0
        self._busy: set[int] = set()  # tables
        self._threads: list[threading.Thread] = []
        self._idle_threads = 0
        self._is_closed = False
        self._dropped_keys = 0

    def offer(self, table: int, keys: Keys) -> None:
        """Have ``keys``, int64[N], inserted; never waits. What has no room in the queue is dropped and counted."""
        with self._condition:
            room = 0 if self._is_closed else max(self._most_keys - self._waiting_keys, 0)
            self._dropped_keys += max(keys.size - room, 0)
            if not room or not keys.size:
                return
            self._waiting.setdefault(table, []).append(keys[:room])
            self._waiting_keys += min(keys.size, room)
            if not self._idle_threads and len(self._threads) < self._most_threads:
                thread = threading.Thread(target=self._work, name="hotrow-insertion", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify_all()

    @property
    def dropped_keys(self) -> int:
        """Keys that found the queue full."""
        return self._dropped_keys

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits any more; returns whether that was so within ``timeout_s``."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self) -> None:
        """Drop what waits; the threads end after what they are inserting, which nobody waits for here."""
        with self._condition:
            self._is_closed = True
            self._waiting.clear()
            self._waiting_keys = 0
            self._condition.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            table, keys = taken
            try:
                self._insert(table, keys)
            except HotrowError as err:
                if not self._is_closed:  # else it is the cache that is closed
                    logger.warning("rows were not inserted into the GPU cache: %s", err)
            except Exception:  # a thread's top: the next are inserted
                logger.exception("rows were not inserted into the GPU cache")
            with self._condition:
                self._busy.discard(table)
                self._condition.notify_all()

    def _take(self) -> tuple[int, Keys] | None:
        """Wait for a table that nobody else is at; None where all is closed."""
        with self._condition:
            self._idle_threads += 1
            self._condition.wait_for(lambda: self._is_closed or self._waiting.keys() - self._busy)
            self._idle_threads -= 1
            if self._is_closed:
                return None
            table = next(one for one in self._waiting if one not in self._busy)
            parts = self._waiting.pop(table)
            self._waiting_keys -= sum(part.size for part in parts)
            self._busy.add(table)
        return table, np.unique(np.concatenate(parts))
