"""Tables by name, for the stores that keep them in memory or map them from files; reads take no lock."""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from kernels.errors import ReservedKeyError, RowValueError, SharedMemoryError, TableFullError
from kernels.host import HostTable, RowDtype
from serving.errors import StoreError, StoreFullError
from serving.metrics import MetricSample
from serving.model.records import Combiner
from serving.storage.store import (
    Batches,
    Keys,
    Mask,
    NativeTable,
    RowPtrs,
    Store,
    TableSpec,
    Vectors,
    Weights,
    none_found,
)


class ReadTable(Protocol):
    """The read methods of a table; see ``Store``."""

    @property
    def dim(self) -> int:
        """D."""

    def __len__(self) -> int:
        """Rows held, exactly."""

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """See ``Store.fetch_pooled``."""

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``."""


Table = TypeVar("Table", bound=ReadTable)
AnyHostTable = TypeVar("AnyHostTable", bound=HostTable)


class TableStore(Store, Generic[Table]):
    """The read methods of a store that pools; subclasses open, change and drop tables.

    ``_tables`` is replaced as a whole and never changed in place, so readers need no lock. It is None once the store is
    closed. A table without capacity is None in it and holds no keys.
    """

    pools = True

    _NAME: ClassVar[str]

    def __init__(self) -> None:
        """Begin without tables."""
        self._tables: dict[str, Table | None] | None = {}

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return self._NAME

    @property
    def keeps_row_dtype(self) -> bool:
        """See ``Store.keeps_row_dtype``."""
        return True

    def count(self, table: str) -> int:
        """See ``Store.count``."""
        held = self._held_table(table)
        return len(held) if held is not None else 0

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""
        held = self._held_table(table)
        if held is None:
            return none_found(keys, out)
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
        """See ``Store.fetch_pooled``."""
        held = self._held_table(table)
        if held is None:
            return none_found(keys, out)
        self._check_dim(table, held.dim, out.shape[1])
        return held.fetch_pooled(keys, row_ptrs, out, combiner, weights)

    def items(self, table: str, batch_rows: int = 65536) -> Batches:
        """See ``Store.items``."""
        held = self._held_table(table)
        return held.items(batch_rows) if held is not None else iter(())

    def samples(self, table: str) -> Iterable[MetricSample]:
        """See ``Store.samples``; none for a table that is not open."""
        held = (self._tables or {}).get(table)
        if held is not None:
            yield MetricSample("hotrow_tier_rows", "Rows that a tier holds.", (), len(held), is_gauge=True)
            size_bytes = self._size_bytes(held)
            yield MetricSample("hotrow_tier_bytes", "Size of a tier's memory or mapped file.", (), size_bytes, True)

    def _size_bytes(self, held: Table) -> int:
        """The size of a table's memory or mapped file."""
        raise NotImplementedError

    def _open_tables(self, table: str) -> dict[str, Table | None]:
        tables = self._tables
        if tables is None:
            raise StoreError(self.name, table, "the store is closed")
        return tables

    def _held_table(self, table: str) -> Table | None:
        return self._open_tables(table).get(table)

    def _check_dim(self, table: str, dim: int, asked: int) -> None:
        if dim != asked:
            raise StoreError(self.name, table, f"holds vectors of {dim} floats, but {asked} were asked for")


class HostTableStore(TableStore[AnyHostTable]):
    """A ``TableStore`` whose tables are host tables."""

    never_waits = True

    def native_tables(self, tables: Sequence[str]) -> Sequence[NativeTable | None]:
        """See ``Store.native_tables``."""
        return list(map(self._open_tables("").get, tables))

    def memory_bytes(self, table: str) -> int:
        """RAM of a table with its keys and spare rows; 0 for an unknown table."""
        held = self._held_table(table)
        return self._size_bytes(held) if held is not None else 0

    def _size_bytes(self, held: AnyHostTable) -> int:
        return held.stats().memory_bytes

    def _insert_rows(self, table: str, held: AnyHostTable, keys: Keys, rows: Vectors) -> int:
        """Insert rows into a table and return how many rows it evicted; raise the table's errors as store errors."""
        self._check_dim(table, held.dim, rows.shape[1])
        try:
            return held.insert(keys, rows)
        except TableFullError as err:
            raise StoreFullError(self.name, table, str(err)) from err
        except (ReservedKeyError, RowValueError, SharedMemoryError) as err:
            raise StoreError(self.name, table, str(err)) from err

    def _check_spec(self, spec: TableSpec, dim: int, row_dtype: RowDtype) -> None:
        """Check that a held table has the dimension and the row type of ``spec``."""
        self._check_dim(spec.name, dim, spec.dim)
        if row_dtype != spec.row_dtype:
            raise StoreError(self.name, spec.name, f"holds {row_dtype} rows, asked to hold {spec.row_dtype}")
