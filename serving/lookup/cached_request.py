"""One request through the caches of a model: what they lack comes from the tiers, and its rows are completed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gpu_cache.missing import MissingKeys
from gpu_cache.workspace import Workspace
from serving.config import GpuCacheConfig
from serving.lookup.table_cache import TableCache
from serving.parameter_server.copies import ReadRows
from serving.storage.store import Keys, Vectors

T = TypeVar("T")
# Queues the workspace's launch and work that needs the rows on its stream, and returns what gives the answer
# once that has run.
Compute = Callable[[], Callable[[], T]]
# Has the rows of a table's keys inserted later; the table is told by its place. See ``Insertions.offer``.
Later = Callable[[int, Keys], None]


@dataclass(slots=True)
class _Table:
    """What one request has to do with one table.

    Attributes:
        cache: the table's.
        keys: int64[N], of the request.
        hit_rate: part of these that the cache held; 1 without keys.
        is_late: the request does not wait for the missing rows.
        late: such keys, in parts.
        reads: what was read of the missing keys, and how often each was missed.
    """

    cache: TableCache
    keys: Keys
    hit_rate: float = 1.0
    is_late: bool = False
    late: list[Keys] = field(default_factory=list)
    reads: list[tuple[ReadRows, NDArray[np.uint32]]] = field(default_factory=list)

    def must_wait(self, lacking: MissingKeys) -> bool:
        """Note what a launch missed; return whether the request waits for it."""
        if self.is_late and lacking.keys.size:
            self.late.append(lacking.keys)
        return bool(lacking.bags) and not self.is_late

    def rows_of(self, lacking: MissingKeys) -> Vectors:
        """The rows of missing keys, from the tiers; or defaults, where the request does not wait for them."""
        table = self.cache.plan.table
        if self.is_late or not lacking.keys.size:
            return np.full((lacking.keys.size, table.dim), table.default_value, dtype=np.float32)
        read = self.cache.read(lacking.keys, is_request=True)
        self.reads.append((read, lacking.times))
        return read.rows

    def unknown_keys(self) -> int:
        """How many of the request's keys no tier holds, of those that were read."""
        return self._count([read.keys[~read.found] for read, _ in self.reads])

    def late_keys(self) -> int:
        """For how many of the request's keys a default stands because their rows are late."""
        return self._count(self.late)

    def _count(self, parts: Sequence[Keys]) -> int:
        """How many of the request's keys, duplicates too, are among some distinct ones."""
        some = np.concatenate(parts) if parts else self.keys[:0]
        return int(np.count_nonzero(np.isin(self.keys, some))) if some.size else 0


class CachedRequest:
    """One request: used once, by one thread.

    In the exact mode all rows that the caches lack are read before there is an answer. In the asynchronous one those of
    a table whose cache held enough are not: they count as its default value, and are inserted later.

    Attributes:
        late_keys: for how many keys, duplicates too, a default stands though a tier may hold them; after ``answer``.
    """

    def __init__(
        self, said: GpuCacheConfig, caches: Sequence[TableCache], keys: Sequence[Keys], later: Later | None
    ) -> None:
        """Begin a request.

        Args:
            said: the mode, and when caches are given what they lacked.
            caches: by table.
            keys: of the request, by table.
            later: of the asynchronous mode; None: the mode is exact.
        """
        self.late_keys = 0
        self._said = said
        self._caches, self._keys = caches, keys
        self._later = later
        self._tables: list[_Table] = []  # none where nothing was missing, as mostly

    def answer(self, work: Workspace, compute: Compute[T]) -> tuple[T, int]:
        """Look the keys up, in bags or one by one, and compute on the rows.

        ``compute`` is called as if nothing were missing, before the host waits for the first time; where something was,
        again once the rows are there.

        Args:
            work: has loaded the request.
            compute: queues ``Workspace.launch``, or a graph of it, and what follows.

        Returns:
            the answer, and how many keys a default value stands for.

        Raises:
            StoreError: a tier did not answer, and no other holds one of the keys.
            UnknownModelError: the model has been unloaded.
        """
        finish = compute()
        missing = work.missing()
        if not missing:
            return finish(), 0
        self._tables = [_Table(cache, of_table) for cache, of_table in zip(self._caches, self._keys, strict=True)]
        self._note_hit_rates(missing)
        while self._must_wait(missing):
            work.complete([table.rows_of(one) for table, one in zip(self._tables, missing, strict=True)])
            finish = compute()
            missing = work.missing()
        self.late_keys = sum(table.late_keys() for table in self._tables)
        return finish(), self.late_keys + sum(table.unknown_keys() for table in self._tables)

    def keep(self) -> None:
        """Give the caches what they lacked, as far as that is to be."""
        for place, table in enumerate(self._tables):
            if self._later is not None:
                for keys in table.late:
                    self._later(place, keys)
            if self._said.fill == "always" or table.hit_rate < self._said.hit_rate_threshold:
                for read, misses in table.reads:
                    table.cache.keep(read, misses)

    def _note_hit_rates(self, missing: Sequence[MissingKeys]) -> None:
        """Note what the first launch found, and for which tables' rows the request does not wait."""
        for table, lacking in zip(self._tables, missing, strict=True):
            if table.keys.size:
                table.hit_rate = 1.0 - lacking.positions / table.keys.size
            if self._later is not None and table.hit_rate >= self._said.hit_rate_threshold:
                table.is_late = table.cache.can_keep(lacking.keys)

    def _must_wait(self, missing: Sequence[MissingKeys]) -> bool:
        # Each is asked, for each notes what it missed.
        return any([table.must_wait(lacking) for table, lacking in zip(self._tables, missing, strict=False)])
