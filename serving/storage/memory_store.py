"""The memory tier: one host table per embedding table."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kernels.errors import ReservedKeyError, RowValueError, TableFullError
from kernels.host import HostTable, OverflowPolicy
from serving.errors import StoreError, StoreFullError
from serving.model.records import Combiner
from serving.reading import Reading
from serving.storage.memory_budget import MemoryBudget, Room
from serving.storage.store import Keys, Mask, RowPtrs, TableSpec, Vectors, Weights

logger = logging.getLogger(__name__)


class MemoryStore:
    """Rows in RAM, within one budget for all tables together. See ``PooledStore`` and ``MeasuredStore``.

    A table takes its memory when it is opened. With a budget it gets as many rows as it asks for, or its part of what
    is left: tables that were announced together (``share``) share that in proportion, any other comes after those that
    were opened or announced before. Without one it gets some headroom on top, or, where it has a capacity of its own,
    at most that.
    A table that holds all it has room for refuses further keys; with an ``overflow_policy``, one that its bound keeps
    smaller than it would be evicts rows instead.
    ``fetch``, ``fetch_pooled`` and ``items`` take no lock.
    """

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
            capacity_rows_per_table: most rows of each table that is named, by full name; 0 keeps none of it in RAM.
            capacity_rows_of_each_table: most rows of every table.
                At most one of the four may be given; with none, every table gets what it asks for and headroom.
            overflow_policy: which rows leave a full table when new keys come, see ``HostTable``; None: none do.
            overflow_resolution_target: the part of its bound that an overflow leaves in a table, more than 0 and at
                most 1.
            is_backed: a slower tier holds every row, so that none is lost that is evicted; for the log only.

        Raises:
            ValueError: more than one bound is given, a budget is less than 1, a table's capacity less than 0, or the
                target is no such part.
        """
        if not 0.0 < overflow_resolution_target <= 1.0:
            raise ValueError(
                f"overflow_resolution_target: expected more than 0, at most 1: {overflow_resolution_target}"
            )
        self._budget = MemoryBudget(
            capacity_rows, capacity_bytes, capacity_rows_per_table, capacity_rows_of_each_table, overflow_policy
        )
        self._target_ratio = overflow_resolution_target
        self._is_backed = is_backed
        # Replaced as a whole, never changed in place, so that readers need no lock. None once closed.
        self._tables: dict[str, HostTable | None] | None = {}
        self._specs: dict[str, TableSpec] = {}
        self._shares: dict[str, tuple[TableSpec, Room]] = {}  # of tables that were announced and are not open yet
        self._overflown: set[str] = set()  # tables whose first eviction was logged
        self._lock = threading.Lock()  # one open_table, drop_table or close at a time; guards _shares and _overflown

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return "memory"

    @property
    def keeps_row_dtype(self) -> bool:
        """See ``Store.keeps_row_dtype``."""
        return True

    def share(self, wanted: Sequence[tuple[TableSpec, int]]) -> None:
        """See ``SharingStore.share``."""
        with self._lock:
            tables = self._open_tables("")
            new = [(spec, rows) for spec, rows in wanted if spec.name not in tables and spec.name not in self._shares]
            rooms = self._budget.rooms(new, self._held())
            self._shares.update((spec.name, (spec, room)) for (spec, _), room in zip(new, rooms, strict=True))

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; opening an open table again changes nothing."""
        with self._lock:
            tables = self._open_tables(spec.name)
            if spec.name in tables:
                held = self._specs[spec.name]
                self._check_dim(spec.name, held.dim, spec.dim)
                if held.row_dtype != spec.row_dtype:
                    raise StoreError(
                        self.name, spec.name, f"holds {held.row_dtype} rows, asked to hold {spec.row_dtype}"
                    )
                return
            announced = self._shares.pop(spec.name, None)
            room = announced[1] if announced else self._budget.room_for(spec, capacity_rows, self._held())
            if not room.rows and self._budget.shared:
                logger.warning("memory: %s", self._budget.no_room(spec.name))
            self._specs = {**self._specs, spec.name: spec}
            self._tables = {**tables, spec.name: self._new_table(spec, room)}

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``."""
        held = self._open_tables(table).get(table)
        return held.capacity_rows if held is not None else 0

    def memory_bytes(self, table: str) -> int:
        """RAM the table takes: its keys, rows and spare rows; 0 for an unknown table."""
        held = self._open_tables(table).get(table)
        return held.stats().memory_bytes if held is not None else 0

    def evicted_rows(self, table: str) -> int:
        """Rows of the table that made room for others since it was opened; 0 for an unknown table or once closed."""
        held = (self._tables or {}).get(table)
        return held.stats().evicted_rows if held is not None else 0

    def readings(self, table: str) -> Iterator[Reading]:
        """See ``MeasuredStore.readings``."""
        yield Reading("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), self.evicted_rows(table))

    def tables(self) -> list[str]:
        """See ``Store.tables``."""
        return sorted(self._open_tables(""))

    def count(self, table: str) -> int:
        """See ``Store.count``; exact."""
        held = self._open_tables(table).get(table)
        return len(held) if held is not None else 0

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""
        held = self._open_tables(table).get(table)
        if held is None:
            out[...] = 0.0
            return np.zeros(keys.size, dtype=np.bool_)
        self._check_dim(table, held.dim, out.shape[1])
        return held.fetch(keys, out)

    def fetch_pooled(
        self,
        table: str,
        keys: Keys,
        row_ptrs: RowPtrs,
        out: Vectors,
        combiner: Combiner,
        weights: Weights | None = None,
    ) -> Mask:
        """See ``PooledStore.fetch_pooled``."""
        held = self._open_tables(table).get(table)
        if held is None:
            out[...] = 0.0
            return np.zeros(keys.size, dtype=np.bool_)
        self._check_dim(table, held.dim, out.shape[1])
        return held.fetch_pooled(keys, row_ptrs, out, combiner, weights)

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
        try:
            if self._insert_in_parts(held, keys, rows):
                self._log_first_eviction(table, held)
        except TableFullError as err:
            raise StoreFullError(self.name, table, str(err)) from err
        except (ReservedKeyError, RowValueError) as err:
            raise StoreError(self.name, table, str(err)) from err

    def evict(self, table: str, keys: Keys) -> int | None:
        """See ``Store.evict``; exact."""
        held = self._open_tables(table).get(table)
        return held.evict(keys) if held is not None else 0

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; the memory goes back once the last reader has left."""
        with self._lock:
            self._overflown.discard(table)
            self._shares.pop(table, None)
            self._tables = {name: held for name, held in self._open_tables(table).items() if name != table}
            self._specs = {name: spec for name, spec in self._specs.items() if name != table}

    def items(self, table: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``."""
        held = self._open_tables(table).get(table)
        return held.items(batch_rows) if held is not None else iter(())

    def close(self) -> None:
        """See ``Store.close``."""
        with self._lock:
            self._tables = None

    def _held(self) -> list[tuple[TableSpec, int]]:
        """The tables that have their room, and its rows."""
        tables = self._open_tables("")
        given = [(self._specs[name], table.capacity_rows) for name, table in tables.items() if table is not None]
        return given + [(spec, room.rows) for spec, room in self._shares.values()]

    def _new_table(self, spec: TableSpec, room: Room) -> HostTable | None:
        if not room.rows:
            return None
        policy = self._budget.overflow_policy if room.is_bounded else None
        target_rows = round(room.rows * self._target_ratio)
        try:
            return HostTable(spec.dim, room.rows, spec.row_dtype, policy, target_rows)
        except MemoryError as err:
            size = HostTable.memory_bytes(spec.dim, room.rows, spec.row_dtype, policy)
            reason = f"the system refused {size:,} bytes for {room.rows:,} rows"
            raise StoreError(self.name, spec.name, reason) from err

    @staticmethod
    def _insert_in_parts(held: HostTable, keys: Keys, rows: Vectors) -> int:
        """Insert rows, those that may evict others no more at a time than fit; returns how many were evicted."""
        most = keys.size if held.overflow_policy is None else held.capacity_rows
        starts = range(0, keys.size, max(most, 1))
        return sum(held.insert(keys[start : start + most], rows[start : start + most]) for start in starts)

    def _log_first_eviction(self, table: str, held: HostTable) -> None:
        with self._lock:
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

    def _open_tables(self, table: str) -> dict[str, HostTable | None]:
        tables = self._tables
        if tables is None:
            raise StoreError(self.name, table, "the store is closed")
        return tables

    def _check_dim(self, table: str, dim: int, asked: int) -> None:
        if dim != asked:
            raise StoreError(self.name, table, f"holds vectors of {dim} floats, asked for {asked}")
