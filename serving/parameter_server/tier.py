"""A store as one tier of a parameter server: its outages, its time budget, and the changes that it missed."""

import logging
import threading
from collections.abc import Callable, Sequence
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


class Outages:
    """The tables for which a tier fails at one task; logged once when an outage starts and once when it ends.

    Outages are kept by table, because one table may be damaged and another may not. An outage is logged once more where
    the tier could not be reached and is then reached but fails, or the reverse: these are two different faults.
    """

    def __init__(self, tier: str, fails: str, succeeds: str) -> None:
        """Start with no outage; the log says that ``tier`` ``fails`` or ``succeeds``."""
        self._starts, self._ends = f"tier {tier} {fails}, table %r: %s", f"tier {tier} {succeeds} again, table %r"
        self._lock = threading.Lock()  # one ``failed`` at a time
        self._failing: dict[str, set[bool]] = {}  # by table: for each logged failure, whether the tier was reached

    def __contains__(self, table: str) -> bool:
        """Whether the table has an outage now."""
        return table in self._failing

    def __bool__(self) -> bool:
        """Whether any table has an outage now."""
        return bool(self._failing)

    def failed(self, table: str, error: StoreError) -> None:
        """Note a failure."""
        was_reached = not isinstance(error, StoreUnreachableError)
        with self._lock:
            logged = self._failing.setdefault(table, set())
            is_new = was_reached not in logged
            logged.add(was_reached)
        if is_new:
            logger.warning(self._starts, table, error.reason)

    def succeeded(self, table: str) -> None:
        """Note a success."""
        if table in self._failing and self._failing.pop(table, set()):  # another thread may be first
            logger.warning(self._ends, table)

    def forget(self, table: str) -> None:
        """Forget a table that is no longer served."""
        self._failing.pop(table, None)


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
        self._silence = Outages(store.name, "does not answer", "answers")
        self._refusal = Outages(store.name, "takes no promoted rows", "takes promoted rows")
        self._bypassed: dict[str, bool] = {}  # by table whose change it missed: whether it takes changes again
        self._paused_until_s: dict[str, float] = {}  # by full table; the promotion's thread writes it

    def fetch(self, table: ServedTable, keys: Keys) -> tuple[Vectors, Mask] | StoreError:
        """Return rows, float32[N, D], and which keys were found; or the error of a tier that did not answer."""

        def fetch() -> tuple[Vectors, Mask]:
            rows = np.empty((keys.size, table.dim), dtype=np.float32)
            return rows, self.store.fetch(table.name, keys, rows)

        return self._answer(table, keys, fetch)

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
        if not self._bypassed and not self._silence:
            return native
        return [
            None if name in self._bypassed or name in self._silence else one
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
            table.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._silence.failed(table.name, err)
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
                self._refusal.succeeded(table.name)
        except StoreError as err:
            table.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._refusal.failed(table.name, err)
        table.counting.promoted(self._depth, added, dropped)

    def takes_promotions(self, table: ServedTable) -> bool:
        """Whether rows of the table may be offered; not for a while after it was full."""
        return table.name not in self._bypassed and now_s() >= self._paused_until_s.get(table.name, 0.0)

    def drop_promotion(self, table: ServedTable, rows: int) -> None:
        """Count rows that a slower tier held and that this tier is not offered."""
        table.counting.promoted(self._depth, 0, rows)

    def is_silent(self, table: str) -> bool:
        """Whether the last request about the table got no answer."""
        return table in self._silence

    def is_current(self, table: str) -> bool:
        """Whether the cache took every change of the table."""
        return table not in self._bypassed and self.store.is_whole(table)

    def could_not_fill(self, table: ServedTable, error: StoreError) -> None:
        """Note that the cache could not be filled now; the server tries again later."""
        if table.name in self._bypassed:
            self.bypass(table.name)
        table.counting.failed(self._depth, isinstance(error, StoreTimeoutError))
        self._silence.failed(table.name, error)

    def was_filled(self, table: ServedTable, *, again: bool) -> None:
        """Note that the cache has the table; ``again``: it had become invalid."""
        self._silence.succeeded(table.name)
        if again:
            table.counting.refilled(self._depth)

    def forget(self, table: str) -> None:
        """Forget a table that is no longer served."""
        self._bypassed.pop(table, None)
        for outages in (self._silence, self._refusal):
            outages.forget(table)

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
            answer = fetch() if self._breaker is None else self._within_budget(self._breaker, table, keys, fetch)
        except StoreError as err:
            table.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._silence.failed(table.name, err)
            return without_frames(err)
        table.counting.fetched(self._depth, now_s() - started)
        # Keys of invalid parts are not found without asking, so an outage of these ends when they are filled.
        if table.name in self._silence and self.store.is_whole(table.name):
            self._silence.succeeded(table.name)
        return answer

    def _within_budget(
        self, breaker: CircuitBreaker, table: ServedTable, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]
    ) -> tuple[Vectors, Mask]:
        def probe() -> None:
            self.store.fetch(table.name, keys[:1], np.empty((min(keys.size, 1), table.dim), dtype=np.float32))

        return breaker.call(table.name, fetch, probe)
