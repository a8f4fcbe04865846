"""One request through the caches of a model: rows that the caches miss are read from the tiers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpu_cache.missing import MissingKeys
from serving.config import GpuCacheConfig
from serving.lookup.device_workspace import DeviceWorkspace
from serving.lookup.table_cache import TableCache
from serving.parameter_server.copies import ReadRows
from serving.storage.store import Keys, Vectors

# Queues keys of a table, given by its index, for a later insertion. See ``InsertQueue.offer``.
Later = Callable[[int, Keys], None]


@dataclass(slots=True)
class _Table:
    """One request's keys of one table.

    Attributes:
        cache: the table's cache.
        keys: int64[N], the request's keys.
        hit_rate: part of these keys that the cache held; 1 without keys.
        is_late: the request does not wait for missing rows.
        late: missing keys that the request did not wait for, in parts.
        reads: rows that were read for missing keys, and how often each key was missed.
    """

    cache: TableCache
    keys: Keys
    hit_rate: float = 1.0
    is_late: bool = False
    late: list[Keys] = field(default_factory=list)
    reads: list[tuple[ReadRows, NDArray[np.uint32]]] = field(default_factory=list)

    def must_wait(self, missed: MissingKeys) -> bool:
        """Note which keys a launch missed; return whether the request waits for their rows."""
        if self.is_late and missed.keys.size:
            self.late.append(missed.keys)
        return bool(missed.bags) and not self.is_late

    def rows_of(self, missed: MissingKeys) -> Vectors:
        """Read the rows of missing keys from the tiers, or return defaults if the request does not wait for them."""
        table = self.cache.plan.table
        if self.is_late or not missed.keys.size:
            return np.full((missed.keys.size, table.dim), table.default_value, dtype=np.float32)
        read = self.cache.read(missed.keys, is_request=True)
        self.reads.append((read, missed.times))
        return read.rows

    def unknown_keys(self) -> int:
        """Return how many of the request's keys were read and found in no tier."""
        return self._count([read.keys[~read.found] for read, _ in self.reads])

    def late_keys(self) -> int:
        """Return how many of the request's keys got a default because the request did not wait."""
        return self._count(self.late)

    def _count(self, parts: Sequence[Keys]) -> int:
        """Return how many of the request's keys, with duplicates, are among the distinct keys of ``parts``."""
        some = np.concatenate(parts) if parts else self.keys[:0]
        return int(np.count_nonzero(np.isin(self.keys, some))) if some.size else 0


class CachedRequest:
    """One request, which a workspace has loaded; used once, by one thread.

    In the exact mode the request waits for all rows that the caches miss. In the asynchronous mode it does not wait for
    a table whose hit rate was high enough: the missing rows count as the default value and are inserted later.

    Attributes:
        work: the request's buffers. The caller queues their first launch.
    """

    def __init__(
        self,
        settings: GpuCacheConfig,
        caches: Sequence[TableCache],
        keys: Sequence[Keys],
        work: DeviceWorkspace,
        later: Later | None,
    ) -> None:
        """Begin a request for ``keys``, with one entry per table; ``later`` is None in the exact mode."""
        self.work = work
        self._settings = settings
        self._caches, self._keys = caches, keys
        self._later = later
        self._tables: list[_Table] = []  # stays empty if nothing is missing, the common case

    def complete(self) -> bool:
        """Wait for the last launch. If it missed rows that the request waits for, read and queue them, and return True.

        Call it until it returns False. Work that needs the rows must be queued again each time that it returns True.

        Raises:
            StoreError: a tier did not answer, and no other tier holds one of the keys.
            DeviceFaultError: work on the device failed.
        """
        missing = self.work.pooling.missing()
        if missing and not self._tables:
            self._tables = [_Table(cache, of_table) for cache, of_table in zip(self._caches, self._keys, strict=True)]
            self._note_hit_rates(missing)
        if not self._must_wait(missing):
            return False
        self.work.pooling.complete([table.rows_of(one) for table, one in zip(self._tables, missing, strict=True)])
        return True

    def rows(self) -> tuple[Vectors, ...]:
        """Look the loaded keys up, and return the rows on the host."""
        self.work.pooling.launch()
        self.work.queue_rows()
        while self.complete():
            self.work.queue_rows()
        return self.work.rows()

    @property
    def late_keys(self) -> int:
        """How many keys, with duplicates, got a default although a tier may hold them."""
        return sum(table.late_keys() for table in self._tables)

    @property
    def defaulted_keys(self) -> int:
        """How many keys, with duplicates, got a default."""
        return self.late_keys + sum(table.unknown_keys() for table in self._tables)

    def keep(self) -> None:
        """Insert the missed rows into the caches, now or later, where the configuration asks for it."""
        for place, table in enumerate(self._tables):
            if self._later is not None:
                for keys in table.late:
                    self._later(place, keys)
            if self._settings.fill == "always" or table.hit_rate < self._settings.hit_rate_threshold:
                for read, misses in table.reads:
                    table.cache.keep(read, misses)

    def _note_hit_rates(self, missing: Sequence[MissingKeys]) -> None:
        """Note each table's hit rate, and for which tables the request does not wait."""
        for table, missed in zip(self._tables, missing, strict=True):
            if table.keys.size:
                table.hit_rate = 1.0 - missed.positions / table.keys.size
            if self._later is not None and table.hit_rate >= self._settings.hit_rate_threshold:
                table.is_late = table.cache.can_keep(missed.keys)

    def _must_wait(self, missing: Sequence[MissingKeys]) -> bool:
        # A list, not a generator: every table must note which keys it missed.
        return any([table.must_wait(missed) for table, missed in zip(self._tables, missing, strict=False)])
