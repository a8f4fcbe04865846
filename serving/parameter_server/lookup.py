"""How a lookup goes through the tiers: each tier is asked for the keys that the faster tiers did not find.

The last tier is the source of truth: updates go there first, so it is never behind. A key that the truth does not hold
is unknown, even if a faster tier did not answer.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from time import perf_counter as now_s

import numpy as np
from numpy.typing import NDArray

from kernels.host import HostTable, fetch_tables, pool_rows
from serving.errors import StoreError, without_frames
from serving.model.records import Combiner
from serving.parameter_server.promotion import Promoter
from serving.parameter_server.table import Table
from serving.parameter_server.tier_table import CacheTable
from serving.storage.store import Keys, Mask, RowPtrs, Vectors, Weights, bags_with

NOWHERE = -1
Times = NDArray[np.uint32]


class _Search:
    """Where the keys of one lookup were found.

    Attributes:
        depths: int8[N], by key: the tier that held it, counted from the fastest, or NOWHERE.
        asked_keys: by tier, how many keys it was asked for, in calls that it answered.
        promotes: rows of slower tiers are offered to the faster tiers.
        times: for each key, how many keys of the request it stands for; None: each stands for itself.
    """

    __slots__ = ("asked_keys", "depths", "promotes", "times")

    def __init__(self, keys: int, tiers: int, promotes: bool = True, times: Times | None = None) -> None:
        self.promotes = promotes
        self.times = times
        self.depths: NDArray[np.int8] = np.full(keys, NOWHERE, dtype=np.int8)
        self.asked_keys = [0] * tiers

    @property
    def found(self) -> Mask:
        found: Mask = self.depths != NOWHERE
        return found

    def size(self, places: NDArray[np.intp]) -> int:
        """How many keys of the request the keys at ``places`` stand for."""
        return places.size if self.times is None else int(self.times[places].sum())

    def count(self, held: Table) -> None:
        """Count the calls of the tiers, which may have ended with an error of the truth."""
        hits = np.bincount(self.depths + 1, self.times, len(self.asked_keys) + 1)
        held.counting.asked(self.asked_keys, hits.astype(np.int64, copy=False).tolist()[1:])


class TierLookup:
    """Looks keys up in ordered tiers, and counts the tiers' calls. Every method may be called from any thread.

    The callers count the keys of requests: they know whether the whole request was answered.
    """

    def __init__(self, promoter: Promoter | None) -> None:
        """``promoter`` gets the rows that faster tiers do not have."""
        self._promoter = promoter

    def rows(
        self, held: Table, keys: Keys, is_request: bool = True, times: Times | None = None
    ) -> tuple[Vectors, Mask]:
        """See ``ParameterServer.lookup``.

        Args:
            held: the table.
            keys: int64[N].
            is_request: a client asked for the rows. Other reads are not counted and do not promote rows.
            times: see ``_Search``.
        """
        search = _Search(keys.size, len(held.tiers), promotes=is_request, times=times)
        if not is_request:
            return self._gather(held, keys, search), search.found
        try:
            return self._gather(held, keys, search), search.found
        finally:
            search.count(held)

    def rows_of_tables(
        self, held: Sequence[Table], keys: Sequence[Keys], times: Times | None = None
    ) -> tuple[list[Vectors], Mask]:
        """Look up rows of several tables: float32[N, D] of each, and which keys were found, table after table.

        One call asks the first tier for all tables. A table of which it missed a key is then looked up on its own.

        Args:
            held: the tables.
            keys: int64[N] of each table.
            times: see ``_Search``, table after table.
        """
        asked = [t for t, of_table in enumerate(keys) if of_table.size]
        if len(asked) < len(held):
            rows = [np.empty((0, table.dim), dtype=np.float32) for table in held]
            found = np.empty(0, dtype=np.bool_)
            if asked:
                given, found = self.rows_of_tables([held[t] for t in asked], [keys[t] for t in asked], times)
                for t, of_rows in zip(asked, given, strict=True):
                    rows[t] = of_rows
            return rows, found
        answer = _fetch_tables(held, keys)
        ends = list(accumulate(map(len, keys), initial=0))
        parts = [None if times is None else times[begin:end] for begin, end in pairwise(ends)]
        if answer is None:
            each = zip(held, keys, parts, strict=True)
            answers = [self.rows(table, of_table, times=part) for table, of_table, part in each]
            return [rows for rows, _ in answers], np.concatenate([found for _, found in answers])
        rows, found, seconds = answer
        sizes = np.diff(ends) if times is None else np.add.reduceat(times, ends[:-1], dtype=np.int64)
        missed = set(np.searchsorted(ends[1:], np.flatnonzero(~found), side="right").tolist())
        for t, (table, size) in enumerate(zip(held, sizes.tolist(), strict=True)):
            if t in missed:
                rows[t], found[ends[t] : ends[t + 1]] = self.rows(table, keys[t], times=parts[t])
            else:
                table.counting.all_hit(0, size, seconds)
        return rows, found

    def pooled(
        self, held: Table, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None
    ) -> tuple[Vectors, Mask]:
        """See ``ParameterServer.lookup_pooled``."""
        answer = held.tiers[0].fetch_pooled(keys, row_ptrs, combiner, weights)
        if isinstance(answer, tuple):
            out, found = answer
            if np.count_nonzero(found) < keys.size:
                return out, self.complete(held, keys, row_ptrs, combiner, weights, out, found)
            held.counting.all_hit(0, keys.size)
            return answer
        search = _Search(keys.size, len(held.tiers))
        out = np.empty((row_ptrs.size - 1, held.dim), dtype=np.float32)
        try:
            pool_rows(self._gather(held, keys, search, outage=answer), row_ptrs, out, combiner, weights)
        finally:
            search.count(held)
        return out, search.found

    def complete(
        self,
        held: Table,
        keys: Keys,
        row_ptrs: RowPtrs,
        combiner: Combiner,
        weights: Weights | None,
        out: Vectors,
        found: Mask,
    ) -> Mask:
        """Pool again every bag in ``out`` with a key that the fastest tier has not ``found``; return the found keys."""
        search = _Search(keys.size, len(held.tiers))
        search.asked_keys[0] = keys.size
        search.depths[found] = 0
        try:
            if held.caches or held.default_value:
                self._pool_again(held, keys, row_ptrs, out, combiner, weights, search)
        finally:
            search.count(held)
        return search.found

    def _gather(self, held: Table, keys: Keys, search: _Search, outage: StoreError | None = None) -> Vectors:
        """Fetch rows from the first tier that has them, and fill in defaults; writes ``search``.

        Args:
            held: the table.
            keys: int64[N].
            search: where the keys are found.
            outage: why the first tier did not answer a moment ago; it is not asked again.

        Raises:
            StoreError: a key was not found, and the source of truth did not answer.
        """
        rows = np.full((keys.size, held.dim), held.default_value, dtype=np.float32)
        missing = np.arange(keys.size)
        takers: list[CacheTable] = []  # faster tiers that answered without the missing keys, and take copies
        version = held.clock.now()
        for depth, tier in enumerate(held.tiers):
            if not missing.size:
                break
            if depth == 0 and outage is not None:
                continue
            wanted = keys[missing]
            answer = tier.fetch(wanted)
            if isinstance(answer, StoreError):
                outage = answer
                continue
            if tier is held.truth:
                outage = None
            part, found = answer
            search.asked_keys[depth] = search.size(missing)
            hits, hit_keys, hit_rows = missing[found], wanted[found], part[found]
            rows[hits] = tier.as_served(hit_keys, hit_rows)
            search.depths[hits] = depth
            is_wanted = search.promotes and takers and hits.size
            if self._promoter and is_wanted and tier.may_be_copied:
                self._promoter.offer(held, takers, hit_keys, hit_rows, version)
            if isinstance(tier, CacheTable) and tier.tier.settings.takes_copies:
                takers = [*takers, tier]
            missing = missing[~found]
        if missing.size and outage is not None:
            raise without_frames(outage)
        return rows

    def _pool_again(
        self,
        held: Table,
        keys: Keys,
        row_ptrs: RowPtrs,
        out: Vectors,
        combiner: Combiner,
        weights: Weights | None,
        search: _Search,
    ) -> None:
        """Pool every bag again that has a key which is NOWHERE in ``search``; writes ``out`` and ``search``."""
        bags, bag_ptrs, places = bags_with(row_ptrs, np.flatnonzero(search.depths == NOWHERE))
        again = _Search(places.size, len(held.tiers))
        try:
            rows = self._gather(held, keys[places], again)
        finally:
            search.depths[places] = again.depths
            search.asked_keys[1:] = again.asked_keys[1:]
        pooled = np.empty((bags.size, held.dim), dtype=np.float32)
        pool_rows(rows, bag_ptrs, pooled, combiner, None if weights is None else weights[places])
        out[bags] = pooled


def _fetch_tables(tables: Sequence[Table], keys: Sequence[Keys]) -> tuple[list[Vectors], Mask, float] | None:
    """Return rows of several tables from their first tier, which keys it held, and the seconds per table.

    None: one table must be asked at a time, because not all are in host tables.
    """
    native = [table.tiers[0].native for table in tables]
    held = [one for one in native if isinstance(one, HostTable)]
    if len(held) < len(tables):
        return None
    started = now_s()
    rows = [np.empty((of_table.size, table.dim), np.float32) for table, of_table in zip(tables, keys, strict=True)]
    found = fetch_tables(held, keys, rows)
    return rows, found, (now_s() - started) / len(tables)
