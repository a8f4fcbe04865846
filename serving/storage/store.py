"""The Store protocol: what one storage tier of embedding rows must do."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kernels.host import RowDtype
from serving.metrics import MetricSample as Reading
from serving.model.records import Combiner
from serving.model.sparse_model import SparseModel

Keys = NDArray[np.int64]
Vectors = NDArray[np.float32]
Weights = NDArray[np.float32]
RowPtrs = NDArray[np.int32] | NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What a store must know of a table to hold it.

    Attributes:
        name: full name, ``ModelConfig.full_name``.
        dim: D, floats per row.
        key_bytes: width of a key in stores that keep raw key bytes: 8 (int64 models) or 4 (uint32 models).
        row_dtype: the form in which a store that ``keeps_row_dtype`` keeps the rows; any other keeps float32.
    """

    name: str
    dim: int
    key_bytes: Literal[4, 8] = 8
    row_dtype: RowDtype = "fp32"


class Store(Protocol):
    """One tier of embedding storage. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """What this tier is called in metrics and messages: ``"memory"``, ``"rocksdb"``."""

    @property
    def keeps_row_dtype(self) -> bool:
        """Whether rows are kept in the form of ``TableSpec.row_dtype`` (``kernels.host.HostTable``), not in float32.

        Such a store gives rows as that form rounds them, and refuses to insert those that it cannot hold.
        """

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """Make a table ready for use, creating it empty if the store does not have it.

        Args:
            spec: the table.
            capacity_rows: how many rows it should have room for; a store that needs no such number ignores it, and one
                that has not so much room left gives what it has (``capacity_rows`` tells).

        Raises:
            StoreError: the store holds this table with another dimension, or cannot create it.
        """

    def capacity_rows(self, table: str) -> int | None:
        """Rows the table can hold; None where only the disk limits it. 0 for an unknown table."""

    def tables(self) -> list[str]:
        """Full names of the open tables, sorted."""

    def count(self, table: str) -> int:
        """Rows held, exactly; 0 for an unknown table. A store may have to read all of them and says so."""

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """Read vectors into ``out``.

        Args:
            table: full name; an unknown table holds no keys.
            keys: int64[N]; duplicates are allowed, N may be 0.
            out: float32[N, D]; rows of absent keys become zeros (the default value is written once, by the
                parameter server).

        Returns:
            found: bool[N].

        Raises:
            StoreError: the tier did not answer, or holds vectors of another dimension than D.
        """

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite rows; of duplicates in one call the last wins.

        Args:
            table: full name of an open table.
            keys: int64[N], none of them reserved.
            rows: float32[N, D].

        Raises:
            StoreFullError: no room, and the store drops no rows to make some; nothing was written.
            StoreError: unknown table, another dimension, or the tier did not take the rows.
        """

    def evict(self, table: str, keys: Keys) -> int | None:
        """Remove keys; returns how many were held, or None where the tier cannot tell."""

    def drop_table(self, table: str) -> None:
        """Forget a table and all its rows; an unknown table is no error."""

    def items(self, table: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """All rows in batches, in the store's own order."""

    def close(self) -> None:
        """Release what the store holds. Closing twice is allowed; any other call afterwards raises StoreError."""


def none_found(keys: Keys, out: NDArray[np.float32]) -> Mask:
    """What a store answers about an unknown table: ``out`` becomes zeros, and none of ``keys`` is found."""
    out[...] = 0.0
    return np.zeros(keys.size, dtype=np.bool_)


def has_rows(store: Store, table: str) -> bool:
    """Whether a table has any row; looks for one, where ``count`` may read all."""
    return any(keys.size for keys, _ in store.items(table, batch_rows=1))


@runtime_checkable
class PooledStore(Store, Protocol):
    """A store that can pool bags of rows in the same pass that finds them. It ``keeps_row_dtype``."""

    def fetch_pooled(
        self,
        table: str,
        keys: Keys,
        row_ptrs: RowPtrs,
        out: Vectors,
        combiner: Combiner,
        weights: Weights | None = None,
    ) -> Mask:
        """Pool rows into ``out``; absent keys contribute zeros.

        Args:
            table: full name of an open table.
            keys: int64[N].
            row_ptrs: int32[R + 1] or int64[R + 1], CSR offsets of the R bags into the N keys.
            out: float32[R, D]; an empty bag becomes zeros.
            combiner: see ``kernels.host.pool_rows``.
            weights: float32[N], one per key; None: every key counts alike.

        Returns:
            found: bool[N], one per key.
        """


# What the record of a load ends in once rows were inserted that did not come from the files it names.
CHANGED = "+changed"


def replaced(digest: str) -> str:
    """What the record of a load says of rows that took the place of those of the files ``digest``: of no other rows."""
    return f"{digest}+{secrets.token_hex(8)}{CHANGED}"


# A seal names a table of one database, in its first half, and the last change of it that was noted there.
SEAL_CHARS = 32


def new_seal(old: str | None) -> str:
    """The seal of the next change after ``old``; None: of a table that has none yet."""
    return (secrets.token_hex(SEAL_CHARS // 4) if old is None else sealed_by(old)) + secrets.token_hex(SEAL_CHARS // 4)


def sealed_by(seal: str) -> str:
    """What all seals of one table in one database begin with."""
    return seal[: SEAL_CHARS // 2]


def files_of(record: str) -> str:
    """The digest of the files that a record of a load names, whatever changed since."""
    return record.partition("+")[0]


def has_rows_of(record: str | None, digest: str) -> bool:
    """Whether the record of a load is that of one with ``digest``, or of one with it and changes since."""
    return record is not None and digest in (record, files_of(record))


@runtime_checkable
class MeasuredStore(Store, Protocol):
    """A store that has something of its own to show on the metrics page."""

    def readings(self, table: str) -> Iterable[Reading]:
        """What it shows of a table, with the labels that say more than the table and the tier; asks nobody."""


@runtime_checkable
class SharingStore(Store, Protocol):
    """A store whose tables share a bound."""

    def share(self, wanted: Sequence[tuple[TableSpec, int]]) -> None:
        """Say which tables are about to be opened together, and how many rows each has: they share what is left.

        Tables that are open, or were announced before, keep what they have. A table that is then not opened after all
        keeps its share until ``drop_table``.
        """


@runtime_checkable
class ReservingStore(Store, Protocol):
    """A store that must know how many rows a table will have before it is loaded."""

    def reserve(self, spec: TableSpec, rows: int) -> None:
        """Say what ``bulk_load`` will bring, before ``loaded_from`` is asked: the table, and how many rows at most."""


@runtime_checkable
class DurableStore(Store, Protocol):
    """A store whose rows survive the process, and which remembers what it was loaded from."""

    def loaded_from(self, table: str) -> str | None:
        """The digest given to the last ``bulk_load`` of this table that ran to its end; None if there is none.

        It ends in ``CHANGED`` after ``mark_changed``.
        """

    def mark_changed(self, table: str) -> None:
        """Record that rows are about to be inserted which are not of the files that an open table was loaded from.

        A faster tier is then filled from this one at the next start, and not from the files. A table without the record
        of a load stays without.
        """

    def bulk_load(
        self, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], digest: str, *, unless_loaded: bool = False
    ) -> None:
        """Replace a table, of whatever dimension it was, by ``batches`` as one act, and open it.

        A process killed in the middle leaves either the old rows or a table whose ``loaded_from`` is None, never a
        part of the new rows that passes for the whole.

        Args:
            spec: the table.
            batches: all of its rows.
            digest: what ``loaded_from`` is to tell.
            unless_loaded: where processes may load the table at once, and another has loaded it with ``digest`` by the
                end, its rows stay, with all changes since.
        """


@runtime_checkable
class ForgetfulStore(Store, Protocol):
    """A store that may come back as it was before some of its changes; a slower one behind it has them all."""

    def be_slowest(self) -> None:
        """Learn that no store is behind it: of a table that has lost rows no change is taken from now on.

        Such a table is loaded anew at the next start, and the change would be gone with the rest.
        """

    def note_change(self, table: str, keys: Keys) -> None:
        """Note among the rows of an open table that those of int64[N] ``keys`` have changed, once they have.

        From then on ``fetch`` raises StoreLostError where it comes to rows without the note, until they are loaded
        anew.

        Raises:
            StoreError: the tier did not take the note.
        """

    def refill(self, table: str, batches: Iterator[tuple[Keys, Vectors | None]], digest: str) -> bool:
        """Bring back what an open table has lost; nothing else of it is touched.

        Processes that share the store do not bring back the same rows at once, and a row that another one changes
        meanwhile is not replaced by an older one. Changes through this store go on while a batch is waited for; the
        batches must tell of them, and none may come between the last batch and the end.

        Args:
            table: its full name.
            batches: all rows; not begun unless some are lost. None in place of rows: these keys have none, until a
                later batch has some.
            digest: as in ``DurableStore.bulk_load``.

        Returns:
            whether rows were lost.

        Raises:
            StoreError: it is to be tried again later: another process is at it, or has changed rows meanwhile.
        """


@runtime_checkable
class WitnessStore(Store, Protocol):
    """A store that remembers over the end of its process whether the tiers before it have all of its changes.

    It also has a seal of each table, that of the change noted last. Tiers that have that change bear the same one. As
    it is renewed with every change, a store that was put back as it was before, from a copy, is known by it.
    """

    def note_others(self, table: str, are_behind: bool, seal: str | None = None) -> None:
        """Note that the tiers before it may lack a change of a table, or its removal, or that they have all.

        That they lack one is on the disk as soon as the next change of the table is, and never without its ``seal``.

        Args:
            table: its full name.
            are_behind: whether they may lack one.
            seal: that of the change, the ``next_seal``; None leaves the table's as it is.

        Raises:
            StoreError: it cannot.
        """

    def seal(self, table: str) -> str | None:
        """The table's seal, which is made if there is none; None where another process writes.

        Raises:
            StoreError: it cannot be read or made.
        """

    def next_seal(self, table: str) -> str:
        """The seal of the next change, the same until that is noted.

        Raises:
            StoreError: there can be none, as another process writes.
        """

    def others_are_behind(self, table: str) -> bool:
        """What was noted last; False where another process writes: it may be about to give them the change."""


@runtime_checkable
class SealedStore(DurableStore, Protocol):
    """A store that can be before several databases, and tells of each whose changes it has, up to which."""

    def put_seal(self, table: str, seal: str, former: str | None, has_changed: bool) -> None:
        """Bear a seal of an open table, where it bears none of the same database, or the ``former`` one.

        Any other stays: that part of the table lacks changes, or has some that the database has not any more.

        Args:
            table: its full name; a part without the record of a load stays without.
            seal: see ``WitnessStore``.
            former: the database's seal before.
            has_changed: do what ``mark_changed`` does as well.
        """

    def seals(self, table: str) -> set[str]:
        """All seals that a part of the table bears; the table need not be open."""


@runtime_checkable
class FollowingStore(Store, Protocol):
    """A store that may see what another process writes to it some time later."""

    def catch_up(self) -> None:
        """See all that was acknowledged before this was called.

        Raises:
            StoreError: it cannot; the store goes on with what it saw before.
        """


@runtime_checkable
class SourceStore(Store, Protocol):
    """A store that serves all rows of a table from a file: the model's own, or one that it makes of it."""

    def load(self, spec: TableSpec, model: SparseModel) -> None:
        """Open a table with the rows of ``model``, all of them, in place of what it held.

        Raises:
            StoreError: the store cannot hold them.
            ModelFileError: the model is damaged, or a value does not fit ``spec.row_dtype``.
        """

    def erase_table(self, table: str) -> None:
        """Forget a table, as ``drop_table`` does, and remove the file that was made of it; the model's own stays.

        Raises:
            StoreError: the file cannot be removed.
        """
