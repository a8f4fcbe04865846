"""One request through the caches of a model: rows that the caches miss are read from the tiers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpu_cache.missing import ABSENT, Missing
from serving.config import GpuCacheConfig
from serving.lookup.device_workspace import DeviceWorkspace
from serving.lookup.table_cache import TableCache
from serving.parameter_server.copies import Copies, ReadRows
from serving.storage.store import Keys, Mask, Vectors

# Queues keys of a table, given by its index, for a later insertion. See ``InsertQueue.offer``.
InsertLater = Callable[[int, Keys], None]


class CachedRequest:
    """One request, which a workspace has loaded; used once, by one thread.

    In the exact mode the request waits for all rows that the caches miss. In the asynchronous mode it does not wait for
    a table whose hit rate was high enough: the missing rows count as the default value and are inserted later.

    Attributes:
        work: the request's buffers. The caller queues their first launch.
        late: int64[T], how many keys of each table, with duplicates, got a default although a tier may hold them;
            None: no key did.
        defaulted: int64[T], how many keys of each table, with duplicates, got a default: late keys, and keys that no
            tier holds; None: no key did.
    """

    def __init__(
        self,
        settings: GpuCacheConfig,
        caches: Sequence[TableCache],
        copies: Copies,
        keys: Sequence[Keys],
        work: DeviceWorkspace,
        insert_later: InsertLater | None,
    ) -> None:
        """Begin a request for ``keys``, with one entry per table; ``insert_later`` is None in the exact mode."""
        self.work = work
        self.late: NDArray[np.int64] | None = None
        self.defaulted: NDArray[np.int64] | None = None
        self._settings, self._insert_later = settings, insert_later
        self._caches, self._copies, self._keys = caches, copies, keys
        # Nothing of the following is needed if no key is missing, the common case.
        self._hit_rates = np.zeros(0)  # by table, of the first launch
        self._is_late: Mask = np.zeros(0, dtype=np.bool_)  # by table: the request does not wait for missing rows
        self._reads: list[ReadRows] = []
        self._misses: list[NDArray[np.uint32]] = []  # of the keys of each read; see ``Workspace.insert``

    @property
    def defaulted_keys(self) -> int:
        """How many keys, with duplicates, got a default."""
        return 0 if self.defaulted is None else int(self.defaulted.sum())

    @property
    def late_keys(self) -> int:
        """How many keys, with duplicates, got a default although a tier may hold them."""
        return 0 if self.late is None else int(self.late.sum())

    @property
    def incomplete(self) -> Sequence[tuple[int, None]]:
        """The tables in which keys got a default because no tier holds them; see ``LookupResult``."""
        if self.defaulted is None:
            return ()
        unknown = self.defaulted if self.late is None else self.defaulted - self.late
        return [(table, None) for table in np.flatnonzero(unknown).tolist()]

    def complete(self) -> bool:
        """Wait for the last launch. If it missed rows that the request waits for, read and queue them, and return True.

        Call it until it returns False. Work that needs the rows must be queued again each time that it returns True.

        Raises:
            StoreError: a tier did not answer, and no other tier holds one of the keys.
            DeviceFaultError: work on the device failed.
        """
        missing = self.work.pooling.missing()
        if missing:
            if not self._hit_rates.size:
                self._note_hit_rates(missing)
            self._queue_late(missing)
            if np.count_nonzero(missing.bags[~self._is_late]):
                self.work.pooling.complete(self._rows_of(missing))
                return True
        absent = self.work.pooling.absent
        if np.count_nonzero(absent):  # faster than a sum, and most requests have none
            self._count_defaulted(absent)
        return False

    def rows(self) -> tuple[Vectors, ...]:
        """Look the loaded keys up, and return the rows on the host."""
        self.work.pooling.launch()
        self.work.queue_rows()
        while self.complete():
            self.work.queue_rows()
        return self.work.rows()

    def keep(self) -> None:
        """Queue the insertion of the rows that were read, where the configuration asks for it; the answer was read.

        Keys that no tier holds are always noted as absent, so that the next request with them misses nothing.
        """
        if not self._reads:
            return
        misses = np.concatenate(self._misses)
        if self._settings.fill != "always":
            takes_no_rows = self._hit_rates >= self._settings.hit_rate_threshold
            sizes = [of_table.size for read in self._reads for of_table in read.keys]
            misses[np.repeat(np.tile(takes_no_rows, len(self._reads)), sizes) & (misses < ABSENT)] = 0
        if not np.count_nonzero(misses):
            return
        with self._copies.storing(self._reads) as unchanged:
            misses[~unchanged] = 0
            self.work.pooling.insert(misses)

    def _count_defaulted(self, keys: NDArray[np.int64] | NDArray[np.uint32]) -> None:
        """Count keys that got a default, of each table."""
        if self.defaulted is None:
            self.defaulted = np.zeros(len(self._keys), dtype=np.int64)
        self.defaulted += keys

    def _note_hit_rates(self, missing: Missing) -> None:
        """Note each table's hit rate, and for which tables the request does not wait."""
        sizes = np.array([of_table.size for of_table in self._keys])
        self._hit_rates = 1.0 - missing.positions / np.maximum(sizes, 1)
        self._is_late = np.zeros(len(self._keys), dtype=np.bool_)
        if self._insert_later is not None:
            for t in np.flatnonzero(self._hit_rates >= self._settings.hit_rate_threshold).tolist():
                self._is_late[t] = self._caches[t].can_keep(missing[t].keys)

    def _queue_late(self, missing: Missing) -> None:
        """Queue missing keys of tables for which the request does not wait, for a later insertion."""
        if self._insert_later is None:
            return
        late = np.zeros(len(self._keys), dtype=np.int64)
        for t in np.flatnonzero(self._is_late).tolist():
            of_table = missing[t]
            if of_table.keys.size:
                self._insert_later(t, of_table.keys)
                late[t] = of_table.times.sum()
        if np.count_nonzero(late):
            self.late = late if self.late is None else self.late + late
            self._count_defaulted(late)

    def _rows_of(self, missing: Missing) -> list[Vectors]:
        """Read the rows of missing keys from the tiers; those for which the request does not wait are defaults."""
        keys = [missing.keys[begin:end] for begin, end in pairwise(missing.ends)]
        late = np.flatnonzero(self._is_late).tolist()
        misses = missing.times
        for t in late:
            misses[missing.ends[t] : missing.ends[t + 1]] = 0
        times = misses[misses > 0] if late else misses
        read = self._copies.read([of_table[:0] if t in late else of_table for t, of_table in enumerate(keys)], times)
        rows = list(read.rows)
        for t in late:
            table = self._caches[t].plan.table
            rows[t] = np.full((keys[t].size, table.dim), table.default_value, dtype=np.float32)
        read = replace(read, keys=keys)
        unknown = np.flatnonzero(misses)[~read.found]
        if unknown.size:
            tables = np.searchsorted(missing.ends, unknown, side="right") - 1
            self._count_defaulted(np.bincount(tables, misses[unknown], len(keys)).astype(np.uint32))
        misses[unknown] |= ABSENT
        self._reads.append(read)
        self._misses.append(misses)
        return rows
