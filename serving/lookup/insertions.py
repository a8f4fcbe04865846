"""The asynchronous insert queue: keys that a cache did not hold, whose rows are read and inserted later."""

import logging
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from kernels.errors import HotrowError
from serving.background import QueueWorker
from serving.storage.store import Keys

logger = logging.getLogger(__name__)

# Most keys that wait, over all tables. More keys are dropped: a popular key soon misses again.
MOST_WAITING_KEYS = 1 << 20


class InsertQueue:
    """Inserts waiting keys, one table at a time per thread. Methods may be called from any thread.

    A run takes all keys that wait for a table, each once, so a row is read once however often its key missed.
    """

    def __init__(
        self, insert: Callable[[int, Keys], None], tables: int, most_threads: int, most_keys: int = MOST_WAITING_KEYS
    ) -> None:
        """Start no thread.

        Args:
            insert: reads and inserts the rows of a table's keys, int64[N], distinct; its first argument is the table's
                index in the model.
            tables: the number of tables in the model.
            most_threads: largest number of threads; a table always uses the same thread.
            most_keys: largest number of keys that wait.
        """
        self._insert = insert
        self._workers = [QueueWorker("hotrow-insertion", tables) for _ in range(min(tables, most_threads))]
        self._most_keys = most_keys
        self._lock = threading.Lock()  # guards the fields below
        self._waiting: dict[int, list[Keys]] = {}
        self._waiting_keys = 0
        self._is_closed = False
        self._dropped_keys = 0
        self._failing: set[int] = set()  # tables whose last insertion failed

    def offer(self, table: int, keys: Keys) -> None:
        """Queue ``keys``, int64[N], without waiting; if the queue is full, keys are dropped and counted."""
        with self._lock:
            capacity = 0 if self._is_closed else max(self._most_keys - self._waiting_keys, 0)
            self._dropped_keys += max(keys.size - capacity, 0)
            if not capacity or not keys.size:
                return
            is_first = table not in self._waiting
            self._waiting.setdefault(table, []).append(keys[:capacity])
            self._waiting_keys += min(keys.size, capacity)
            if is_first:
                self._workers[table % len(self._workers)].submit(partial(self._insert_waiting, table))

    @property
    def dropped_keys(self) -> int:
        """Keys that were dropped because the queue was full or their insertion failed."""
        return self._dropped_keys

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no key waits, at most ``timeout_s`` for each thread; return whether that happened in time."""
        return all([worker.wait(timeout_s) for worker in self._workers])

    def close(self) -> None:
        """Drop waiting keys; the threads end after their current insertion, and nobody waits for them here."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
        for worker in self._workers:
            worker.close(timeout_s=0)

    def _insert_waiting(self, table: int) -> None:
        with self._lock:
            parts = self._waiting.pop(table, [])
            self._waiting_keys -= sum(part.size for part in parts)
        if not parts:
            return
        keys = np.unique(np.concatenate(parts))
        try:
            self._insert(table, keys)
        except HotrowError as err:
            with self._lock:
                self._dropped_keys += keys.size
                is_new = table not in self._failing and not self._is_closed  # after a close, failures are expected
                self._failing.add(table)
            if is_new:
                logger.warning("rows are not inserted into the GPU cache: %s", err)
        else:
            self._failing.discard(table)
