"""A store as one tier of a parameter server: what to do when it does not answer."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter as now_s

import numpy as np

from kernels.host import RowDtype
from serving.errors import StoreError, StoreFullError, StoreTimeoutError
from serving.model.records import Combiner
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
    """

    timeout_ms: int | None = None
    is_initialized: bool = True
    first_rows: FirstRows = field(default_factory=FirstRows)


class _Outages:
    """Of which tables a tier fails at one of its tasks: logged once when that starts and once when it ends.

    By table, for one may be damaged beside others that are not.
    """

    def __init__(self, tier: str, fails: str, succeeds: str) -> None:
        """Begin without an outage; say that ``tier`` ``fails`` or ``succeeds``."""
        self._starts, self._ends = f"tier {tier} {fails}, table %r: %s", f"tier {tier} {succeeds} again, table %r"
        self._lock = threading.Lock()  # guards changes of the set below
        self._failing: set[str] = set()

    def failed(self, table: str, error: StoreError) -> None:
        """The tier has failed."""
        with self._lock:
            starts = table not in self._failing
            self._failing.add(table)
        if starts:
            logger.warning(self._starts, table, error.reason)

    def succeeded(self, table: str) -> None:
        """The tier has not failed."""
        if table not in self._failing:  # as ever: takes no lock
            return
        with self._lock:
            ends = table in self._failing
            self._failing.discard(table)
        if ends:
            logger.warning(self._ends, table)


class Tier:
    """One store, and whether it does its work: answer, and take rows."""

    def __init__(self, store: Store, depth: int, settings: TierSettings) -> None:
        """Take ``store`` as answering; ``depth`` counts from the fastest, 0."""
        self.store = store
        self.name = store.name
        self._depth = depth
        self._pooled = store if isinstance(store, PooledStore) else None
        self._budget = None if settings.timeout_ms is None else TimeBudget(store.name, settings.timeout_ms)
        self._silence = _Outages(store.name, "does not answer", "answers")
        self._refusal = _Outages(store.name, "takes no promoted rows", "takes promoted rows")
        self._paused_until_s: dict[str, float] = {}  # by table that was full; the promotion's thread writes it

    def fetch(self, held: ServedTable, keys: Keys) -> tuple[Vectors, Mask] | StoreError:
        """Return rows, float32[N, D], and which keys were found; or the error of a tier that did not answer."""

        def fetch() -> tuple[Vectors, Mask]:
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
            lacking = ~self.store.fetch(held.name, keys, np.empty_like(rows))
            keys, rows = keys[lacking], rows[lacking]
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
        started = now_s()
        try:
            answer = fetch() if self._budget is None else self._within_budget(self._budget, held, keys, fetch)
        except StoreError as err:
            held.counting.failed(self._depth, isinstance(err, StoreTimeoutError))
            self._silence.failed(held.name, err)
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
