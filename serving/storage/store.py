"""What one storage tier of embedding rows does: ``Store``, and ``StoreTable`` for one table in it.

A name is looked up once, by ``Store.table``. Every other call gets the object.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kernels.host import HostTable, RowDtype
from kernels.snapshot import Snapshot
from serving.errors import RequestError, StoreError
from serving.metrics import MetricSample
from serving.model.sparse_rows import fault_of_values
from serving.storage.marker import Marker

Keys = NDArray[np.int64]
Vectors = NDArray[np.float32]
Weights = NDArray[np.float32]
RowPtrs = NDArray[np.int32] | NDArray[np.int64]
Mask = NDArray[np.bool_]
NativeTable = HostTable | Snapshot  # what ``kernels.host.PooledLookup`` reads
Batches = Iterator[tuple[Keys, Vectors]]
AnyTable = TypeVar("AnyTable")


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
    """The source of truth of one table, as its caches see it: ``parameter_server.truth.TruthTable``."""

    @property
    def writes(self) -> bool:
        """See ``LastingStore.writes``."""

    def marker(self) -> Marker:
        """The marker now; a truth that was never loaded by Hotrow counts as changed."""

    def batches(self) -> Batches:
        """All rows now."""

    def insert_absent(self, keys: Keys, rows: Vectors) -> int:
        """Insert those of int64[N] ``keys`` that the truth does not have; returns how many."""

    def copy_to(self, cache: "StoreTable") -> None:
        """Drop the rows of an open cache and copy all rows to it, in place, while both take changes."""


class StoreTable(ABC):
    """One table in one store. Every method may be called from any thread.

    A new table contacts no tier and is not open. It is opened by ``open`` or by a method of a subclass. While it is not
    open, or after ``close``, the calls that read or write rows raise StoreError.

    Attributes:
        store: the store.
        spec: the table.
    """

    def __init__(self, store: "Store", spec: TableSpec) -> None:
        """Contact no tier."""
        self.store = store
        self.spec = spec

    @property
    @abstractmethod
    def capacity_rows(self) -> int | None:
        """Rows that the open table can hold; None where only the disk limits it."""

    @property
    def native(self) -> NativeTable | None:
        """The native table that holds all rows now; None where ``fetch`` must be called instead."""
        return None

    @property
    def evicts(self) -> bool:
        """Whether the open table makes room for new keys by evicting others."""
        return False

    @property
    def used_ratio(self) -> float | None:
        """How much of the open table's room for rows, or for changes, is taken; None where it never gets full."""
        return None

    @abstractmethod
    def open(self, rows: int) -> None:
        """Make the table ready for use. A store that does not have the table creates it empty.

        Args:
            rows: the table should have room for this many rows. A store that does not preallocate ignores it. A store
                that has less room left gives what it has; see ``capacity_rows``.

        Raises:
            StoreError: the store holds this table with another dimension, or cannot create it.
        """

    @abstractmethod
    def count(self) -> int:
        """Rows held, exactly; RocksDB reads all rows to count them."""

    @abstractmethod
    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """Read vectors into ``out``.

        Args:
            keys: int64[N]; duplicates are allowed, N may be 0.
            out: float32[N, D]; rows of absent keys become zeros. The parameter server writes the default value.

        Returns:
            found: bool[N].

        Raises:
            StoreError: the tier did not answer, or holds vectors of another dimension than D.
        """

    @abstractmethod
    def insert(self, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite rows. The last of duplicate keys wins.

        Args:
            keys: int64[N], none of them reserved.
            rows: float32[N, D].

        Raises:
            StoreFullError: there is no room, and the store evicts no rows; nothing was written.
            StoreError: another dimension, or the tier did not take the rows.
        """

    def insert_absent(self, keys: Keys, rows: Vectors) -> int:
        """Insert rows that a slower tier holds; keys that this store already holds keep their rows.

        Args:
            keys: int64[N], distinct.
            rows: float32[N, D].

        Returns:
            How many rows were inserted.

        Raises:
            StoreFullError: there is no room; nothing was written.
            StoreError: see ``insert``.
        """
        absent = ~self.fetch(keys, np.empty_like(rows))
        if absent.any():
            self.insert(keys[absent], rows[absent])
        return int(np.count_nonzero(absent))

    @abstractmethod
    def evict(self, keys: Keys) -> None:
        """Remove keys; absent keys are no error."""

    @abstractmethod
    def items(self, batch_rows: int = 65536) -> Batches:
        """All rows in batches, in the store's own order."""

    def write(self, change: "Change[StoreTable]", reached: "Reached | None" = None) -> None:
        """Make a change of this table; see ``Store.write``."""
        if change.rows is None:
            self.evict(change.keys)
        else:
            self.insert(change.keys, change.rows)

    def samples(self) -> Iterable[MetricSample]:
        """Metric samples beyond the parameter server's own; reads only what is in this process."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Stop serving the table; rows that outlive the process stay. Closing twice is allowed.

        Calls that run end normally, or raise StoreError.
        """

    def _check_dim(self, dim: int) -> None:
        """Raise StoreError if rows of ``dim`` floats do not belong to the table."""
        if dim != self.spec.dim:
            raise self._error(f"holds vectors of {self.spec.dim} floats, but {dim} came")

    def _error(self, reason: str) -> StoreError:
        return StoreError(self.store.name, self.spec.name, reason)

    def _not_open(self) -> StoreError:
        return self._error("the store is closed" if self.store.is_closed else "not an open table")


class LastingTable(StoreTable):
    """A table whose rows outlive the process. The store remembers the last load in a marker."""

    store: "LastingStore"

    @abstractmethod
    def marker(self) -> Marker | None:
        """The marker of the last load; None if no load by Hotrow has ended. The table need not be open.

        Raises:
            StoreError: the tier did not answer.
        """

    @abstractmethod
    def load(self, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """Fill the table with ``batches``, write its marker and open it.

        A killed process leaves the old rows, or a table without a marker. No reader mistakes a part for the whole.

        Args:
            batches: the rows.
            marker: what ``marker`` returns afterwards, except ``rows``, which the store counts.
            keep: insert over the rows that are there and keep every other row; False: replace the table as one act.

        Raises:
            StoreError: the tier does not take the rows.
        """

    @abstractmethod
    def write_flags(self, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None) -> None:
        """Change fields of the marker of an open table; None leaves a field as it is. Without a marker nothing happens.

        The fields reach the disk no later than the next write of rows.
        """

    def serve_as_cache(self, truth: Truth, *, keeps_rows: bool = False) -> None:
        """Make the table a cache of ``truth``; contacts no tier.

        Before ``fill`` it holds no rows. With ``keeps_rows`` it is never filled: ``open`` follows, and the table keeps
        what it has.
        """
        return

    def fill(self, truth: Truth, *, starting: bool) -> bool:
        """Bring the table up to its source of truth, after ``serve_as_cache``.

        Args:
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
        old, wanted = self.marker(), truth.marker()
        row_dtype = self.spec.row_dtype if self.store.keeps_row_dtype else "fp32"
        if old and (old.digest, old.row_dtype) == (wanted.digest, row_dtype):
            self.open(wanted.rows)
            is_current = not starting or wanted.is_current(self.store.identity)
            if not is_current:
                self.write_flags(changed=wanted.changed or None)
                truth.copy_to(self)
            return not is_current
        rows = sum(keys.size for keys, _ in truth.batches()) if wanted.changed else wanted.rows
        marker = replace(wanted, rows=rows, row_dtype=row_dtype, current_caches=None)
        self.load(truth.batches(), marker, keep=False)
        return True

    @property
    def is_whole(self) -> bool:
        """Whether no part of the table is known to be invalid; contacts no tier."""
        return True

    def reached(self) -> Mapping[str, str]:
        """The states that ``Store.write`` has kept since the last load, by partition.

        Raises:
            StoreError: the tier did not answer.
        """
        return {}


class Change(NamedTuple, Generic[AnyTable]):
    """A change of one table, which is given as a name, as a parameter server's table, or as a ``StoreTable``.

    Attributes:
        table: the table.
        keys: int64[N], none of them reserved.
        rows: float32[N, D], which are inserted over older rows, the last of duplicate keys; None: the keys are removed.
        adds: the rows are added to the rows that the source of truth holds; an absent key starts at the default value.
            A parameter server turns such a change into the rows that result, unless several processes write the store.
        default_value: every float of an absent key's row; a parameter server knows it.
    """

    table: AnyTable
    keys: Keys
    rows: Vectors | None
    adds: bool = False
    default_value: float = 0.0


class Reached(NamedTuple):
    """How far a table has come in one ordered log of changes; see ``serving.stream``.

    Attributes:
        partition: the log.
        state: what the reader of the log keeps, as text.
        is_repeatable: the changes may be made again after a crash in the middle, as insertions and removals may. So
            they need not be one batch; the state comes with the last of them.
        gives_way: requests are coming, so a store rests between the batches.
    """

    partition: str
    state: str
    is_repeatable: bool = False
    gives_way: bool = False


class Store(ABC):
    """One tier of embedding storage. Every method may be called from any thread.

    A parameter server has an ordered list of stores, fastest first. The last store is a table's source of truth. Every
    other store is a cache of it: a cache may miss rows, but it never invents a row.

    Attributes:
        name: the tier's name in metrics and messages: ``"memory"``, ``"rocksdb"``.
        keeps_row_dtype: rows are kept in ``TableSpec.row_dtype`` (``kernels.host.HostTable``) and not in float32. Such
            a store returns rows as the row type rounds them. It refuses rows that the row type cannot hold.
        has_one_writer: no other process changes rows while this process may, so a row can be read and then changed.
        is_closed: ``close`` was called.
    """

    name: str
    keeps_row_dtype: bool = False
    has_one_writer: bool = True

    def __init__(self) -> None:
        """Begin without tables."""
        self._tables: dict[str, StoreTable] = {}  # open ones; replaced as a whole, so readers take no lock
        self.is_closed = False

    @property
    def tables(self) -> Mapping[str, StoreTable]:
        """The open tables by full name; replaced as a whole, never changed in place."""
        return self._tables

    def table(self, spec: TableSpec) -> StoreTable:
        """Return the open table of this name and spec, or a new table that is not open; contacts no tier.

        Raises:
            StoreError: the store is closed, or cannot hold rows of this row type.
        """
        self._check_open(spec.name)
        open_table = self._tables.get(spec.name)
        return open_table if open_table is not None and open_table.spec == spec else self._new_table(spec)

    @abstractmethod
    def _new_table(self, spec: TableSpec) -> StoreTable:
        """See ``table``."""

    @abstractmethod
    def erase(self, table: str) -> None:
        """Remove all rows of a table, also a file that was made from it, and close the table if it is open.

        The model's own file stays. An unknown table is no error.

        Raises:
            StoreError: the store cannot remove the rows; the table may be erased again.
        """

    def write(self, changes: Sequence[Change[StoreTable]], reached: Reached | None = None) -> None:
        """Make changes of open tables, in their order. RocksDB makes all of them or none, if they fit into one batch.

        Args:
            changes: the changes.
            reached: how far their tables have come in a log; then each table has one change. A store whose rows outlive
                the process keeps it with the rows: after a crash it is there only if all of them are. RocksDB brings
                both to the disk at the next ``sync``. If several processes write the store, each makes every change,
                and the store takes it from the first. Other stores do not keep it.

        Raises:
            StoreError: see ``StoreTable.insert``; changes before the one that failed may have been made.
            RequestError: several processes write the store, and a sum is not finite.
        """
        for change in changes:
            change.table.write(change, reached)

    def close(self) -> None:
        """Refuse every later call for a table, close all tables, and release what the store holds.

        Closing twice is allowed.
        """
        self.is_closed = True
        for table in self._tables.values():
            table.close()

    def add(self, table: StoreTable) -> None:
        """Add an open table. Only tables call this and the next two, one thread at a time."""
        self.check_name(table)
        self._tables = {**self._tables, table.spec.name: table}

    def check_name(self, table: StoreTable) -> None:
        """Raise StoreError if the store is closed, or another object of this name is open."""
        name = table.spec.name
        self._check_open(name)
        other = self._tables.get(name, table)
        if other is not table:
            given, asked = (f"{spec.dim} floats of {spec.row_dtype}" for spec in (other.spec, table.spec))
            raise StoreError(self.name, name, f"is open with {given}, but {asked} were asked for: close it first")

    def remove(self, table: StoreTable) -> None:
        """Remove a table that is not open any more."""
        self._tables = {name: other for name, other in self._tables.items() if other is not table}

    def _check_open(self, table: str = "") -> None:
        if self.is_closed:
            raise StoreError(self.name, table, "the store is closed")


class LastingStore(Store):
    """A store whose rows outlive the process."""

    @property
    def identity(self) -> str:
        """Identifies this cache among all caches that a source of truth ever had."""
        return self.name

    @property
    def writes(self) -> bool:
        """Whether this process may write rows; False: only another process writes."""
        return True

    def table(self, spec: TableSpec) -> LastingTable:
        """See ``Store.table``."""
        return cast(LastingTable, super().table(spec))

    @abstractmethod
    def _new_table(self, spec: TableSpec) -> LastingTable:
        """See ``Store.table``."""

    def expect_logs(self) -> None:
        """Prepare for tables that get the changes of logs: see ``Reached``. Called before they are opened.

        Raises:
            StoreError: the tier may drop rows by itself, or did not answer.
        """
        return

    def kept_tables(self) -> Sequence[str]:
        """Full names of the tables that the store keeps on this machine, open or not."""
        return ()

    def sync(self) -> None:
        """Bring every row of ``write`` to the disk.

        Raises:
            StoreError: the disk does not take them.
        """
        return

    def catch_up(self) -> None:
        """See all rows that another process's writer acknowledged before this call.

        Raises:
            StoreError: the store cannot, and keeps what it saw before.
        """
        return


def with_sums(change: Change[AnyTable], table: str, fetch: Callable[[Keys, Vectors], Mask]) -> Change[AnyTable]:
    """Return the change that inserts the rows that an addition results in; any other change stays as it is.

    Args:
        change: the change. The deltas of duplicate keys are added one after another.
        table: the table's name, for messages.
        fetch: see ``StoreTable.fetch``: reads the rows before the change.

    Raises:
        RequestError: a sum is infinite.
    """
    if not change.adds or change.rows is None:
        return change
    keys, places = np.unique(change.keys, return_inverse=True)
    rows = np.empty((keys.size, change.rows.shape[1]), dtype=np.float32)
    found = fetch(keys, rows)
    rows[~found] = change.default_value
    with np.errstate(over="ignore"):
        np.add.at(rows, places, change.rows)
    if fault := fault_of_values(keys, rows):
        raise RequestError(f"table {table!r}: {fault}")
    return Change(change.table, keys, rows)


def none_found(keys: Keys, out: NDArray[np.float32]) -> Mask:
    """Answer that no key is found; ``out`` becomes zeros."""
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
