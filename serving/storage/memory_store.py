"""The memory tier: one host table per embedding table."""

import threading
from collections.abc import Iterator, Mapping

import numpy as np

from kernels.errors import ReservedKeyError, RowValueError, TableFullError
from kernels.host import HostTable
from serving.errors import StoreError, StoreFullError
from serving.model.records import Combiner
from serving.storage.memory_budget import MemoryBudget
from serving.storage.store import Keys, Mask, RowPtrs, TableSpec, Vectors, Weights


class MemoryStore:
    """Rows in RAM, within one budget for all tables together. See ``PooledStore``.

    A table takes its memory when it is opened. With a budget it gets as many rows as it asks for, or what is left:
    tables are served in the order in which they are opened. Without one it gets some headroom on top, or, where it has
    a capacity of its own, at most that.
    ``fetch``, ``fetch_pooled`` and ``items`` take no lock.
    """

    def __init__(
        self,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        capacity_rows_per_table: Mapping[str, int] | None = None,
    ) -> None:
        """Set the budget.

        Args:
            capacity_rows: most rows over all tables.
            capacity_bytes: most bytes over all tables, keys and spare rows included.
            capacity_rows_per_table: most rows of each table that is named, by full name; 0 keeps none of it in RAM.
                At most one of the three may be given; with none, every table gets what it asks for and headroom.

        Raises:
            ValueError: more than one is given, a budget is less than 1, or a table's capacity less than 0.
        """
        self._budget = MemoryBudget(capacity_rows, capacity_bytes, capacity_rows_per_table)
        # Replaced as a whole, never changed in place, so that readers need no lock. None once closed.
        self._tables: dict[str, HostTable | None] | None = {}
        self._specs: dict[str, TableSpec] = {}
        self._lock = threading.Lock()  # one open_table, drop_table or close at a time

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return "memory"

    @property
    def keeps_row_dtype(self) -> bool:
        """See ``Store.keeps_row_dtype``."""
        return True

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
            held_rows = {name: table.capacity_rows for name, table in tables.items() if table is not None}
            rows = self._budget.rows_for(spec, capacity_rows, [(self._specs[name], n) for name, n in held_rows.items()])
            try:
                table = HostTable(spec.dim, rows, spec.row_dtype) if rows else None
            except MemoryError as err:
                size = HostTable.memory_bytes(spec.dim, rows, spec.row_dtype)
                raise StoreError(self.name, spec.name, f"the system refused {size:,} bytes for {rows:,} rows") from err
            self._specs = {**self._specs, spec.name: spec}
            self._tables = {**tables, spec.name: table}

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``."""
        held = self._open_tables(table).get(table)
        return held.capacity_rows if held is not None else 0

    def memory_bytes(self, table: str) -> int:
        """RAM the table takes: its keys, rows and spare rows; 0 for an unknown table."""
        held = self._open_tables(table).get(table)
        return HostTable.memory_bytes(held.dim, held.capacity_rows, held.row_dtype) if held is not None else 0

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
        self._check_dim(table, self._specs[table].dim, rows.shape[1])
        held = tables[table]
        if held is None:
            if keys.size:
                raise StoreFullError(self.name, table, "the table has no room: other tables took the whole budget")
            return
        try:
            held.insert(keys, rows)
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

    def _open_tables(self, table: str) -> dict[str, HostTable | None]:
        tables = self._tables
        if tables is None:
            raise StoreError(self.name, table, "the store is closed")
        return tables

    def _check_dim(self, table: str, dim: int, asked: int) -> None:
        if dim != asked:
            raise StoreError(self.name, table, f"holds vectors of {dim} floats, asked for {asked}")
