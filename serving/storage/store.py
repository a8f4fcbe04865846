"""The Store protocol: what one storage tier of embedding rows does."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.host import HostTable, RowDtype
from kernels.snapshot import Snapshot
from serving.metrics import MetricSample
from serving.model.records import Combiner
from serving.model.sparse_model import SparseModel
from serving.storage.marker import Marker

Keys = NDArray[np.int64]
Vectors = NDArray[np.float32]
Weights = NDArray[np.float32]
RowPtrs = NDArray[np.int32] | NDArray[np.int64]
Mask = NDArray[np.bool_]
NativeTable = HostTable | Snapshot  # what ``kernels.host.PooledLookup`` reads
Batches = Iterator[tuple[Keys, Vectors]]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What a store must know of a table to hold it.

    Attributes:
        name: full name, ``ModelConfig.full_name``.
        dim: D, floats per row.
        key_bytes: width of a key in stores that keep raw key bytes: 8 (int64 models) or 4 (uint32 models).
        row_dtype: the row type of a store that ``keeps_row_dtype``; other stores keep float32.
    """

    name: str
    dim: int
    key_bytes: Literal[4, 8] = 8
    row_dtype: RowDtype = "fp32"


class Truth(Protocol):
    """The source of truth of one table, as its caches see it."""

    @property
    def writes(self) -> bool:
        """See ``Store.writes``."""

    def marker(self) -> Marker:
        """The marker now; a truth that was never loaded by Hotrow counts as changed."""

    def batches(self) -> Batches:
        """All rows now."""

    def take(self, keys: Keys, rows: Vectors) -> int:
        """Insert those of int64[N] ``keys`` that the truth does not have; returns how many."""

    def refill(self, cache: "Store") -> None:
        """Drop the rows of an open cache and copy all rows to it, in place, while both take changes."""


class Store(Protocol):
    """One tier of embedding storage. Every method may be called from any thread.

    A parameter server has an ordered list of stores, fastest first. The last store is a table's source of truth. Every
    other store is a cache of it: a cache may miss rows, but it never invents a row.

    Attributes:
        name: the tier's name in metrics and messages: ``"memory"``, ``"rocksdb"``.
        pools: ``fetch_pooled`` works. Such a store ``keeps_row_dtype``.
        outlives_process: rows survive the process, and ``marker`` and ``load`` work.
        reads_model_files: ``serve_file`` works: the store serves all rows of a table from a file.
        writes: this process may write rows; False: only another process writes.
        never_waits: reads wait for no disk, network or other process. A page of a snapshot may have to be read first.
    """

    pools: bool = False
    outlives_process: bool = False
    reads_model_files: bool = False
    never_waits: bool = False

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def identity(self) -> str:
        """Identifies this cache among all caches that a source of truth ever had."""
        return self.name

    @property
    def writes(self) -> bool:
        """See the class."""
        return True

    @property
    def keeps_row_dtype(self) -> bool:
        """Whether rows are kept in ``TableSpec.row_dtype`` (``kernels.host.HostTable``) and not in float32.

        Such a store returns rows as the row type rounds them. It refuses rows that the row type cannot hold.
        """

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """Make a table ready for use. A store that does not have the table creates it empty.

        Args:
            spec: the table.
            capacity_rows: rows that the table should have room for. A store that does not preallocate ignores it. A
                store that has less room left gives what it has (see ``capacity_rows``).

        Raises:
            StoreError: the store holds this table with another dimension, or cannot create it.
        """

    def capacity_rows(self, table: str) -> int | None:
        """Rows the table can hold; None where only the disk limits it. 0 for an unknown table."""

    def count(self, table: str) -> int:
        """Rows held, exactly; 0 for an unknown table. RocksDB reads all rows to count them."""

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """Read vectors into ``out``.

        Args:
            table: full name; an unknown table holds no keys.
            keys: int64[N]; duplicates are allowed, N may be 0.
            out: float32[N, D]; rows of absent keys become zeros. The parameter server writes the default value.

        Returns:
            found: bool[N].

        Raises:
            StoreError: the tier did not answer, or holds vectors of another dimension than D.
        """

    def fetch_pooled(
        self,
        table: str,
        keys: Keys,
        row_ptrs: RowPtrs,
        out: Vectors,
        combiner: Combiner,
        weights: Weights | None = None,
    ) -> Mask:
        """Find rows and pool them into ``out`` in one pass; absent keys contribute zeros. Needs ``pools``.

        Args:
            table: full name of an open table.
            keys: int64[N].
            row_ptrs: int32[R + 1] or int64[R + 1], CSR offsets of the R bags into the N keys.
            out: float32[R, D]; an empty bag becomes zeros.
            combiner: see ``kernels.host.pool_rows``.
            weights: float32[N], one per key; None: every key counts the same.

        Returns:
            found: bool[N], one per key.
        """
        raise TypeError(f"{self.name} does not pool rows")

    def native_tables(self, tables: Sequence[str]) -> Sequence[NativeTable | None]:
        """The native tables that hold all rows of these tables now; None where ``fetch`` must be called instead.

        Raises:
            StoreError: the store is closed.
        """
        return [None] * len(tables)

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite rows. The last of duplicate keys wins.

        Args:
            table: full name of an open table.
            keys: int64[N], none of them reserved.
            rows: float32[N, D].

        Raises:
            StoreFullError: there is no room, and the store evicts no rows; nothing was written.
            StoreError: unknown table, another dimension, or the tier did not take the rows.
        """

    def add(self, table: str, keys: Keys, rows: Vectors) -> int:
        """Insert rows that a slower tier holds; keys that this store already holds keep their rows.

        Args:
            table: full name of an open table.
            keys: int64[N], distinct.
            rows: float32[N, D].

        Returns:
            How many rows were added.

        Raises:
            StoreFullError: there is no room; nothing was written.
            StoreError: see ``insert``.
        """
        absent = ~self.fetch(table, keys, np.empty_like(rows))
        if absent.any():
            self.insert(table, keys[absent], rows[absent])
        return int(np.count_nonzero(absent))

    def evict(self, table: str, keys: Keys) -> None:
        """Remove keys; absent keys and an unknown table are no error."""

    def drop_table(self, table: str) -> None:
        """Forget a table and all its rows; an unknown table is no error."""

    def close_table(self, table: str) -> None:
        """Stop serving a table; rows that outlive the process stay; an unknown table is no error."""
        return

    def items(self, table: str, batch_rows: int = 65536) -> Batches:
        """All rows in batches, in the store's own order."""

    def close(self) -> None:
        """Release what the store holds. Closing twice is allowed; any other call afterwards raises StoreError."""

    # Capacity and metrics: most stores keep these defaults.

    def announce(self, wanted: Sequence[tuple[TableSpec, int]], leaving: Set[str] = frozenset()) -> None:
        """Announce the tables that will be opened together, and the rows of each, so that they share the room fairly.

        Open tables and tables announced before keep their room, except tables that are ``leaving`` soon.
        """
        return

    def samples(self, table: str) -> Iterable[MetricSample]:
        """Metric samples of a table beyond the parameter server's own; reads only what is in this process."""
        return ()

    # A store that ``outlives_process``.

    def kept_tables(self) -> Sequence[str]:
        """Full names of the tables that the store keeps on this machine, open or not."""
        return ()

    def marker(self, table: str) -> Marker | None:
        """The marker of a table's last load; None if no load by Hotrow has ended. The table need not be open.

        Raises:
            StoreError: the tier did not answer.
        """
        return None

    def load(self, spec: TableSpec, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """Fill a table with ``batches``, write its marker and open it.

        A killed process leaves the old rows, or a table without a marker. No reader mistakes a part for the whole.

        Args:
            spec: the table.
            batches: the rows.
            marker: what ``marker`` returns afterwards, except ``rows``, which the store counts.
            keep: insert over the rows that are there and keep every other row; False: replace the table as one act.

        Raises:
            StoreError: the tier does not take the rows.
        """
        raise TypeError(f"{self.name} does not outlive the process")

    def write_flags(
        self, table: str, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None
    ) -> None:
        """Change fields of an open table's marker; None leaves a field as it is. Without a marker nothing happens.

        The fields reach the disk no later than the next write of rows.
        """
        return

    def catch_up(self) -> None:
        """See all rows that another process's writer acknowledged before this call.

        Raises:
            StoreError: the store cannot, and keeps what it saw before.
        """
        return

    # A cache that ``outlives_process``.

    def serve_as_cache(self, spec: TableSpec, truth: "Truth", *, keeps_rows: bool = False) -> None:
        """Open a table as a cache of ``truth``; asks nobody.

        Before ``fill`` it holds no rows. With ``keeps_rows`` it is never filled: ``open_table`` follows, and the table
        keeps what it has.
        """
        return

    def fill(self, spec: TableSpec, truth: "Truth", *, starting: bool) -> bool:
        """Bring a table up to its source of truth, after ``serve_as_cache``.

        Args:
            spec: the table.
            truth: the source of truth.
            starting: a model is being loaded, or the cache missed a write. Only then does the fill replace rows of
                other files, or all rows if the truth says that the cache is not current. Rows without a marker are
                kept, and inserted into the truth if it does not have them.

        Returns:
            Whether rows were written.

        Raises:
            StoreUnreachableError: the tier cannot be asked now.
            StoreError: the tier does not take the rows.
        """
        held, wanted = self.marker(spec.name), truth.marker()
        row_dtype = spec.row_dtype if self.keeps_row_dtype else "fp32"
        if held and (held.digest, held.row_dtype) == (wanted.digest, row_dtype):
            self.open_table(spec, wanted.rows)
            is_current = not starting or wanted.is_current(self.identity)
            if not is_current:
                self.write_flags(spec.name, changed=wanted.changed or None)
                truth.refill(self)
            return not is_current
        rows = sum(keys.size for keys, _ in truth.batches()) if wanted.changed else wanted.rows
        marker = replace(wanted, rows=rows, row_dtype=row_dtype, current_caches=None)
        self.load(spec, truth.batches(), marker, keep=False)
        return True

    def is_whole(self, table: str) -> bool:
        """Whether no part of an open table is known to be invalid; asks nobody."""
        return True

    # A store that ``reads_model_files``.

    def serve_file(self, spec: TableSpec, model: SparseModel) -> None:
        """Open a table with all rows of ``model`` in place of what it held.

        Raises:
            StoreError: the store cannot hold them.
            ModelFileError: the model is damaged, or a value does not fit ``spec.row_dtype``.
        """
        raise TypeError(f"{self.name} does not serve model files")

    def erase_table(self, table: str) -> None:
        """Forget a table, and remove the file that was made of it; the model's own file stays.

        Raises:
            StoreError: the file cannot be removed.
        """
        self.drop_table(table)


def none_found(keys: Keys, out: NDArray[np.float32]) -> Mask:
    """Answer for an unknown table: ``out`` becomes zeros, and no key is found."""
    out[...] = 0.0
    return np.zeros(keys.size, dtype=np.bool_)


def bags_with(
    row_ptrs: RowPtrs, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the bags that contain one of the ascending positions, their CSR offsets, and all of their positions."""
    bags = np.unique(np.searchsorted(row_ptrs, positions, side="right") - 1).astype(np.int64, copy=False)
    begins, ends = (row_ptrs[which].astype(np.int64) for which in (bags, bags + 1))
    bag_ptrs = np.zeros(bags.size + 1, dtype=np.int64)
    np.cumsum(ends - begins, out=bag_ptrs[1:])
    return bags, bag_ptrs, np.repeat(begins - bag_ptrs[:-1], ends - begins) + np.arange(bag_ptrs[-1])


def has_rows(store: Store, table: str) -> bool:
    """Whether an open table has any row; reads one row, where ``count`` may read all."""
    return any(keys.size for keys, _ in store.items(table, batch_rows=1))
