"""Tables that are in memory or mapped from files; their reads take no lock."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from kernels.errors import ReservedKeyError, RowValueError, SharedMemoryError, TableFullError
from kernels.host import HostTable, RowDtype
from serving.errors import StoreFullError
from serving.metrics import MetricSample
from serving.model.records import Combiner
from serving.storage.store import (
    Batches,
    Keys,
    Mask,
    NativeTable,
    RowPtrs,
    Store,
    StoreTable,
    TableSpec,
    Vectors,
    Weights,
    none_found,
)


class Rows(Protocol):
    """The read methods of rows that are in memory; see ``StoreTable``."""

    def __len__(self) -> int:
        """Rows held, exactly."""

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``."""

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """See ``LocalTable.fetch_pooled``."""

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """See ``StoreTable.items``."""


class NoRows:
    """The rows of a table that got no room."""

    def __len__(self) -> int:
        """None."""
        return 0

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``."""
        return none_found(keys, out)

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """See ``LocalTable.fetch_pooled``."""
        return none_found(keys, out)

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """See ``StoreTable.items``."""
        return iter(())


AnyRows = TypeVar("AnyRows", bound=Rows)


class LocalTable(StoreTable, Generic[AnyRows]):
    """A table whose rows are in memory or in a mapped file, so it can pool them; subclasses open and change it.

    Its store ``keeps_row_dtype``.

    ``_rows`` is replaced as a whole, so readers need no lock. It is None while the table is not open.
    """

    def __init__(self, store: Store, spec: TableSpec) -> None:
        """Hold no rows yet."""
        super().__init__(store, spec)
        self._rows: AnyRows | None = None

    def count(self) -> int:
        """See ``StoreTable.count``."""
        return len(self._open_rows())

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``."""
        rows = self._open_rows()
        self._check_dim(out.shape[1])
        return rows.fetch(keys, out)

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """Find rows and pool them into ``out`` in one pass; absent keys contribute zeros.

        Args:
            keys: int64[N].
            row_ptrs: int32[R + 1] or int64[R + 1], CSR offsets of the R bags into the N keys.
            out: float32[R, D]; an empty bag becomes zeros.
            combiner: see ``kernels.host.pool_rows``.
            weights: float32[N], one per key; None: every key counts the same.

        Returns:
            found: bool[N], one per key.
        """
        rows = self._open_rows()
        self._check_dim(out.shape[1])
        return rows.fetch_pooled(keys, row_ptrs, out, combiner, weights)

    def items(self, batch_rows: int = 65536) -> Batches:
        """See ``StoreTable.items``."""
        return self._open_rows().items(batch_rows)

    def samples(self) -> Iterable[MetricSample]:
        """See ``StoreTable.samples``."""
        rows = self._rows
        if rows is not None and not isinstance(rows, NoRows):
            yield MetricSample("hotrow_tier_rows", "Rows that a tier holds.", (), len(rows), is_gauge=True)
            help_text = "Size of a tier's memory or mapped file."
            yield MetricSample("hotrow_tier_bytes", help_text, (), self.size_bytes, is_gauge=True)

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The size of the table's memory, with keys and spare rows, or of its mapped file."""

    def _open_rows(self) -> AnyRows:
        rows = self._rows
        if rows is None:
            raise self._not_open()
        return rows

    def _check_same(self, dim: int, row_dtype: RowDtype) -> None:
        """Check that rows that are held already have the dimension and the row type of the table."""
        if (dim, row_dtype) != (self.spec.dim, self.spec.row_dtype):
            asked = f"asked to hold {self.spec.row_dtype} of {self.spec.dim}"
            raise self._error(f"holds {row_dtype} rows of {dim} floats, {asked}")


AnyHostTable = TypeVar("AnyHostTable", bound=HostTable | NoRows)


class HostRowsTable(LocalTable[AnyHostTable]):
    """A ``LocalTable`` whose rows are a host table."""

    #: See ``StoreTable.native``; not a property, because every request reads it once for each table.
    native: NativeTable | None = None

    def _hold(self, rows: AnyHostTable | None) -> None:
        """Replace the rows."""
        self._rows = rows
        self.native = rows if isinstance(rows, HostTable) else None

    @property
    def size_bytes(self) -> int:
        """RAM of the table with its keys and spare rows."""
        host_table = self._rows
        return host_table.stats().memory_bytes if isinstance(host_table, HostTable) else 0

    def _insert_into(self, host_table: HostTable, keys: Keys, rows: Vectors) -> int:
        """Insert rows and return how many rows were evicted; raise the host table's errors as store errors."""
        self._check_dim(rows.shape[1])
        try:
            return host_table.insert(keys, rows)
        except TableFullError as err:
            raise StoreFullError(self.store.name, self.spec.name, str(err)) from err
        except (ReservedKeyError, RowValueError, SharedMemoryError) as err:
            raise self._error(str(err)) from err
