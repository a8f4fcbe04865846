"""The memory tier: one host table per embedding table."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence, Set

from kernels.host import HostTable, OverflowPolicy
from kernels.system_memory import check_memory
from serving.errors import StoreError, StoreFullError
from serving.metrics import MetricSample
from serving.storage.memory_budget import MemoryBudget, Quota
from serving.storage.store import Keys, TableSpec, Vectors
from serving.storage.tables import HostTableStore

logger = logging.getLogger(__name__)


class MemoryStore(HostTableStore[HostTable]):
    """Rows in RAM, within one budget for all tables.

    A table takes its memory when it is opened. With a budget, a table gets as many rows as it asks for while the budget
    lasts. Tables that were announced together share the rest of the budget in proportion to their rows. Without a
    budget, a table gets its rows and some headroom, limited by the table's own capacity if it has one.
    A full table refuses new keys. With an ``overflow_policy``, a table that its bound makes smaller evicts rows.
    ``fetch``, ``fetch_pooled`` and ``items`` take no lock.
    """

    _NAME = "memory"

    def __init__(
        self,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        capacity_rows_per_table: Mapping[str, int] | None = None,
        *,
        capacity_rows_of_each_table: int | None = None,
        overflow_policy: OverflowPolicy | None = None,
        overflow_resolution_target: float = 0.8,
        is_backed: bool = False,
    ) -> None:
        """Set the budget.

        Args:
            capacity_rows: most rows over all tables.
            capacity_bytes: most bytes over all tables, keys and spare rows included.
            capacity_rows_per_table: most rows of each named table, by full name; 0 keeps no row of it in RAM.
            capacity_rows_of_each_table: most rows of every table.
                At most one of the four bounds may be given. Without a bound, a table gets its rows and headroom.
            overflow_policy: which rows a full table evicts for new keys, see ``HostTable``; None: it evicts no rows.
            overflow_resolution_target: the part of its bound that a table keeps in an overflow, above 0 and at most 1.
            is_backed: a slower tier holds every row, so an evicted row is not lost; for the log only.

        Raises:
            ValueError: more than one bound is given, or a value is out of its range.
        """
        if not 0.0 < overflow_resolution_target <= 1.0:
            raise ValueError(
                f"overflow_resolution_target: expected more than 0, at most 1: {overflow_resolution_target}"
            )
        super().__init__()
        self._budget = MemoryBudget(
            capacity_rows, capacity_bytes, capacity_rows_per_table, capacity_rows_of_each_table, overflow_policy
        )
        self._target_ratio = overflow_resolution_target
        self._is_backed = is_backed
        self._specs: dict[str, TableSpec] = {}
        self._announced: dict[str, tuple[TableSpec, Quota]] = {}  # tables that are not open yet
        self._overflown: set[str] = set()  # tables whose first eviction was logged
        self._lock = threading.Lock()  # one open_table, drop_table or close at a time; guards _announced
        self._log_lock = threading.Lock()  # guards _overflown; inserts never wait for _lock, held for seconds

    def announce(self, wanted: Sequence[tuple[TableSpec, int]], leaving: Set[str] = frozenset()) -> None:
        """See ``Store.announce``; an announced table keeps its quota until it is opened or dropped."""
        with self._lock:
            known = self._open_tables("").keys() | self._announced.keys()
            new = [(spec, rows) for spec, rows in wanted if spec.name not in known]
            held = [(spec, rows) for spec, rows in self._held() if spec.name not in leaving]
            quotas = self._budget.quotas(new, held)
            added = {spec.name: (spec, quota) for (spec, _), quota in zip(new, quotas, strict=True)}
            announced = {**self._announced, **added}
            self._check_memory(announced.values())
            self._announced = announced

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; opening an open table again changes nothing."""
        with self._lock:
            tables = self._open_tables(spec.name)
            if spec.name in tables:
                held = self._specs[spec.name]
                return self._check_spec(spec, held.dim, held.row_dtype)
            announced = self._announced.pop(spec.name, None)
            quota = announced[1] if announced else self._budget.quota(spec, capacity_rows, self._held())
            if not quota.rows and self._budget.shared:
                logger.warning("memory: %s", self._budget.no_room(spec.name))
            self._specs = {**self._specs, spec.name: spec}
            self._tables = {**tables, spec.name: self._new_table(spec, quota)}

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``."""
        held = self._held_table(table)
        return held.capacity_rows if held is not None else 0

    def evicted_rows(self, table: str) -> int:
        """Rows evicted by overflows since the table was opened; 0 for an unknown table or a closed store."""
        held = (self._tables or {}).get(table)
        return held.stats().evicted_rows if held is not None else 0

    def samples(self, table: str) -> Iterable[MetricSample]:
        """See ``Store.samples``."""
        yield from super().samples(table)
        yield MetricSample("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), self.evicted_rows(table))

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``."""
        tables = self._open_tables(table)
        if table not in tables:
            raise StoreError(self.name, table, "not an open table")
        held = tables[table]
        if held is None:
            if keys.size:
                raise StoreFullError(self.name, table, "the table has no room: other tables took the whole budget")
            return
        self._check_dim(table, held.dim, rows.shape[1])
        if self._insert_in_parts(table, held, keys, rows):
            self._log_first_eviction(table, held)

    def evict(self, table: str, keys: Keys) -> None:
        """See ``Store.evict``."""
        held = self._held_table(table)
        if held is not None:
            held.evict(keys)

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; the memory is freed when the last reader is done."""
        with self._lock:
            self._announced.pop(table, None)
            self._tables = {name: held for name, held in self._open_tables(table).items() if name != table}
            self._specs = {name: spec for name, spec in self._specs.items() if name != table}
        with self._log_lock:
            self._overflown.discard(table)

    def close(self) -> None:
        """See ``Store.close``."""
        with self._lock:
            self._tables = None

    def _held(self) -> list[tuple[TableSpec, int]]:
        """Return the open and announced tables, and the rows of their quotas."""
        tables = self._open_tables("")
        given = [(self._specs[name], table.capacity_rows) for name, table in tables.items() if table is not None]
        return given + [(spec, quota.rows) for spec, quota in self._announced.values()]

    def _new_table(self, spec: TableSpec, quota: Quota) -> HostTable | None:
        if not quota.rows:
            return None
        policy = self._policy(quota)
        target_rows = round(quota.rows * self._target_ratio)
        try:
            return HostTable(spec.dim, quota.rows, spec.row_dtype, policy, target_rows)
        except MemoryError as err:
            raise self._no_memory(spec.name, err) from err

    def _policy(self, quota: Quota) -> OverflowPolicy | None:
        return self._budget.overflow_policy if quota.is_bounded else None

    def _check_memory(self, announced: Iterable[tuple[TableSpec, Quota]]) -> None:
        """Refuse tables that do not fit into memory together, before the first of them is loaded."""
        sizes = (
            HostTable.memory_bytes(spec.dim, quota.rows, spec.row_dtype, self._policy(quota))
            for spec, quota in announced
            if quota.rows
        )
        try:
            check_memory(sum(sizes))
        except MemoryError as err:
            raise self._no_memory("", err) from err

    def _no_memory(self, table: str, err: MemoryError) -> StoreError:
        return StoreError(self.name, table, f"{err}; {self._budget.advice}")

    def _insert_in_parts(self, table: str, held: HostTable, keys: Keys, rows: Vectors) -> int:
        """Insert rows in parts that fit the table, and return how many rows were evicted."""
        most = keys.size if held.overflow_policy is None else held.capacity_rows
        evicted = 0
        for start in range(0, keys.size, max(most, 1)):
            part = slice(start, start + most)
            evicted += self._insert_rows(table, held, keys[part], rows[part])
        return evicted

    def _log_first_eviction(self, table: str, held: HostTable) -> None:
        with self._log_lock:
            if table in self._overflown:
                return
            self._overflown.add(table)
        logger.log(
            logging.INFO if self._is_backed else logging.WARNING,
            "memory: table %s reached its bound of %s rows and evicts rows from now on (%s); %s",
            table,
            f"{held.capacity_rows:,}",
            held.overflow_policy,
            "the next tier has them" if self._is_backed else "a row that no other tier holds is lost",
        )
