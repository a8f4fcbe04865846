"""A store as one tier of a parameter server: its outages, its time budget, and the changes that it missed."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter as now_s

import numpy as np

from kernels.host import HostTable, RowDtype, fetch_tables
from serving.errors import StoreError, StoreFullError, StoreTimeoutError, StoreUnreachableError, without_frames
from serving.model.records import Combiner
from serving.parameter_server.circuit_breaker import CircuitBreaker
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.table import ServedTable
from serving.storage.row_codec import rounded
from serving.storage.store import Keys, Mask, NativeTable, RowPtrs, Store, Vectors, Weights

logger = logging.getLogger(__name__)

# A full table is offered no rows for this time: each offer costs the lookups some of the processor.
FULL_PAUSE_S = 1.0
# Keys of one call that asks whether the tier answers; smaller keys also fit tables of uint32 keys.
PROBES, PROBED_KEYS = 64, 2**31
MOST_FAILED_KEYS = 1024
NO_KEYS: Keys = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a configuration says of a tier in addition to its store.

    Attributes:
        timeout_ms: most time that a lookup waits for the tier; None: no limit.
        is_initialized: models' files are loaded into the tier; False: it keeps what it has. RAM then starts empty, and
            a store that outlives the process must have the tables.
        first_rows: which rows of the files a partial cache gets first.
        takes_copies: rows found in slower tiers are copied into this tier, if the server promotes.
    """

    timeout_ms: int | None = None
    is_initialized: bool = True
    first_rows: FirstRows = field(default_factory=FirstRows)
    takes_copies: bool = True


class Refusals:
    """The tables for which a tier takes no promoted rows; logged once when that starts and once when it ends."""

    def __init__(self, tier: str) -> None:
        """Start with no refusal."""
        self._tier = tier
        self._lock = threading.Lock()  # guards the set below
        self._refused: set[str] = set()

    def failed(self, table: str, error: StoreError) -> None:
        """Note a refusal."""
        with self._lock:
            is_new = table not in self._refused
            self._refused.add(table)
        if is_new:
            logger.warning("tier %s takes no promoted rows, table %r: %s", self._tier, table, error.reason)

    def succeeded(self, table: str) -> None:
        """Note that the tier took rows."""
        if table not in self._refused:
            return
        self.forget(table)
        logger.warning("tier %s takes promoted rows again, table %r", self._tier, table)

    def forget(self, table: str) -> None:
        """Forget a table that is no longer served."""
        with self._lock:
            self._refused.discard(table)


class Tier:
    """One store, and whether it answers and takes rows.

    Attributes:
        store: the store.
        name: the store's name.
        settings: the rest of its configuration.
    """

    def __init__(self, store: Store, depth: int, settings: TierSettings) -> None:
        """Assume that ``store`` answers; ``depth`` counts from the fastest tier, 0."""
        self.store = store
        self.settings = settings
        self.name = store.name
        self._depth = depth
        self._breaker = None if settings.timeout_ms is None else CircuitBreaker(store.name, settings.timeout_ms)
        self._silent: set[str] = set()  # tables whose last call was not answered
        self._failed_keys: dict[str, Keys] = {}  # by table: keys of the last failed call, until they are answered
        self._refusals = Refusals(store.name)
        self._beats = 0
        self._bypassed: dict[str, bool] = {}  # by table whose change it missed: whether it takes changes again
        self._paused_until_s: dict[str, float] = {}  # by full table; the promotion's thread writes it

    def fetch(self, table: ServedTable, keys: Keys) -> tuple[Vectors, Mask] | StoreError:
        """Return rows, float32[N, D], and which keys were found; or the error of a tier that did not answer."""
        return self._answer(table, keys, lambda: self._rows(table, keys))

    def fetch_tables(
        self, tables: Sequence[ServedTable], keys: Sequence[Keys]
    ) -> tuple[list[Vectors], Mask, float] | None:
        """Return rows of several tables, which keys were found, table after table, and the seconds per table.

        None: one table must be asked at a time, because not all are in native tables of RAM (see ``native_tables``).
        """
        native = self.native_tables([table.name for table in tables])
        held = [one for one in native if isinstance(one, HostTable)]
        if [one.dim for one in held] != [table.dim for table in tables]:
            return None
        started = now_s()
        rows = [np.empty((of_table.size, table.dim), np.float32) for table, of_table in zip(tables, keys, strict=True)]
        found = fetch_tables(held, keys, rows)
        return rows, found, (now_s() - started) / len(tables)

    def fetch_pooled(
        self, table: ServedTable, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None
    ) -> tuple[Vectors, Mask] | StoreError | None:
        """Return the same for ``Store.fetch_pooled``; None if the store does not pool."""
        if not self.store.pools:
            return None

        def fetch() -> tuple[Vectors, Mask]:
            # Its own array: an abandoned call still writes.
            out = np.empty((row_ptrs.size - 1, table.dim), dtype=np.float32)
            return out, self.store.fetch_pooled(table.name, keys, row_ptrs, out, combiner, weights)

        return self._answer(table, keys, fetch)

    def native_tables(self, tables: Sequence[str]) -> Sequence[NativeTable | None]:
        """See ``Store.native_tables``; None also if the tier's state of the table must be checked first."""
        if self._breaker is not None:
            return [None] * len(tables)
        try:
            native = self.store.native_tables(tables)
        except StoreError:  # ``fetch_pooled`` reports it
            return [None] * len(tables)
        if not self._bypassed and not self._silent:
            return native
        return [
            None if name in self._bypassed or name in self._silent else one
            for name, one in zip(tables, native, strict=True)
        ]

    def as_served(self, table: str, row_dtype: RowDtype, keys: Keys, rows: Vectors) -> Vectors:
        """Rows of this tier as every tier of the server returns them: rounded to ``row_dtype``, once.

        Raises:
            StoreError: a store that keeps float32 has a value that ``row_dtype`` cannot hold.
        """
        return rows if self.store.keeps_row_dtype else rounded(self.name, table, row_dtype, keys, rows)

    def write(self, table: ServedTable, write: Callable[[Store], None]) -> None:
        """Have a cache take a change that the truth has; a cache that does not take it is bypassed."""
        if not self._bypassed.get(table.name, True):
            return
        try:
            write(self.store)
        except StoreError as err:
            self._failed(table, err)
            if self.store.is_whole(table.name):  # a store with invalid parts bypasses these itself
                self.bypass(table.name)

    def bypass(self, table: str) -> None:
        """Ask the cache nothing more about the table until it is refilled."""
        self._bypassed[table] = False

    def begin_refill(self, table: str) -> bool:
        """Have a bypassed cache take changes again, while it is filled; returns whether it is bypassed.

        The caller of this and of ``end_refill`` holds the table's lock.
        """
        if table in self._bypassed:
            self._bypassed[table] = True
        return table in self._bypassed

    def end_refill(self, table: str) -> bool:
        """Ask the cache again, unless it missed another change meanwhile; returns whether it is asked."""
        if self._bypassed.get(table, False):
            del self._bypassed[table]
        return table not in self._bypassed

    def promote(self, table: ServedTable, keys: Keys, rows: Vectors) -> None:
        """Add rows that a slower tier holds, as many as there is room for; unique keys. Their lock is held."""
        added, dropped = 0, keys.size
        try:
            added, dropped = self._add_what_fits(table.name, keys, rows)
            if added:  # a tier that had nothing to take may still refuse rows
                self._refusals.succeeded(table.name)
        except StoreError as err:
            table.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._refusals.failed(table.name, err)
        table.counting.promoted(self._depth, added, dropped)

    def takes_promotions(self, table: ServedTable) -> bool:
        """Whether rows of the table may be offered; not for a while after it was full."""
        return table.name not in self._bypassed and now_s() >= self._paused_until_s.get(table.name, 0.0)

    def drop_promotion(self, table: ServedTable, rows: int) -> None:
        """Count rows that a slower tier held and that this tier is not offered."""
        table.counting.promoted(self._depth, 0, rows)

    def watch(self, tables: Sequence[ServedTable], *, is_beat: bool) -> None:
        """Ask for silent tables again, and at a beat for one more table in turn. Nothing is counted.

        So outages begin and end without requests. A tier that cannot be reached is asked once.
        """
        usable = [table for table in tables if table.name not in self._bypassed]  # a refill ends other outages
        asked = [table for table in usable if table.name in self._failed_keys]
        if is_beat and usable:
            self._beats += 1
            asked.append(usable[self._beats % len(usable)])
        for table in asked:
            # Random, and more than one: a tier may have lost some partitions and not others.
            keys = np.random.default_rng().integers(PROBED_KEYS, size=PROBES, dtype=np.int64)
            try:
                self._probe(table, keys)
            except StoreUnreachableError as err:
                for one in usable:
                    self._fell_silent(one, err)
                return
            except StoreError as err:
                self._fell_silent(table, err)
            else:
                failed_keys = self._failed_keys.get(table.name)
                if failed_keys is not None:
                    with suppress(StoreError):  # the tier is damaged in part
                        self._probe(table, failed_keys)

    def is_current(self, table: str) -> bool:
        """Whether the cache took every change of the table."""
        return table not in self._bypassed and self.store.is_whole(table)

    def could_not_fill(self, table: ServedTable, error: StoreError) -> None:
        """Note that the cache could not be filled now; the server tries again later."""
        if table.name in self._bypassed:
            self.bypass(table.name)
        self._failed(table, error)

    def was_filled(self, table: ServedTable, *, again: bool) -> None:
        """Note that the cache has the table; ``again``: it had become invalid."""
        self._answered(table, self._failed_keys.get(table.name, NO_KEYS))
        if again:
            table.counting.refilled(self._depth)

    def forget(self, table: str) -> None:
        """Forget a table that is no longer served."""
        self._bypassed.pop(table, None)
        self._silent.discard(table)
        self._failed_keys.pop(table, None)
        self._refusals.forget(table)

    def close(self) -> None:
        """Close the store."""
        if self._breaker is not None:
            self._breaker.close()
        self.store.close()

    def _add_what_fits(self, table: str, keys: Keys, rows: Vectors) -> tuple[int, int]:
        """Add rows; returns how many were added, and for how many there was no room."""
        try:
            return self.store.add(table, keys, rows), 0
        except StoreFullError:
            self._paused_until_s[table] = now_s() + FULL_PAUSE_S
            room = (self.store.capacity_rows(table) or 0) - self.store.count(table)
            if not 0 < room < keys.size:
                return 0, keys.size
            added, dropped = self._add_what_fits(table, keys[:room], rows[:room])
            return added, dropped + keys.size - room

    def _answer(
        self, table: ServedTable, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]
    ) -> tuple[Vectors, Mask] | StoreError:
        if table.name in self._bypassed:
            return StoreError(self.name, table.name, "missed a change, or was not filled yet: it is bypassed")
        started = now_s()
        try:
            answer = self._within_budget(table, keys, fetch)
        except StoreError as err:
            self._failed(table, err, keys)
            return without_frames(err)
        table.counting.fetched(self._depth, now_s() - started)
        if table.name in self._failed_keys:
            self._answered(table, keys)
        return answer

    def _within_budget(
        self, table: ServedTable, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]
    ) -> tuple[Vectors, Mask]:
        if self._breaker is None:
            return fetch()
        return self._breaker.call(table.name, fetch, lambda: self._rows(table, keys[:1]))

    def _rows(self, table: ServedTable, keys: Keys) -> tuple[Vectors, Mask]:
        rows = np.empty((keys.size, table.dim), dtype=np.float32)
        return rows, self.store.fetch(table.name, keys, rows)

    def _probe(self, table: ServedTable, keys: Keys) -> None:
        self._within_budget(table, keys, lambda: self._rows(table, keys))
        self._answered(table, keys)

    def _failed(self, table: ServedTable, error: StoreError, keys: Keys | None = None) -> None:
        """Count and note a call that was not answered; ``keys`` if it was to read rows."""
        table.counting.failed(self._depth, isinstance(error, StoreTimeoutError))
        if keys is not None:
            self._failed_keys[table.name] = keys[:MOST_FAILED_KEYS].copy()
        self._fell_silent(table, error)

    def _fell_silent(self, table: ServedTable, error: StoreError) -> None:
        self._silent.add(table.name)
        self._failed_keys.setdefault(table.name, NO_KEYS)
        table.health.tier_failed(self._depth, table.name, error)

    def _answered(self, table: ServedTable, keys: Keys) -> None:
        """Note a call that was answered. Keys of invalid parts are not found without asking: these must be filled."""
        failed_keys = self._failed_keys.get(table.name)
        if failed_keys is None or not self.store.is_whole(table.name):
            return
        self._silent.discard(table.name)
        has_recovered = bool(np.isin(failed_keys, keys).all())
        if has_recovered:
            self._failed_keys.pop(table.name, None)
        table.health.tier_answered(self._depth, table.name, has_recovered=has_recovered)
