"""The memory tier: one host table per embedding table."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence, Set

from kernels.host import HostTable, OverflowPolicy
from kernels.system_memory import check_memory
from serving.errors import StoreError, StoreFullError
from serving.metrics import MetricSample
from serving.model.capacity import HEADROOM_RATIO
from serving.storage.memory_budget import MemoryBudget, Quota
from serving.storage.store import Keys, Store, TableSpec, Vectors
from serving.storage.tables import HostRowsTable, NoRows

logger = logging.getLogger(__name__)


class MemoryStore(Store):
    """Rows in RAM, within one budget for all tables.

    A table takes its memory when it is opened. With a budget, a table gets as many rows as it asks for while the budget
    lasts. Tables that get their shares together divide the rest of the budget in proportion to their rows. Without a
    budget, a table gets its rows and some headroom, limited by the table's own capacity if it has one.
    A full table refuses new keys. With an ``overflow_policy``, a table that its bound makes smaller evicts rows.
    """

    name = "memory"
    keeps_row_dtype = True

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
        headroom_ratio: float = HEADROOM_RATIO,
    ) -> None:
        """Set the budget.

        Args:
            capacity_rows: maximum rows of all tables together.
            capacity_bytes: maximum bytes of all tables together, keys and spare rows included.
            capacity_rows_per_table: maximum rows of each named table, by full name; 0 keeps no row of it in RAM.
            capacity_rows_of_each_table: maximum rows of every table.
                At most one of the four bounds may be given. Without a bound, a table gets its rows and headroom.
            overflow_policy: which rows a full table evicts for new keys, see ``HostTable``; None: it evicts no rows.
            overflow_resolution_target: the fraction of its bound that remains after an overflow, above 0, at most 1.
            is_backed: a slower tier holds every row, so an evicted row is not lost; for the log only.
            headroom_ratio: the room for new keys in a table without a bound, as a share of its rows.

        Raises:
            ValueError: more than one bound is given, or a value is out of its range.
        """
        if not 0.0 < overflow_resolution_target <= 1.0:
            raise ValueError(
                f"overflow_resolution_target: expected more than 0, at most 1: {overflow_resolution_target}"
            )
        super().__init__()
        self._budget = MemoryBudget(
            capacity_rows,
            capacity_bytes,
            capacity_rows_per_table,
            capacity_rows_of_each_table,
            overflow_policy,
            headroom_ratio,
        )
        self._target_ratio = overflow_resolution_target
        self._is_backed = is_backed
        self._shares: dict[str, tuple[TableSpec, Quota]] = {}  # of tables that are not open yet
        self._lock = threading.Lock()  # one change of the tables at a time; guards _shares

    def _new_table(self, spec: TableSpec) -> "MemoryTable":
        return MemoryTable(self, spec)

    def share_bounds(self, wanted: Sequence[tuple[TableSpec, int]], leaving: Set[str] = frozenset()) -> None:
        """Give shares of the budget to tables that will be opened together, by the rows of each.

        Open tables and tables that have a share keep their room, except tables that are ``leaving`` soon.

        Raises:
            StoreError: the system does not have the memory; no table got a share.
        """
        with self._lock:
            self._check_open()
            known = self._tables.keys() | self._shares.keys()
            new = [(spec, rows) for spec, rows in wanted if spec.name not in known]
            other_quotas = [(spec, rows) for spec, rows in self._quotas() if spec.name not in leaving]
            quotas = self._budget.quotas(new, other_quotas)
            added = {spec.name: (spec, quota) for (spec, _), quota in zip(new, quotas, strict=True)}
            shares = {**self._shares, **added}
            self._check_memory(shares.values())
            self._shares = shares

    def give_back(self, tables: Set[str]) -> None:
        """Take the shares of tables that will not be opened; a name without a share is no error."""
        with self._lock:
            self._shares = {name: share for name, share in self._shares.items() if name not in tables}

    def erase(self, table: str) -> None:
        """See ``Store.erase``."""
        self._check_open(table)
        open_table = self._tables.get(table)
        if open_table is not None:
            open_table.close()

    def _open(self, spec: TableSpec, rows: int) -> HostTable | NoRows:
        """Take the memory of a table."""
        share = self._shares.pop(spec.name, None)
        quota = share[1] if share else self._budget.quota(spec, rows, self._quotas())
        if quota.rows:
            return self._new_rows(spec, quota)
        if self._budget.shared:
            logger.warning("memory: %s", self._budget.no_room(spec.name))
        return NoRows()

    def _quotas(self) -> list[tuple[TableSpec, int]]:
        """Return the tables that are open or have a share, and the rows of their quotas."""
        given = [(table.spec, table.capacity_rows or 0) for table in self._tables.values()]
        return [quota_rows for quota_rows in given if quota_rows[1]] + [
            (spec, quota.rows) for spec, quota in self._shares.values()
        ]

    def _new_rows(self, spec: TableSpec, quota: Quota) -> HostTable:
        policy = self._policy(quota)
        target_rows = round(quota.rows * self._target_ratio)
        try:
            return HostTable(spec.dim, quota.rows, spec.row_dtype, policy, target_rows)
        except MemoryError as err:
            raise self._no_memory(spec.name, err) from err

    def _policy(self, quota: Quota) -> OverflowPolicy | None:
        return self._budget.overflow_policy if quota.is_bounded else None

    def _check_memory(self, shares: Iterable[tuple[TableSpec, Quota]]) -> None:
        """Refuse tables that do not fit into memory together, before the first of them is loaded."""
        sizes = (
            HostTable.memory_bytes(spec.dim, quota.rows, spec.row_dtype, self._policy(quota))
            for spec, quota in shares
            if quota.rows
        )
        try:
            check_memory(sum(sizes))
        except MemoryError as err:
            raise self._no_memory("", err) from err

    def _no_memory(self, table: str, err: MemoryError) -> StoreError:
        return StoreError(self.name, table, f"{err}; {self._budget.advice}")


class MemoryTable(HostRowsTable[HostTable | NoRows]):
    """A table of a ``MemoryStore``."""

    store: MemoryStore

    def __init__(self, store: MemoryStore, spec: TableSpec) -> None:
        """Take no memory yet."""
        super().__init__(store, spec)
        self._has_overflown = False
        self._log_lock = threading.Lock()  # guards _has_overflown; inserts never wait for the store's lock

    @property
    def capacity_rows(self) -> int | None:
        """See ``StoreTable.capacity_rows``; 0 if the table got no room."""
        host_table = self._open_rows()
        return host_table.capacity_rows if isinstance(host_table, HostTable) else 0

    @property
    def evicts(self) -> bool:
        """See ``StoreTable.evicts``."""
        host_table = self._open_rows()
        return isinstance(host_table, HostTable) and host_table.overflow_policy is not None

    @property
    def used_ratio(self) -> float | None:
        """See ``StoreTable.used_ratio``."""
        host_table = self._open_rows()
        if not isinstance(host_table, HostTable) or host_table.overflow_policy is not None:
            return None
        return len(host_table) / host_table.capacity_rows

    @property
    def evicted_rows(self) -> int:
        """Rows evicted by overflows since the table was opened."""
        host_table = self._rows
        return host_table.stats().evicted_rows if isinstance(host_table, HostTable) else 0

    def samples(self) -> Iterable[MetricSample]:
        """See ``StoreTable.samples``."""
        yield from super().samples()
        yield MetricSample("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), self.evicted_rows)

    def open(self, rows: int) -> None:
        """See ``StoreTable.open``; opening an open table again changes nothing."""
        with self.store._lock:
            self.store.check_name(self)
            if self._rows is None:
                host_table = self.store._open(self.spec, rows)
                self.store.add(self)
                self._hold(host_table)

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``."""
        host_table = self._open_rows()
        if isinstance(host_table, NoRows):
            if keys.size:
                reason = "the table has no room: other tables took the whole budget"
                raise StoreFullError(self.store.name, self.spec.name, reason)
            return
        if self._insert_in_parts(host_table, keys, rows):
            self._log_first_eviction(host_table)

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``."""
        host_table = self._open_rows()
        if isinstance(host_table, HostTable):
            host_table.evict(keys)

    def close(self) -> None:
        """See ``StoreTable.close``; the memory is freed when the last reader is done."""
        with self.store._lock:
            self.store.remove(self)
            self._hold(None)

    def _insert_in_parts(self, host_table: HostTable, keys: Keys, rows: Vectors) -> int:
        """Insert rows in parts that fit the table, and return how many rows were evicted."""
        most_rows = keys.size if host_table.overflow_policy is None else host_table.capacity_rows
        evicted = 0
        for start in range(0, keys.size, max(most_rows, 1)):
            part = slice(start, start + most_rows)
            evicted += self._insert_into(host_table, keys[part], rows[part])
        return evicted

    def _log_first_eviction(self, host_table: HostTable) -> None:
        with self._log_lock:
            if self._has_overflown:
                return
            self._has_overflown = True
        is_backed = self.store._is_backed
        logger.log(
            logging.INFO if is_backed else logging.WARNING,
            "memory: table %s reached its bound of %s rows and evicts rows from now on (%s); %s",
            self.spec.name,
            f"{host_table.capacity_rows:,}",
            host_table.overflow_policy,
            "the next tier has them" if is_backed else "a row that no other tier holds is lost",
        )
