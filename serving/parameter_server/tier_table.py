"""A store as one tier, and one table in it: whether it answers, and, in a cache, whether its rows may be trusted."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter as now_s
from typing import TYPE_CHECKING

import numpy as np

from serving.errors import StoreError, StoreFullError, StoreTimeoutError, StoreUnreachableError, without_frames
from serving.model.records import Combiner
from serving.parameter_server.cache_state import CacheState
from serving.parameter_server.circuit_breaker import CircuitBreaker
from serving.parameter_server.first_rows import FirstRows
from serving.stages import Stage, listener
from serving.storage import SnapshotStore
from serving.storage.row_codec import may_be_copied, rounded
from serving.storage.store import (
    Keys,
    LastingStore,
    LastingTable,
    Mask,
    NativeTable,
    RowPtrs,
    Store,
    StoreTable,
    Vectors,
    Weights,
)
from serving.storage.tables import LocalTable

if TYPE_CHECKING:
    from serving.parameter_server.table import Table

logger = logging.getLogger(__name__)

# A full table is offered no rows for this time: each offer costs the lookups some of the processor.
FULL_PAUSE_S = 1.0
# Keys of one call that asks whether the tier answers; smaller keys also fit tables of uint32 keys.
PROBES, PROBED_KEYS = 64, 2**31
MOST_FAILED_KEYS = 1024
NO_KEYS: Keys = np.empty(0, dtype=np.int64)
# The pause after a failed attempt to fill a cache, doubled from the first to the last.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
# A cache that loses rows again and again spends at most a fifth of the time being filled.
REST_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a configuration says of a tier in addition to its store.

    Attributes:
        timeout_ms: maximum time that a lookup waits for the tier; None: no limit.
        fills_at_start: models' files are loaded into the tier; False: it keeps what it has. RAM then starts empty, and
            a store that outlives the process must have the tables.
        first_rows: which rows of the files a partial cache gets first.
        takes_copies: rows found in slower tiers are copied into this tier, if the server promotes.
    """

    timeout_ms: int | None = None
    fills_at_start: bool = True
    first_rows: FirstRows = field(default_factory=FirstRows)
    takes_copies: bool = True


class Tier:
    """One store, and what all its tables share.

    Attributes:
        store: the store.
        name: the store's name.
        depth: counts from the fastest tier, 0.
        settings: the rest of its configuration.
        breaker: ends calls that take too long; None: no call has a limit.
    """

    def __init__(self, store: Store, depth: int, settings: TierSettings) -> None:
        """Assume that ``store`` answers."""
        self.store = store
        self.name = store.name
        self.depth = depth
        self.settings = settings
        self.breaker = None if settings.timeout_ms is None else CircuitBreaker(store.name, settings.timeout_ms)
        self._beats = 0

    @property
    def is_in_process(self) -> bool:
        """Whether the rows are in this process's memory only."""
        return not isinstance(self.store, LastingStore | SnapshotStore)

    def watch(self, tables: "Sequence[TierTable]", *, is_beat: bool) -> None:
        """Probe the silent tables of this tier and, if ``is_beat``, one more table in turn. Probes are not counted.

        So outages begin and end without requests. A tier that cannot be reached is asked once.
        """
        usable = [table for table in tables if table.is_asked]  # a refill ends other outages
        asked = [table for table in usable if table.is_failing]
        if is_beat and usable:
            self._beats += 1
            asked.append(usable[self._beats % len(usable)])
        for table in asked:
            try:
                table.probe()
            except StoreUnreachableError as err:
                for other in usable:
                    other.fell_silent(err)
                return
            except StoreError as err:
                table.fell_silent(err)

    def close(self) -> None:
        """Close the store."""
        if self.breaker is not None:
            self.breaker.close()
        self.store.close()


class TierTable:
    """One table in one tier; the source of truth and the caches are subclasses.

    Attributes:
        tier: the tier.
        table: the table.
        stored: the table in the tier's store.
        lasting: ``stored``, if its rows outlive the process.
        is_asked: lookups may ask the tier. An attribute, because every request reads it once for each table.
        is_silent: the last call was not answered.
    """

    def __init__(self, tier: Tier, table: "Table") -> None:
        """Assume that the tier answers; contacts no tier.

        Raises:
            StoreError: the store is closed, or cannot hold rows of this row type.
        """
        self.tier = tier
        self.table = table
        self.stored = stored = tier.store.table(table.spec)
        self.lasting = stored if isinstance(stored, LastingTable) else None
        self._pooling = stored if isinstance(stored, LocalTable) else None
        self.is_asked = True
        self.is_silent = False
        self._failed_keys: Keys | None = None  # of the last failed call, until they are answered

    @property
    def is_failing(self) -> bool:
        """Whether keys of a failed call have not been answered since."""
        return self._failed_keys is not None

    @property
    def may_be_copied(self) -> bool:
        """Whether other tiers may keep its rows as they are, without rounding them twice."""
        return may_be_copied(self.tier.store, self.table.spec.row_dtype)

    def fetch(self, keys: Keys) -> tuple[Vectors, Mask] | StoreError:
        """Return rows, float32[N, D], and which keys were found; or the error of a tier that did not answer."""
        return self._answer(keys, lambda: self._rows(keys))

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None
    ) -> tuple[Vectors, Mask] | StoreError | None:
        """Return the same for ``LocalTable.fetch_pooled``; None if the store does not pool."""
        pooling = self._pooling
        if pooling is None:
            return None

        def fetch() -> tuple[Vectors, Mask]:
            # Its own array: an abandoned call still writes.
            out = np.empty((row_ptrs.size - 1, self.table.dim), dtype=np.float32)
            return out, pooling.fetch_pooled(keys, row_ptrs, out, combiner, weights)

        return self._answer(keys, fetch)

    def as_served(self, keys: Keys, rows: Vectors) -> Vectors:
        """Rows of this tier as every tier of the server returns them: rounded to the table's row type, once.

        Raises:
            StoreError: a store that keeps float32 has a value that the row type cannot hold.
        """
        if self.tier.store.keeps_row_dtype:
            return rows
        return rounded(self.tier.name, self.table.name, self.table.spec.row_dtype, keys, rows)

    def probe(self) -> None:
        """Ask whether the tier answers; see ``Tier.watch``.

        Raises:
            StoreError: it does not.
        """
        # Random, and more than one: a tier may have lost some partitions and not others.
        self._probe(np.random.default_rng().integers(PROBED_KEYS, size=PROBES, dtype=np.int64))
        if self._failed_keys is not None:
            with suppress(StoreError):  # the tier is damaged in part
                self._probe(self._failed_keys)

    def failed(self, error: StoreError, keys: Keys | None = None) -> None:
        """Count and note a call that was not answered; ``keys`` if it was to read rows."""
        self.table.counting.failed(self.tier.depth, isinstance(error, StoreTimeoutError))
        if keys is not None:
            self._failed_keys = keys[:MOST_FAILED_KEYS].copy()
        self.fell_silent(error)

    def fell_silent(self, error: StoreError) -> None:
        """Note a call that was not answered; the stores of a table that was unloaded refuse every call."""
        if self.table.clock.is_gone:
            return
        self.is_silent = True
        if self._failed_keys is None:
            self._failed_keys = NO_KEYS
        self.table.health.tier_failed(self, error)

    def _answer(self, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]) -> tuple[Vectors, Mask] | StoreError:
        if not self.is_asked:
            reason = "missed a write, or was not filled yet: it is bypassed"
            return StoreError(self.tier.name, self.table.name, reason)
        started = now_s()
        try:
            answer = self._within_budget(keys, fetch)
        except StoreError as err:
            self._note(started, now_s(), keys, err)
            self.table.check_loaded()
            self.failed(err, keys)
            return without_frames(err)
        ended = now_s()
        self.table.counting.fetched(self.tier.depth, ended - started)
        self._note(started, ended, keys)
        if self._failed_keys is not None:
            self._answered(keys)
        return answer

    def _note(self, began_s: float, ended_s: float, keys: Keys, error: StoreError | None = None) -> None:
        """Note a call for the trace of its request."""
        if listener.stages is not None:
            about: dict[str, str | int] = {"hotrow.tier": self.tier.name, "hotrow.table": self.table.name}
            about["hotrow.keys"] = keys.size
            if error is not None:
                about["exception.message"] = str(error)
            listener.stages.append(Stage("lookup", began_s, ended_s, about))

    def _within_budget(self, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]) -> tuple[Vectors, Mask]:
        if self.tier.breaker is None:
            return fetch()
        return self.tier.breaker.call(self.table.name, fetch, lambda: self._rows(keys[:1]))

    def _rows(self, keys: Keys) -> tuple[Vectors, Mask]:
        rows = np.empty((keys.size, self.table.dim), dtype=np.float32)
        return rows, self.stored.fetch(keys, rows)

    def _probe(self, keys: Keys) -> None:
        self._within_budget(keys, lambda: self._rows(keys))
        self._answered(keys)

    def _answered(self, keys: Keys) -> None:
        """Note a call that was answered. Keys of invalid parts are not found without asking: these must be filled."""
        failed_keys = self._failed_keys
        if failed_keys is None or (self.lasting is not None and not self.lasting.is_whole):
            return
        self.is_silent = False
        if np.isin(failed_keys, keys).all():  # a tier may be damaged in part
            self._failed_keys = None
            self.table.health.tier_recovered(self)


class CacheTable(TierTable):
    """A table in a cache.

    Attributes:
        state: whether its rows may be trusted; changed while the lock of the table's clock is held.
        may_refill: it is refilled if it becomes invalid; False: it keeps what it has.
        is_filled: it has had the table's rows since the model was loaded.
        removed_keys: keys that were removed since the load, while the cache waits for its first fill; None: it does not
            wait. The lock of the table's clock guards it.
    """

    def __init__(self, tier: Tier, table: "Table") -> None:
        """Begin in the state LOADING."""
        super().__init__(tier, table)
        self.state = CacheState.LOADING
        self.is_asked = False
        self.may_refill = self.lasting is None or tier.settings.fills_at_start
        self.is_filled = False
        self.removed_keys: set[int] | None = None
        self._due_at_s = 0.0  # when it may be filled again
        self._pause_s = 0.0  # how long it rests if that fails
        self._paused_until_s = 0.0  # until then it is offered no rows; only the promotion's thread writes it
        self._refuses_promotions = False

    @property
    def is_current(self) -> bool:
        """Whether the cache took every change of the table."""
        return self.is_asked and (self.lasting is None or self.lasting.is_whole)

    def become(self, state: CacheState) -> None:
        """Change the state; the lock of the table's clock is held."""
        if not self.state.may_become(state):
            raise ValueError(f"{self.tier.name}, table {self.table.name!r}: {self.state.name} -> {state.name}")
        self.state = state
        self.is_asked = state is CacheState.SERVING

    def begin_service(self, *, is_current: bool = True) -> None:
        """End the load; ``is_current``: the cache has every write, or knows itself which of its parts are invalid."""
        with self.table.clock.lock:
            self.become(CacheState.SERVING if is_current else CacheState.INVALID)

    def missed_write(self) -> None:
        """Bypass the cache until it is refilled. The lock of the table's clock is held."""
        if self.state is not CacheState.INVALID:
            self.become(CacheState.INVALID)

    def write_flags(self) -> None:
        """Note in a cache that outlives the process that rows change; see ``write``."""
        if self.lasting is not None and self.state.takes_writes:
            lasting = self.lasting
            self._take(lambda: lasting.write_flags(changed=True))

    def write(self, keys: Keys, rows: Vectors | None) -> None:
        """Have the cache take a change that the truth has; a cache that does not take it is bypassed.

        Args:
            keys: int64[N].
            rows: float32[N, D]; None: the keys are removed.
        """
        if self.state.takes_writes:
            self._take(lambda: self.stored.evict(keys) if rows is None else _overwrite(self.stored, keys, rows))

    def refill_if_due(self) -> None:
        """Fill the cache if it is invalid and has rested after the last attempt."""
        began = now_s()
        if not self.may_refill or self.is_current or self.table.clock.is_gone or began < self._due_at_s:
            return
        try:
            self.fill()
        except Exception as err:  # the other caches must still be filled
            if isinstance(err, StoreError):
                self.failed(err)
            else:
                logger.exception("tier %s cannot be filled, table %r", self.tier.name, self.table.name)
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._due_at_s = now_s() + self._pause_s
        else:
            self._pause_s = 0.0
            self._due_at_s = now_s() + REST_RATIO * (now_s() - began)

    def fill(self) -> None:
        """Bring the cache up to the truth; one thread at a time. An invalid cache stays invalid if this fails.

        Raises:
            StoreError: see ``LastingTable.fill``.
        """
        truth, settings, lock, was_written = self.table.truth, self.tier.settings, self.table.clock.lock, True
        with lock:
            was_invalid = self.state is CacheState.INVALID  # else it is loaded, or fills its invalid parts itself
            if was_invalid:
                self.become(CacheState.REFILLING)  # it takes writes again
        try:
            if self.lasting is not None:
                was_written = self.lasting.fill(truth, starting=was_invalid or not self.is_filled)
            else:
                first_rows = settings.first_rows if settings.fills_at_start else FirstRows(cache_rate=0.0)
                truth.copy_to(self.stored, first_rows)
        except BaseException:
            with lock:
                if self.state is CacheState.REFILLING:
                    self.become(CacheState.INVALID)
            raise
        was_filled = self.is_filled
        with lock:
            if self.state in (CacheState.LOADING, CacheState.REFILLING):  # it missed no write
                self.become(CacheState.SERVING)
            self.is_filled, self.removed_keys = True, None
        if self.is_asked:
            self._answered(NO_KEYS if self._failed_keys is None else self._failed_keys)
            if was_filled and was_written:
                self.table.counting.refilled(self.tier.depth)

    @property
    def takes_copies(self) -> bool:
        """Whether rows found in slower tiers are copied into the cache.

        A cache that outlives the process takes them only from the process that writes its truth. Another process may
        have read a row that the writer has removed since, from the cache too.
        """
        return self.tier.settings.takes_copies and (self.lasting is None or self.table.truth.writes)

    @property
    def takes_promotions(self) -> bool:
        """Whether rows of the table may be offered; not for a while after it was full."""
        return self.is_asked and now_s() >= self._paused_until_s

    def promote(self, keys: Keys, rows: Vectors) -> None:
        """Insert rows that a slower tier holds, as many as there is room for; unique keys. Their lock is held."""
        added, dropped = 0, keys.size
        try:
            added, dropped = self._insert_what_fits(keys, rows)
            if added and self._refuses_promotions:  # a tier that had nothing to take may still refuse rows
                self._refuses_promotions = False
                logger.warning("tier %s takes promoted rows again, table %r", self.tier.name, self.table.name)
        except StoreError as err:
            self.table.counting.failed(self.tier.depth, isinstance(err, StoreTimeoutError))
            if not self._refuses_promotions:
                self._refuses_promotions = True
                named = self.tier.name, self.table.name, err.reason
                logger.warning("tier %s takes no promoted rows, table %r: %s", *named)
        self.table.counting.promoted(self.tier.depth, added, dropped)

    def drop_promotion(self, rows: int) -> None:
        """Count rows that a slower tier held and that this tier is not offered."""
        self.table.counting.promoted(self.tier.depth, 0, rows)

    def _take(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StoreError as err:
            self.failed(err)
            if self.lasting is None or self.lasting.is_whole:  # a store with invalid parts bypasses these itself
                self.missed_write()

    def _insert_what_fits(self, keys: Keys, rows: Vectors) -> tuple[int, int]:
        """Insert rows; returns how many were inserted, and for how many there was no room."""
        try:
            return self.stored.insert_absent(keys, rows), 0
        except StoreFullError:
            self._paused_until_s = now_s() + FULL_PAUSE_S
            room = (self.stored.capacity_rows or 0) - self.stored.count()
            if not 0 < room < keys.size:
                return 0, keys.size
            added, dropped = self._insert_what_fits(keys[:room], rows[:room])
            return added, dropped + keys.size - room


def native_tables(tables: Sequence[TierTable]) -> list[NativeTable | None]:
    """Return ``StoreTable.native`` of tables in one tier; None also where the call must go through ``fetch``."""
    if tables[0].tier.breaker is not None:
        return [None] * len(tables)
    return [table.stored.native if table.is_asked and not table.is_silent else None for table in tables]


def _overwrite(stored: StoreTable, keys: Keys, rows: Vectors) -> None:
    """Write rows to a cache; if it has no room for new keys, write over those that it holds."""
    try:
        stored.insert(keys, rows)
    except StoreFullError:
        found = stored.fetch(keys, np.empty_like(rows))
        try:
            stored.insert(keys[found], rows[found])
        except StoreError:
            stored.evict(keys[found])  # an old row must not stay
