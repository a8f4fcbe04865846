"""A store as one tier of a parameter server: what to do when it does not answer."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter as now_s

import numpy as np

from kernels.host import RowDtype
from serving.errors import StoreError, StoreFullError, StoreLostError, StoreTimeoutError, StoreUnreachableError
from serving.model.records import Combiner
from serving.parameter_server.backlog import Backlog
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.served_table import ServedTable
from serving.parameter_server.time_budget import TimeBudget
from serving.storage.row_dtype import may_be_copied, rounded
from serving.storage.store import Keys, Mask, PooledStore, RowPtrs, Store, Vectors, Weights

logger = logging.getLogger(__name__)

# A table that was full is not offered rows for so long: each offer costs the lookups beside it some of the processor.
FULL_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What is said of a tier beside its store.

    Attributes:
        timeout_ms: most time that a lookup waits for it; None: as long as it takes.
        is_initialized: models' files are loaded into it; else it keeps what it has: RAM starts empty, a durable store
            must have the tables.
        first_rows: which rows of the files it is given, where it is none that holds all.
        takes_copies: rows that slower tiers held are copied into it, where the server promotes.
    """

    timeout_ms: int | None = None
    is_initialized: bool = True
    first_rows: FirstRows = field(default_factory=FirstRows)
    takes_copies: bool = True


class _Outages:
    """Of which tables a tier fails at one of its tasks: logged once when that starts and once when it ends.

    By table, for one may be damaged beside others that are not. Logged once more where a tier that could not be reached
    is reached and fails all the same, or the other way round: who mends the one has not mended the other.
    """

    def __init__(self, tier: str, fails: str, succeeds: str) -> None:
        """Begin without an outage; say that ``tier`` ``fails`` or ``succeeds``."""
        self._starts, self._ends = f"tier {tier} {fails}, table %r: %s", f"tier {tier} {succeeds} again, table %r"
        self._lock = threading.Lock()  # guards changes of what is below
        self._failing: dict[str, set[bool]] = {}  # by table, of the failures logged, whether the tier was reached
        self._ended: dict[str, int] = {}  # by table, how many outages have ended

    def __contains__(self, table: str) -> bool:
        """Whether it lasts."""
        return table in self._failing

    def ended(self, table: str) -> int:
        """How many have ended: what a call notes before it begins."""
        return self._ended.get(table, 0)

    def failed(self, table: str, error: StoreError, ended: int | None = None) -> None:
        """The tier has failed; at a call that noted ``ended``, if any: it tells nothing new if one has ended since."""
        was_reached = not isinstance(error, StoreUnreachableError)
        with self._lock:
            if ended not in (None, self.ended(table)):
                return
            logged = self._failing.setdefault(table, set())
            is_new = was_reached not in logged
            logged.add(was_reached)
        if is_new:
            logger.warning(self._starts, table, error.reason)

    def succeeded(self, table: str) -> None:
        """The tier has not failed."""
        if table not in self._failing:  # as ever: takes no lock
            return
        with self._lock:
            logged = self._failing.pop(table, None)
            if logged is not None:
                self._ended[table] = self.ended(table) + 1
        if logged is not None:
            logger.warning(self._ends, table)

    def forget(self, table: str) -> None:
        """Nobody asks about the table any more."""
        with self._lock:
            self._failing.pop(table, None)


class Tier:
    """One store, and whether it does its work: answer, and take rows.

    Attributes:
        store: the store.
        name: its name.
        settings: what is said of it beside.
        backlog: what it has missed.
        on_lost: called where an answer about a table lacked rows that the store once had.
    """

    def __init__(self, store: Store, depth: int, settings: TierSettings) -> None:
        """Take ``store`` as answering; ``depth`` counts from the fastest, 0."""
        self.store = store
        self.settings = settings
        self.backlog = Backlog(store)
        self.name = store.name
        self.on_lost: Callable[[ServedTable], None] | None = None
        self._depth = depth
        self._pooled = store if isinstance(store, PooledStore) else None
        self._budget = None if settings.timeout_ms is None else TimeBudget(store.name, settings.timeout_ms)
        self._silence = _Outages(store.name, "does not answer", "answers")
        self._refusal = _Outages(store.name, "takes no promoted rows", "takes promoted rows")
        self._paused_until_s: dict[str, float] = {}  # by table that was full; the promotion's thread writes it

    def fetch(self, held: ServedTable, keys: Keys) -> tuple[Vectors, Mask] | StoreError:
        """Return rows, float32[N, D], and which keys were found; or the error of a tier that did not answer."""

        def fetch() -> tuple[Vectors, Mask]:
            self.backlog.make_up(held.name)
            rows = np.empty((keys.size, held.dim), dtype=np.float32)
            return rows, self.store.fetch(held.name, keys, rows)

        return self._answer(held, keys, fetch)

    def fetch_pooled(
        self, held: ServedTable, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None
    ) -> tuple[Vectors, Mask] | StoreError | None:
        """Return the same as ``fetch``, for ``PooledStore.fetch_pooled``; None where the store does not pool."""
        store = self._pooled
        if store is None:
            return None

        def fetch() -> tuple[Vectors, Mask]:
            self.backlog.make_up(held.name)
            # Its own array: a call that is abandoned goes on writing.
            out = np.empty((row_ptrs.size - 1, held.dim), dtype=np.float32)
            return out, store.fetch_pooled(held.name, keys, row_ptrs, out, combiner, weights)

        return self._answer(held, keys, fetch)

    def gives_rounded(self, row_dtype: RowDtype) -> bool:
        """Whether rows of a table of ``row_dtype`` come from here as that type rounds them."""
        return row_dtype != "fp32" and self.store.keeps_row_dtype

    def gives_rows_to_copy(self, row_dtype: RowDtype) -> bool:
        """Whether faster tiers may keep rows of a table of ``row_dtype`` as this one gives them."""
        return may_be_copied(self.store, row_dtype)

    def as_served(self, table: str, row_dtype: RowDtype, keys: Keys, rows: Vectors) -> Vectors:
        """Rows that this tier gave, as every tier of the server gives them: rounded to ``row_dtype``, once.

        Raises:
            StoreError: a store that keeps float32 has a value that ``row_dtype`` cannot hold.
        """
        return rows if self.gives_rounded(row_dtype) else rounded(self.name, table, row_dtype, keys, rows)

    def promote(self, held: ServedTable, keys: Keys, rows: Vectors) -> None:
        """Take rows that a slower tier held, as far as there is room for them; unique keys. Their lock is held."""
        taken = 0
        try:
            self.backlog.make_up(held.name)
            lacking = ~self.store.fetch(held.name, keys, np.empty_like(rows))
            keys, rows = keys[lacking], rows[lacking]
            if keys.size:  # that a tier had nothing to take does not tell that it would have
                taken = self._insert_what_fits(held.name, keys, rows)
                self._refusal.succeeded(held.name)
        except StoreError as err:
            held.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._refusal.failed(held.name, err)
        held.counting.promoted(self._depth, taken, keys.size - taken)

    def takes_promotions(self, held: ServedTable) -> bool:
        """Whether rows of the table may be offered; not for a while after it was full."""
        return now_s() >= self._paused_until_s.get(held.name, 0.0)

    def drop_promotion(self, held: ServedTable, rows: int) -> None:
        """Count rows that a slower tier held and that are not offered to this one."""
        held.counting.promoted(self._depth, 0, rows)

    def is_silent(self, table: str) -> bool:
        """Whether it did not answer when it was asked about the table last."""
        return table in self._silence

    def missed_load(self, table: str, reason: str) -> None:
        """The tier could not be given a table, for this reason: it counts as not answering about it."""
        self.backlog.missed_load(table, reason)
        self._silence.failed(table, StoreError(self.name, table, reason))

    def was_loaded(self, table: str) -> None:
        """The tier has been given the table after all."""
        self.backlog.was_loaded(table)
        self._silence.succeeded(table)

    def was_refilled(self, held: ServedTable) -> None:
        """The tier has been given back what it had lost of the table."""
        held.counting.refilled(self._depth)

    def forget(self, table: str) -> None:
        """The table is served no more; another load of it begins without its outages."""
        self.backlog.was_loaded(table)
        for outages in (self._silence, self._refusal):
            outages.forget(table)

    def close(self) -> None:
        """Close the store."""
        if self._budget is not None:
            self._budget.close()
        self.store.close()

    def _insert_what_fits(self, table: str, keys: Keys, rows: Vectors) -> int:
        try:
            self.store.insert(table, keys, rows)
            return keys.size
        except StoreFullError:
            self._paused_until_s[table] = now_s() + FULL_PAUSE_S
            room = (self.store.capacity_rows(table) or 0) - self.store.count(table)
            if not 0 < room < keys.size:
                return 0
            return self._insert_what_fits(table, keys[:room], rows[:room])

    def _answer(
        self, held: ServedTable, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]
    ) -> tuple[Vectors, Mask] | StoreError:
        started, ended = now_s(), self._silence.ended(held.name)
        try:
            answer = fetch() if self._budget is None else self._within_budget(self._budget, held, keys, fetch)
        except StoreError as err:
            held.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._silence.failed(held.name, err, ended)
            if self.on_lost is not None and isinstance(err, StoreLostError):
                self.on_lost(held)
            return err
        held.counting.fetched(self._depth, now_s() - started)
        self._silence.succeeded(held.name)
        return answer

    def _within_budget(
        self, budget: TimeBudget, held: ServedTable, keys: Keys, fetch: Callable[[], tuple[Vectors, Mask]]
    ) -> tuple[Vectors, Mask]:
        def probe() -> None:
            self.store.fetch(held.name, keys[:1], np.empty((min(keys.size, 1), held.dim), dtype=np.float32))

        return budget.call(held.name, fetch, probe)
