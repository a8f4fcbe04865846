"""What the stores whose tables lie in memory, or are mapped, share: tables by name, read without a lock."""

from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from serving.errors import StoreError
from serving.model.records import Combiner
from serving.storage.store import Keys, Mask, RowPtrs, Vectors, Weights, none_found


class ReadTable(Protocol):
    """The reading half of a table; see ``Store`` and ``PooledStore`` for the calls."""

    @property
    def dim(self) -> int:
        """D."""

    def __len__(self) -> int:
        """Rows held, exact."""

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """See ``PooledStore.fetch_pooled``."""

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``."""


Table = TypeVar("Table", bound=ReadTable)


class NamedTables(Generic[Table]):
    """The reading half of a ``PooledStore``; how tables come and go is the subclass's.

    ``_tables`` is replaced as a whole, never changed in place, so that readers need no lock. It is None once the store
    is closed. A table without room is None in it, and reads as one that holds no keys.
    """

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

    def tables(self) -> list[str]:
        """See ``Store.tables``."""
        return sorted(self._open_tables(""))

    def count(self, table: str) -> int:
        """See ``Store.count``; exact."""
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
        """See ``PooledStore.fetch_pooled``."""
        held = self._held_table(table)
        if held is None:
            return none_found(keys, out)
        self._check_dim(table, held.dim, out.shape[1])
        return held.fetch_pooled(keys, row_ptrs, out, combiner, weights)

    def items(self, table: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``."""
        held = self._held_table(table)
        return held.items(batch_rows) if held is not None else iter(())

    def _open_tables(self, table: str) -> dict[str, Table | None]:
        tables = self._tables
        if tables is None:
            raise StoreError(self.name, table, "the store is closed")
        return tables

    def _held_table(self, table: str) -> Table | None:
        return self._open_tables(table).get(table)

    def _check_dim(self, table: str, dim: int, asked: int) -> None:
        if dim != asked:
            raise StoreError(self.name, table, f"holds vectors of {dim} floats, asked for {asked}")
