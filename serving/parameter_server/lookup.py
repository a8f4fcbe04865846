"""How a lookup goes through the tiers: each tier is asked for the keys that the faster tiers did not find.

``look_up`` looks up rows, and ``look_up_pooled`` the bags of one table. The lookup of a request begins in
``PooledTables``, which calls them for the tables that one native call does not answer. The callers count the keys of
requests: they know whether the whole request was answered.

The last tier is the source of truth: updates go there first, so it is never behind. A key that the truth does not hold
is unknown, even if a faster tier did not answer.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from time import perf_counter as now_s

import numpy as np
from numpy.typing import NDArray

from kernels.host import HostTable, PooledLookup, fetch_tables, gather_bags, pool_rows
from serving.batch import Batch
from serving.config import ModelConfig
from serving.errors import StoreError, without_frames
from serving.model.records import Combiner
from serving.parameter_server.arguments import check_weights
from serving.parameter_server.counters import FETCH_BUCKETS_S
from serving.parameter_server.table import Table
from serving.parameter_server.tier_table import CacheTable, native_tables
from serving.stages import Stage, listener
from serving.storage.store import Keys, Mask, RowPtrs, Vectors, Weights, bags_with

NOWHERE = -1
Times = NDArray[np.uint32]
_BOUNDS_NS = [round(bound * 1e9) for bound in FETCH_BUCKETS_S]
_LINE_FLOATS = 16  # each table's vectors begin on a cache line; see ``PooledLookup``


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

    def count(self, table: Table) -> None:
        """Count the calls of the tiers, which may have ended with an error of the truth."""
        hits = np.bincount(self.depths + 1, self.times, len(self.asked_keys) + 1)
        table.counting.asked(self.asked_keys, hits.astype(np.int64, copy=False).tolist()[1:])


def look_up(
    tables: Sequence[Table], keys: Sequence[Keys], times: Times | None = None, is_request: bool = True
) -> tuple[list[Vectors], Mask]:
    """Look up rows: float32[N, D] of each table, and which keys were found, table after table.

    One call asks the first tier for all tables. If it missed a key of a table, that table is then looked up on its
    own.

    Args:
        tables: the tables.
        keys: int64[N] of each table.
        times: see ``_Search``, table after table.
        is_request: a client asked for the rows. Other reads are not counted and do not promote rows.
    """
    keys = [np.ascontiguousarray(of_table) for of_table in keys]
    if len(tables) == 1:
        of_table, are_found = _look_up_one(tables[0], keys[0], times, is_request)
        return [of_table], are_found
    ends = list(accumulate(map(len, keys), initial=0))
    counted = ends if times is None else np.concatenate([[0], np.cumsum(times, dtype=np.int64)])[ends].tolist()
    asked = [t for t, of_table in enumerate(keys) if of_table.size]
    rows: list[Vectors] = [np.empty((0, table.dim), dtype=np.float32) for table in tables]
    found: Mask = np.zeros(ends[-1], dtype=np.bool_)
    missed, seconds = set(asked), 0.0
    answer = _fetch_tables([tables[t] for t in asked], [keys[t] for t in asked]) if is_request and asked[1:] else None
    if answer is not None:
        of_tables, found, seconds = answer
        missed = set(np.searchsorted(ends[1:], np.flatnonzero(~found), side="right").tolist())
        for t, of_table in zip(asked, of_tables, strict=True):
            rows[t] = of_table
    for t in asked:
        begin, end = ends[t], ends[t + 1]
        if t in missed:
            part = None if times is None else times[begin:end]
            rows[t], found[begin:end] = _look_up_one(tables[t], keys[t], part, is_request)
        else:
            tables[t].counting.all_hit(0, counted[t + 1] - counted[t], seconds)
    return rows, found


def _look_up_one(table: Table, keys: Keys, times: Times | None, is_request: bool) -> tuple[Vectors, Mask]:
    search = _Search(keys.size, len(table.tiers), promotes=is_request, times=times)
    try:
        return _gather(table, keys, search), search.found
    finally:
        if is_request:
            search.count(table)


def look_up_pooled(
    table: Table, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None
) -> tuple[Vectors, Mask, int]:
    """See ``ParameterServer.lookup_pooled``; returns also how many keys were not found."""
    answer = table.tiers[0].fetch_pooled(keys, row_ptrs, combiner, weights)
    if isinstance(answer, tuple):
        out, found = answer
        if np.count_nonzero(found) < keys.size:
            found = _complete_pooled(table, keys, row_ptrs, combiner, weights, out, found)
            return out, found, _missed(found)
        table.counting.all_hit(0, keys.size)
        return out, found, 0
    search = _Search(keys.size, len(table.tiers))
    out = np.empty((row_ptrs.size - 1, table.dim), dtype=np.float32)
    try:
        pool_rows(_gather(table, keys, search, outage=answer), row_ptrs, out, combiner, weights)
    finally:
        search.count(table)
    return out, search.found, _missed(search.found)


def _complete_pooled(
    table: Table,
    keys: Keys,
    row_ptrs: RowPtrs,
    combiner: Combiner,
    weights: Weights | None,
    out: Vectors,
    found: Mask,
) -> Mask:
    """Pool again every bag in ``out`` with a key that the fastest tier has not ``found``; return the found keys."""
    search = _Search(keys.size, len(table.tiers))
    search.asked_keys[0] = keys.size
    search.depths[found] = 0
    try:
        if table.caches or table.default_value:
            bags, bag_ptrs, places = bags_with(row_ptrs, np.flatnonzero(~found))
            again = _Search(places.size, len(table.tiers))
            try:
                rows = _gather(table, keys[places], again)
            finally:
                search.depths[places] = again.depths
                search.asked_keys[1:] = again.asked_keys[1:]
            pooled = np.empty((bags.size, table.dim), dtype=np.float32)
            pool_rows(rows, bag_ptrs, pooled, combiner, None if weights is None else weights[places])
            out[bags] = pooled
    finally:
        search.count(table)
    return search.found


def _gather(table: Table, keys: Keys, search: _Search, outage: StoreError | None = None) -> Vectors:
    """Fetch rows from the first tier that has them, and fill in defaults; writes ``search``.

    Args:
        table: the table.
        keys: int64[N].
        search: where the keys are found.
        outage: why the first tier did not answer a moment ago; it is not asked again.

    Raises:
        StoreError: a key was not found, and the source of truth did not answer.
    """
    rows = np.full((keys.size, table.dim), table.default_value, dtype=np.float32)
    missing = np.arange(keys.size)
    takers: list[CacheTable] = []  # faster tiers that answered without the missing keys, and take copies
    version = table.clock.now()
    for depth, tier in enumerate(table.tiers):
        if not missing.size:
            break
        if depth == 0 and outage is not None:
            continue
        wanted = keys[missing]
        answer = tier.fetch(wanted)
        if isinstance(answer, StoreError):
            outage = answer
            continue
        if tier is table.truth:
            outage = None
        part, found = answer
        search.asked_keys[depth] = search.size(missing)
        hits, hit_keys, hit_rows = missing[found], wanted[found], part[found]
        rows[hits] = tier.as_served(hit_keys, hit_rows)
        search.depths[hits] = depth
        is_wanted = search.promotes and takers and hits.size
        if table.promoter and is_wanted and tier.may_be_copied:
            table.promoter.offer(takers, hit_keys, hit_rows, version)
        if isinstance(tier, CacheTable) and tier.takes_copies:
            takers = [*takers, tier]
        missing = missing[~found]
    if missing.size and outage is not None:
        raise without_frames(outage)
    return rows


def _fetch_tables(tables: Sequence[Table], keys: Sequence[Keys]) -> tuple[list[Vectors], Mask, float] | None:
    """Return rows of several tables from their first tier, which keys it held, and the seconds per table.

    None: one table must be asked at a time, because not all are in host tables.
    """
    native = native_tables([table.tiers[0] for table in tables])
    host_tables = [table for table in native if isinstance(table, HostTable)]
    if len(host_tables) < len(tables):
        return None
    started = now_s()
    rows = [np.empty((of_table.size, table.dim), np.float32) for table, of_table in zip(tables, keys, strict=True)]
    found = fetch_tables(host_tables, keys, rows)
    return rows, found, (now_s() - started) / len(tables)


def _missed(found: Mask) -> int:
    return found.size - int(np.count_nonzero(found))


class PooledTables:
    """The tables of one loaded model, looked up together. May be used from any thread.

    For bags, one native call asks the fastest tier for all tables. It finishes each table whose keys the tier all
    holds, and counts its keys. Every other table is then looked up on its own. If one of these fails, the counted keys
    are taken back.
    """

    def __init__(self, config: ModelConfig, tables: Sequence[Table]) -> None:
        """See ``ParameterServer.pooled_tables``; ``tables`` are in the order of the graph."""
        self._tables = tables
        self._fastest = [table.tiers[0] for table in self._tables]
        self._combiners = [table.combiner for table in config.tables]
        self._sizes = sizes = [(table.positions, table.dim) for table in config.tables]
        # Neighbours with the same slots and dim: how many, slots, dim. Their vectors are one array.
        self._runs = [(len(list(neighbours)), *size) for size, neighbours in groupby(sizes)]
        slots, dims = zip(*sizes, strict=True)
        self._dims = dims
        counts = [table.counting.pooled for table in tables]
        self._native = PooledLookup(dims, slots, self._combiners, counts, _BOUNDS_NS)

    def lookup_pooled(
        self, batch: Batch, weights: Sequence[Weights | None] | None = None
    ) -> tuple[tuple[NDArray[np.float32], ...], int, Sequence[tuple[int, Mask]]]:
        """Look up and pool all keys of ``batch``.

        Args:
            batch: the samples, which ``read_batch`` made for this model.
            weights: one entry per table; see ``ParameterServer.lookup_pooled``.

        Returns:
            one float32[B, S, D] per table, in graph order; how many keys got the default value; and the tables in which
            keys may have: the table's index, and found: bool[N].

        Raises:
            UnknownModelError: the model has been unloaded, or another load has taken its name.
            RequestError: an entry of ``weights`` is not float32[N].
            StoreError: a key was not found, and the truth did not answer.
        """
        self._tables[0].check_loaded()
        if weights is not None:
            weights = self._checked(batch, weights)
        native = native_tables(self._fastest)
        keys, row_ptrs, lengths = batch.joined
        began_s = now_s() if listener.stages is not None else 0.0
        if batch.bags is None:
            out, embeddings = _room(self._runs, batch.samples)
            rest = self._native.fetch(native, keys, row_ptrs, out, batch.samples, weights)
        else:  # each table has its own number of bags
            counts = [length - 1 for length in lengths]
            out, embeddings = _room([(1, *size) for size in zip(counts, self._dims, strict=True)], 1)
            rest = self._native.fetch(native, keys, row_ptrs, out, 1, weights, counts)
        if listener.stages is not None and any(table is not None for table in native):
            about: dict[str, str | int] = {"hotrow.tier": self._fastest[0].tier.name, "hotrow.keys": keys.size}
            listener.stages.append(Stage("lookup", began_s, now_s(), about))
        incomplete: list[tuple[int, Mask]] = []
        try:
            self._look_up_rest(batch, weights, rest, embeddings, incomplete)
            self._tables[0].check_loaded()
        except Exception:
            self._take_back(batch, [place for place, _ in rest])
            raise
        if batch.bags is not None:
            embeddings = self._of_samples(embeddings, batch.bags, batch.samples)
        return tuple(embeddings), self._count(incomplete), incomplete

    def lookup(self, keys: Sequence[Keys]) -> tuple[tuple[Vectors, ...], int, Sequence[tuple[int, Mask]]]:
        """Look up single keys, int64[N] of each table.

        Returns:
            float32[N, D] of each table, and the same as ``lookup_pooled``.

        Raises:
            UnknownModelError, StoreError: see ``lookup_pooled``.
        """
        self._tables[0].check_loaded()
        rows, all_found = look_up(self._tables, keys)
        self._tables[0].check_loaded()
        found = list(enumerate(np.split(all_found, list(accumulate(map(len, keys)))[:-1])))
        return tuple(rows), self._count(found), [(place, mask) for place, mask in found if not mask.all()]

    def _look_up_rest(
        self,
        batch: Batch,
        weights: Sequence[Weights | None] | None,
        rest: Sequence[tuple[int, Mask | None]],
        embeddings: list[Vectors],
        incomplete: list[tuple[int, Mask]],
    ) -> None:
        """Look up the tables that the native call has not finished; writes ``embeddings`` and ``incomplete``."""
        for place, found in rest:
            table, embedding = self._tables[place], embeddings[place]
            asked = (*batch.tables[place], self._combiners[place], None if weights is None else weights[place])
            if found is None:
                pooled, found, _ = look_up_pooled(table, *asked)
                embeddings[place] = pooled.reshape(embedding.shape)
            else:
                found = _complete_pooled(table, *asked, embedding.reshape(-1, table.dim), found)
            incomplete.append((place, found))

    def _count(self, answered: Sequence[tuple[int, Mask]]) -> int:
        """Count the keys of tables, given by place and found keys; returns how many keys got the default value."""
        defaulted_keys = 0
        for place, found in answered:
            of_table = _missed(found)
            self._tables[place].counting.answered(found.size, of_table)
            defaulted_keys += of_table
        return defaulted_keys

    def _take_back(self, batch: Batch, rest: Sequence[int]) -> None:
        for place, of_table in enumerate(batch.tables):
            if place not in rest:
                self._tables[place].counting.answered(-of_table.keys.size, 0)  # counted by the native call

    def _of_samples(
        self, pooled: Sequence[Vectors], bags: Sequence[NDArray[np.int32] | None], samples: int
    ) -> list[Vectors]:
        """Return the vectors of each slot of each sample, from those of the bags."""
        _, embeddings = _room(self._runs, samples)
        shared = []
        for place, (of_table, bag) in enumerate(zip(pooled, bags, strict=True)):
            if bag is None:
                embeddings[place] = of_table.reshape(embeddings[place].shape)
            else:
                dim = self._dims[place]
                shared.append((of_table.reshape(-1, dim), bag, embeddings[place].reshape(-1, dim)))
        if shared:
            gather_bags(*zip(*shared, strict=True))
        return embeddings

    def _checked(self, batch: Batch, weights: Sequence[Weights | None]) -> list[Weights | None]:
        for table, of_table, given in zip(self._tables, batch.tables, weights, strict=True):
            if given is not None:
                check_weights(table.name, of_table.keys, given)
        return [None if given is None else np.ascontiguousarray(given) for given in weights]


def _room(runs: Sequence[tuple[int, int, int]], samples: int) -> tuple[NDArray[np.float32], list[Vectors]]:
    """Return memory for the vectors of all tables, and each table's part of it.

    ``runs``: how many neighbours have the same slots and dim, the slots, and the dim.
    """
    parts_of_runs = []
    last = 0
    for count, slots, dim in runs:
        used = samples * slots * dim
        size = -(-used // _LINE_FLOATS) * _LINE_FLOATS
        first, last = last, last + count * size
        parts_of_runs.append((first, last, size, used, (count, samples, slots, dim)))
    out = np.empty(last, np.float32)
    parts: list[Vectors] = []
    for first, last, size, used, shape in parts_of_runs:
        run = out[first:last]
        parts.extend((run if size == used else run.reshape(-1, size)[:, :used]).reshape(shape))
    return out, parts
