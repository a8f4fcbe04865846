"""What the stores over host tables share, beside reading: how big a table is, and what can be wrong with an insert."""

from typing import TypeVar

from kernels.errors import ReservedKeyError, RowValueError, TableFullError
from kernels.host import HostTable, RowDtype
from serving.errors import StoreError, StoreFullError
from serving.storage.named_tables import NamedTables
from serving.storage.store import Keys, TableSpec, Vectors

Table = TypeVar("Table", bound=HostTable)


class HostTables(NamedTables[Table]):
    """Tables that are host tables; how they come and go is the subclass's."""

    def memory_bytes(self, table: str) -> int:
        """RAM the table takes: its keys, rows and spare rows; 0 for an unknown table."""
        held = self._held_table(table)
        return held.stats().memory_bytes if held is not None else 0

    def _insert_rows(self, table: str, held: Table, keys: Keys, rows: Vectors) -> int:
        """Insert into a table; returns how many rows it evicted. Its errors become the store's."""
        self._check_dim(table, held.dim, rows.shape[1])
        try:
            return held.insert(keys, rows)
        except TableFullError as err:
            raise StoreFullError(self.name, table, str(err)) from err
        except (ReservedKeyError, RowValueError) as err:
            raise StoreError(self.name, table, str(err)) from err

    def _check_form(self, spec: TableSpec, dim: int, row_dtype: RowDtype) -> None:
        """Check that a table of this form is the one that ``spec`` asks for."""
        self._check_dim(spec.name, dim, spec.dim)
        if row_dtype != spec.row_dtype:
            raise StoreError(self.name, spec.name, f"holds {row_dtype} rows, asked to hold {spec.row_dtype}")
