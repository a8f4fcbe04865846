"""Native host kernels: use ``kernels.host``. N keys, R bags of keys, D embedding_vec_size, V keys of an index."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kernels.host import OverflowPolicy, RowDtype

class HostTable:
    """The native part of ``kernels.host.HostTable``."""

    @overload
    def __init__(self, path: bytes, writes: bool) -> None: ...
    @overload
    def __init__(self, path: bytes, dim: int, capacity_rows: int, row_dtype: RowDtype, source: str) -> None: ...
    @overload
    def __init__(
        self,
        dim: int,
        capacity_rows: int,
        row_dtype: RowDtype = "fp32",
        overflow_policy: OverflowPolicy | None = None,
        target_rows: int | None = None,
    ) -> None: ...
    def _shared_source(self) -> tuple[str, bool]: ...
    def _mark_shared_changed(self) -> None: ...
    def _shared_inode(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def capacity_rows(self) -> int: ...
    @property
    def row_dtype(self) -> RowDtype: ...
    @property
    def overflow_policy(self) -> OverflowPolicy | None: ...
    @staticmethod
    def memory_bytes(
        dim: int, capacity_rows: int, row_dtype: RowDtype = "fp32", overflow_policy: OverflowPolicy | None = None
    ) -> int:
        """Return the bytes of a table's index, rows, spare rows and stamps.

        Args:
            dim: embedding_vec_size, 1 to 65,536.
            capacity_rows: the most keys held at a time, 1 to 3,500,000,000.
            row_dtype: how rows are kept; see ``HostTable``.
            overflow_policy: what a full table does; see ``HostTable``.

        Raises:
            ValueError: a number is out of range, or ``row_dtype`` or ``overflow_policy`` is unknown.
        """

    def fetch(self, keys: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """Read rows into ``out``.

        Args:
            keys: int64[N], C-contiguous. Duplicates are allowed, and N may be 0.
            out: float32[N, D], C-contiguous and writable. Every row is written; rows of absent keys become zeros.

        Returns:
            found: bool[N].

        Raises:
            ReservedKeyError: a key is reserved. ``out`` is unchanged.
            TypeError: an argument is not an array, or has another dtype.
            ValueError: an argument has another shape or is not C-contiguous, or ``out`` is read-only or not aligned.
        """

    def fetch_pooled(
        self,
        keys: npt.NDArray[np.int64],
        row_ptrs: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        out: npt.NDArray[np.float32],
        combiner: str,
        weights: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Read bags of rows and combine each bag into one row of ``out``.

        Rows are added in key order, in float32, one after the other, starting from zero. The result has the same bits
        as ``pool_rows`` of the rows gathered in that order, except NaN payloads. An absent key counts as a row of
        zeros. With weights, each row is first multiplied by its weight in float32.

        Args:
            keys: int64[N], C-contiguous, bag after bag.
            row_ptrs: int32[R + 1] or int64[R + 1]. Bag r is ``keys[row_ptrs[r]:row_ptrs[r + 1]]``.
            out: float32[R, D], C-contiguous and writable. An empty bag becomes zeros.
            combiner: ``"sum"``; ``"mean"``: the sum divided by the number of keys in the bag; ``"sqrtn"``: the sum
                divided by the square root of that number.
            weights: float32[N], one weight per key, or None. ``"sum"`` becomes the weighted sum. ``"mean"`` divides it
                by the sum of the weights, ``"sqrtn"`` by the square root of the sum of the squared weights (added in
                key order), as TensorFlow's ``tf.nn.embedding_lookup_sparse`` does. If the divisor is 0, the bag
                becomes zeros.

        Returns:
            found: bool[N], per key.

        Raises:
            ReservedKeyError: a key is reserved. ``out`` is unchanged.
            TypeError: an argument is not an array, or has another dtype.
            ValueError: an argument has another shape or is not C-contiguous; ``out`` is read-only or not aligned; the
                combiner is unknown; or ``row_ptrs`` does not start at 0, falls, or does not end at N.
        """

    def holds(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return bool[N]: which of ``keys`` the table holds. Reads no row, and raises as ``fetch`` does."""

    def insert(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> int:
        """Insert rows, and overwrite the rows of keys that are present.

        A table with an ``overflow_policy`` makes room for new keys first. It never evicts a key of the same call.

        Args:
            keys: int64[N], C-contiguous. If a key occurs more than once, its last row wins.
            rows: float32[N, D], C-contiguous, with values that the table's ``row_dtype`` can hold.

        Returns:
            The number of keys evicted to make room.

        Raises:
            RowValueError: ``row_dtype`` cannot hold a value. Nothing was written.
            TableFullError: there is no room for the new keys, or the call alone has more keys than the table can hold.
                Nothing was written.
            ReservedKeyError: a key is reserved. Nothing was written.
            TypeError: an argument is not an array, or has another dtype.
            ValueError: an argument has another shape or is not C-contiguous, or ``rows`` is not aligned.
        """

    def evict(self, keys: npt.NDArray[np.int64]) -> int:
        """Remove keys. Absent keys are ignored.

        Args:
            keys: int64[N], C-contiguous.

        Returns:
            The number of keys removed.

        Raises:
            ReservedKeyError: a key is reserved. Nothing was removed.
            TypeError: ``keys`` is not an array, or has another dtype.
            ValueError: ``keys`` has another shape or is not C-contiguous.
        """

    def __len__(self) -> int: ...
    def _read_items(self, cursor: int, max_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int]: ...
    def _stats(self) -> tuple[int, int, int, int, float, int, int, int]: ...

class KeyIndex:
    """The native part of ``kernels.host.KeyIndex``."""

    def __init__(self, capacity_rows: int = 1024) -> None: ...
    def find(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row numbers int64[N] of ``keys``, -1 for absent keys."""

    def find_or_insert(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row numbers int64[N] of ``keys``; absent keys get the next numbers."""

    def keys(self) -> npt.NDArray[np.int64]:
        """Return the keys int64[V] in the order of their row numbers."""

    def __len__(self) -> int: ...

class Snapshot:
    """The native part of ``kernels.snapshot.Snapshot``."""

    def __init__(self, path: bytes) -> None: ...
    @property
    def dim(self) -> int: ...
    @property
    def row_dtype(self) -> RowDtype: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def source(self) -> bytes: ...
    @property
    def identity(self) -> bytes: ...
    def fetch(self, keys: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """Read rows into ``out`` as ``HostTable.fetch`` does, or raise SnapshotError if the file is damaged."""

    def fetch_pooled(
        self,
        keys: npt.NDArray[np.int64],
        row_ptrs: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        out: npt.NDArray[np.float32],
        combiner: str,
        weights: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Pool bags as ``HostTable.fetch_pooled`` does, or raise SnapshotError if the file is damaged."""

    def read_keys(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the keys int64[count] of rows ``first`` and up, in the order of writing, and check their pages."""

    def read_items(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the keys int64[count] and rows float32[count, D] from ``first`` up, and check their pages."""

    def _populate(self, begin: int, bytes: int) -> None: ...
    def check_index(self) -> None:
        """Read the whole index and raise SnapshotError if it is damaged."""

    def check_content(self) -> None:
        """Read the whole file, check every byte, find every key, and raise SnapshotError if anything is damaged."""

    def __len__(self) -> int: ...

class PooledLookup:
    """Finds and pools the bags of several tables, with the GIL released once.

    A request of 16,384 keys or more is shared between the threads of ``set_lookup_threads``. May be used from any
    thread.

    Args:
        dims: D of each of the T tables.
        slots: S of each table.
        combiners: of each table; see ``HostTable.fetch_pooled``.
        counts: of each table, int64[2 + K + 1], to which each lookup adds: the keys, if the table held all of them; the
            nanoseconds; and 1 to the bucket of its time.
        bounds_ns: the K upper bounds of the buckets, ascending; the last bucket has none.

    Raises:
        TypeError: an argument has another type.
        ValueError: the arguments are not of the same tables, or a value is out of range.
    """

    def __init__(
        self,
        dims: Sequence[int],
        slots: Sequence[int],
        combiners: Sequence[str],
        counts: Sequence[npt.NDArray[np.int64]],
        bounds_ns: Sequence[int],
    ) -> None: ...
    def fetch(
        self,
        tables: Sequence[HostTable | Snapshot | None],
        keys: npt.NDArray[np.int64],
        row_ptrs: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        out: npt.NDArray[np.float32],
        samples: int,
        weights: Sequence[npt.NDArray[np.float32] | None] | None = None,
        bags: Sequence[int] | None = None,
    ) -> list[tuple[int, npt.NDArray[np.bool_] | None]]:
        """Pool the bags of B samples, with the bits of ``HostTable.fetch_pooled`` of each table.

        Args:
            tables: the tables now; None, or a table of another dim, is not read.
            keys: int64[N], C-contiguous, table after table.
            row_ptrs: int32[B * S + T] or int64[B * S + T], one CSR per table, each from 0, table after table.
            out: float32, C-contiguous and writable: the vectors float32[B, S, D] of each table, table after table.
                Each table's vectors begin at the next multiple of 16 floats, and so does the end of the array.
            samples: B, at least 1.
            weights: of each table float32[N of the table] or None; None: no table has weights.
            bags: how many bags each table has, in place of B * S. Its vectors are float32[bags, D].

        Returns:
            For each table that does not hold all of its keys: its place, and which keys were found, bool[N of the
            table], or None if the table was not read. A snapshot that cannot be read is not read.

        Raises:
            ReservedKeyError: a key is reserved. ``out`` is unchanged.
            TypeError: an argument has another type.
            ValueError: an argument has another shape or is not C-contiguous, or ``row_ptrs`` are not CSRs of the keys.
        """

def gather_bags(
    vectors: Sequence[npt.NDArray[np.float32]],
    bags: Sequence[npt.NDArray[np.int32]],
    out: Sequence[npt.NDArray[np.float32]],
) -> None:
    """Copy float32[R, D] to float32[N, D] by bags int32[N], as ``numpy.take``, for several tables in one call.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument has another shape or is not C-contiguous, or a bag is not one of the R vectors.
    """

class SnapshotWriter:
    """The native part of ``kernels.snapshot.write_snapshot``."""

    def __init__(self, descriptor: int, dim: int, capacity_rows: int, row_dtype: RowDtype = "fp32") -> None: ...
    def append(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> None:
        """Write the next rows, whose keys must be new."""

    def finish(self, source: bytes) -> None:
        """Write the rest of the file, header last; ``source`` is 32 bytes that identify the source of the rows."""

    def __len__(self) -> int: ...

def fetch_tables(
    tables: Sequence[HostTable], keys: Sequence[npt.NDArray[np.int64]], out: Sequence[npt.NDArray[np.float32]]
) -> npt.NDArray[np.bool_]:
    """Read rows of several tables, as ``HostTable.fetch`` of each; return which keys were found, table after table."""

def pool_rows(
    rows: npt.NDArray[np.float32],
    row_ptrs: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
    combiner: str,
    weights: npt.NDArray[np.float32] | None = None,
) -> None:
    """Combine bags of consecutive ``rows``, with the bits of ``HostTable.fetch_pooled``; ``out`` must not overlap."""

def row_bytes(dim: int, row_dtype: RowDtype) -> int:
    """Return the bytes of an encoded row; see ``encode_rows``."""

def encode_rows(rows: npt.NDArray[np.float32], row_dtype: RowDtype) -> npt.NDArray[np.uint8]:
    """Encode rows as a table keeps them, little-endian and packed: scale (int8, uint8), offset (uint8), D columns."""

def decode_rows(encoded: npt.NDArray[np.uint8], row_dtype: RowDtype, out: npt.NDArray[np.float32]) -> None:
    """Decode encoded rows, with the bits of ``round_rows`` of the original rows; ``out`` must not overlap."""

def round_rows(rows: npt.NDArray[np.float32], row_dtype: RowDtype, out: npt.NDArray[np.float32]) -> None:
    """Write to ``out`` what a table of ``row_dtype`` returns for ``rows``, bit for bit; ``out`` may be ``rows``."""

class RequestPacker:
    """Packs a request of bags into ``bytes``, as ``gpu_cache.request.RequestBuffer`` describes.

    Args:
        bytes: uint8[N], large enough for the largest request.
        slots: S of each of the T tables.
        combiners: the number of each table's combiner.
        max_norms: each table's largest norm, or 0.
        max_samples: the most B.
        max_keys: the most keys, over all tables.
        dense_dim: F.
    """

    def __init__(
        self,
        bytes: npt.NDArray[np.uint8],
        slots: Sequence[int],
        combiners: Sequence[int],
        max_norms: Sequence[float],
        max_samples: int,
        max_keys: int,
        dense_dim: int,
    ) -> None: ...
    def pack(
        self,
        tables: Sequence[object],
        weights: Sequence[npt.NDArray[np.float32] | None] | None,
        dense: npt.NDArray[np.float32] | None,
        first_floats: npt.NDArray[np.int64],
    ) -> tuple[int, int, int] | None:
        """Write a request; return its samples, the items of a launch and its bytes, or None if anything is wrong.

        Args:
            tables: for each table the attributes ``keys``, int64[N], and ``row_ptrs``, int32[B * S + 1].
            weights: for each table float32[N] or None.
            dense: float32[B, F].
            first_floats: int64[T] or longer: the first float of each table's rows in the answer.
        """

def pack_rows(
    bytes: npt.NDArray[np.uint8], at: int, rows: Sequence[npt.NDArray[np.float32]], places: npt.NDArray[np.int32]
) -> None:
    """Copy rows of several tables into ``bytes``, each row at a multiple of 16 bytes.

    Args:
        bytes: uint8[N].
        at: the first byte, a multiple of 16.
        rows: for each table float32[M, D].
        places: int32[...]; gets the place of each row, table after table, in units of 16 bytes.
    """

def first_outside(keys: npt.NDArray[np.int64], smallest: int, largest: int) -> int:
    """Return the position of the first key below ``smallest`` or above ``largest``, or N if there is none."""

def split_by_table(
    keys: npt.NDArray[np.int64], row_ptrs: npt.NDArray[np.int32] | npt.NDArray[np.int64], slots: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], list[int], list[int]] | None:
    """Split sample-major keys by table.

    Args:
        keys: int64[N], sample-major: sample 0's keys of table 0, of table 1, ..., then sample 1's; N at most 2^31 - 1.
        row_ptrs: either one CSR over all slots of all samples, B * S + 1 offsets, or one CSR per table, one after the
            other, B * S + T offsets. The length decides; with one table both are the same.
        slots: the number of slots of each of the T tables; S is their sum.

    Returns:
        keys int64[N], table-major (with one table, the given array); row_ptrs int32[B * S + T], one CSR per table; for
        each table its number of keys, and the most keys of one sample. None if the offsets are not CSRs of the keys.
    """

def read_keys(
    tensors: Tensors,
    dense: int | None,
    keys: int,
    row_ptrs: int | None,
    slots: Sequence[int],
    smallest: int,
    largest: int,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int32], list[int]] | None:
    """Copy and check the dense features and the keys of a request.

    Args:
        tensors: the request's tensors.
        dense: which tensor has the dense features, float32; None: there are none.
        keys: which tensor has the keys, sample-major integers.
        row_ptrs: which tensor has the offsets, integers; None: each slot of each sample has one key.
        slots: see ``split_by_table``.
        smallest: the smallest key that is right.
        largest: the largest key that is right.

    Returns:
        the dense features, flat; and as ``split_by_table`` keys, row_ptrs, and for each table the most keys of one
        sample. None if a dense feature is not finite, a key is wrong, or the offsets are not CSRs of the keys.

    Raises:
        ValueError: a tensor is missing or has another datatype, or so many offsets are not those of whole samples.
    """

def decode_norm(
    data: bytes, offset: int, numbers: int, slots: int, has_wide_keys: bool, has_sums: bool, most: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64], int, str]:
    """Decode records of HugeCTR's Norm format; see ``training.data.norm``.

    Args:
        data: part of a file.
        offset: where the first record begins.
        numbers: the labels and dense features of a record.
        slots: S.
        has_wide_keys: keys are int64, not uint32.
        has_sums: records are framed by their length and a checksum.
        most: decode at most so many records.

    Returns:
        For n whole records: float32[n * numbers], row_ptrs int64[n * S + 1], keys int64[N], and the bytes that they
        take. Then what is wrong with the next record; empty if nothing is, or if it is not whole.
    """

class TrainingTable:
    """The rows of one embedding table in training: int64 key -> float32[D] weights and the states of their optimizer.

    A table is dynamic, or has fixed rows. In a dynamic table a key gets a row when training has looked it up
    ``admit_after`` times; until then it counts as absent. With ``max_rows``, a new row replaces the row that training
    has not looked up for the longest time, and a call cannot have more distinct keys. With ``fixed_rows``, key k is row
    k, and all rows exist. First weights depend only on the key and ``seed``.

    Every method may be called from any thread; calls take turns.

    Args:
        name: for messages.
        dim: D, 1 to 65,536.
        row_dtype: of the weights, ``"fp32"``, ``"fp16"`` or ``"bf16"``. They are computed in float32, and rounded to
            the nearest value. States are float32.
        rule: whose states the rows have; see ``update_tables``.
        initial_states: the value of each state of a new row.
        initializer: ``("uniform", low, high)``, ``("normal", mean, std)`` or ``("constant", value, 0)``.
        seed: of the first weights.
        fixed_rows: V, or None for a dynamic table.
        shard: ``(r, n)``: of the fixed rows, the table has only those of the keys r, r + n, r + 2 n, ....
        max_rows: the most rows, or None.
        admit_after: at least 1.
        default_value: every float of an absent key's vector.
        max_norm: rows with a larger L2 norm are scaled to it when they are read; None: none are.

    Raises:
        ValueError: a number is out of range, a name is unknown, or a table with fixed rows has another bound.
        MemoryError: the system refuses the memory.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        row_dtype: RowDtype = "fp32",
        rule: str = "sgd",
        initial_states: Sequence[float] = (),
        initializer: tuple[str, float, float] = ("uniform", -0.05, 0.05),
        seed: int = 0,
        fixed_rows: int | None = None,
        shard: tuple[int, int] = (0, 1),
        max_rows: int | None = None,
        admit_after: int = 1,
        default_value: float = 0.0,
        max_norm: float | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def rule(self) -> str: ...
    @property
    def initial_states(self) -> list[float]: ...
    @property
    def first_states(self) -> npt.NDArray[np.float32]:
        """The states of a new row, float32[S]. A state has D floats; a state of ``"row_wise_ada_grad"`` has one."""

    @property
    def step(self) -> int:
        """The last step in which a row was updated; 0: none."""

    def __len__(self) -> int: ...
    def find(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row numbers int64[N] of ``keys``, -1 for absent keys. Nothing is counted."""

    def changed_rows(self, since: int = -1) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows whose last update was after a step, or is not known. -1: of all rows.

        Numbers ascend. With ``max_rows`` the row that was looked up least recently comes first.
        """

    def read(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.float32],
        npt.NDArray[np.float32],
        npt.NDArray[np.int64],
        npt.NDArray[np.uint64],
    ]:
        """Return copies of rows: keys, vectors [N, D], states [N, S], the steps of their last updates, their slots.

        Raises:
            IndexError: there is no such row.
        """

    def write(
        self,
        keys: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.float32],
        states: npt.NDArray[np.float32],
        last_steps: npt.NDArray[np.int64],
        slots: npt.NDArray[np.uint64],
    ) -> None:
        """Insert or overwrite rows, in the form that ``read`` returns. With ``max_rows``, the last was used last.

        Raises:
            IndexError: the table has fixed rows, and a key is none of them.
            ValueError: an array has another shape, or there are more keys than ``max_rows``.
        """

    def clear(self) -> None:
        """Remove all rows and sightings. Fixed rows get their first weights again."""

    def set_states(self, rule: str, initial_states: Sequence[float]) -> None:
        """Give every row the states of a rule, in place of those that it has."""

    def sightings(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the keys that have no row yet, and how often each was looked up."""

    def write_sightings(self, keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        """Undo ``sightings``, in a table that has none."""

class ArrayRows:
    """Rows in an array, for ``look_up_bags``. Key k is row k.

    Args:
        rows: float32[V, D], C-contiguous. It is not copied.
        name: for messages.
        max_norm: as in ``TrainingTable``.
    """

    def __init__(self, rows: npt.NDArray[np.float32], name: str, max_norm: float | None = None) -> None: ...

class BagLookup:
    """Bags of keys that were looked up in one table, and their rows. Made by ``look_up_bags``."""

    @property
    def table(self) -> TrainingTable | ArrayRows: ...

def look_up_bags(
    tables: Sequence[TrainingTable | ArrayRows],
    keys: Sequence[npt.NDArray[np.int64]],
    row_ptrs: Sequence[npt.NDArray[np.int32] | npt.NDArray[np.int64] | None],
    combiners: Sequence[str],
    weights: Sequence[npt.NDArray[np.float32] | None],
    slots: Sequence[int | npt.NDArray[np.int64]],
    trains: Sequence[bool],
) -> list[tuple[BagLookup, npt.NDArray[np.float32]]]:
    """Find the rows of several lookups, and pool them, in one call without the GIL.

    Args:
        tables: of each lookup. A table may have several lookups.
        keys: of each lookup, int64[N].
        row_ptrs: the CSR offsets of each lookup's R bags; None: one key per bag.
        combiners: of each lookup; see ``HostTable.fetch_pooled``.
        weights: of each lookup, float32[N] or None; see ``HostTable.fetch_pooled``.
        slots: S of each lookup: bag r is slot ``r % S`` of its sample. Or the slot of each key, int64[N].
        trains: of each lookup: keys are counted and get rows. Otherwise the table does not change.

    Returns:
        of each lookup what the functions below need, and the pooled bags float32[R, D]. An absent key counts as a
        vector of the default value.

    Raises:
        ReservedKeyError: a key is reserved. No table has changed.
        IndexError: a key is none of a table's fixed rows or of an array's rows. Other tables may have new rows.
        ValueError: an argument has another shape; or a table has ``max_rows``, and fewer than this call's distinct
            keys.
        TypeError: an argument has another type.
    """

def sum_row_gradients(
    lookups: Sequence[BagLookup], gradients: Sequence[npt.NDArray[np.float32]]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Turn the gradients float32[R, D] of pooled bags into those of the rows.

    Returns:
        of each lookup int64[U], the distinct keys with a row, in the order of their rows, and float32[U, D].
    """

def merge_gradients(
    lookups: Sequence[BagLookup], gradients: Sequence[npt.NDArray[np.float32]]
) -> tuple[BagLookup, npt.NDArray[np.float32]]:
    """Sum the gradients of each row over all lookups of one table.

    Args:
        lookups: of the table, all as ``look_up_bags`` returned them, or all as this function did.
        gradients: of the pooled bags of each lookup, float32[R, D].

    Returns:
        a lookup of the U distinct rows, one per bag, and the sums float32[U, D]. ``update_tables`` takes both.

    Raises:
        ValueError: there is no lookup, lookups are of both kinds, or a gradient has another shape.
        TypeError: lookups are of an array, or of several tables.
    """

def merge_lookups(lookups: Sequence[BagLookup]) -> tuple[BagLookup, list[npt.NDArray[np.int64]]]:
    """Join lookups of rows of one table, as ``merge_gradients`` returned them.

    Returns:
        a lookup of the U distinct rows, one per bag; and for each lookup int64[U], the bag that has the row, or -1.

    Raises:
        ValueError: there is no lookup, or one does not come from ``merge_gradients``.
        TypeError: lookups are of an array, or of several tables.
    """

def array_gradients(
    lookups: Sequence[BagLookup], gradients: Sequence[npt.NDArray[np.float32]], divisor: float = 1.0
) -> list[npt.NDArray[np.float32]]:
    """Turn the gradients of pooled bags into those of all rows of arrays, float32[V, D] of each lookup."""

def keys_by_owner(
    keys: npt.NDArray[np.int64], processes: int, owner: int = -1, distinct: bool = True
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Group keys by the process that owns their rows.

    Args:
        keys: int64[N].
        processes: P.
        owner: the process that owns all rows. -1: process ``key mod P`` owns the row of a key.
        distinct: keep each key once.

    Returns:
        the keys int64[U], process after process; how many each process owns, int64[P]; the place of each of the N keys
        among them, int64[N]; and the first place of each of them among the N keys, int64[U].
    """

def weight_gradients(
    lookups: Sequence[BagLookup], gradients: Sequence[npt.NDArray[np.float32]]
) -> list[npt.NDArray[np.float32]]:
    """Turn the gradients float32[R, D] of pooled bags into those of the weights, float32[N] of each lookup."""

def update_tables(
    lookups: Sequence[BagLookup],
    gradients: Sequence[npt.NDArray[np.float32]],
    rule: str,
    update_type: str,
    learning_rate: float,
    step: int,
    parameters: tuple[float, float, float],
    scaler: float = 1.0,
) -> None:
    """Sum the gradients of each row over all lookups, and move the rows, in one call without the GIL.

    The bits do not depend on the number of threads. A row that was replaced since its lookup is left out.

    Args:
        lookups: of tables.
        gradients: of the pooled bags of each lookup, float32[R, D].
        rule: ``"sgd"``, ``"momentum_sgd"``, ``"nesterov"``, ``"adam"``, ``"ada_grad"``, ``"row_wise_ada_grad"`` or
            ``"ftrl"``.
        update_type: ``"Local"``, ``"Global"`` or ``"LazyGlobal"``; see ``training.optimizers``.
        learning_rate: of this step.
        step: counted from 1.
        parameters: of the rule; see ``UpdateRule.parameters`` of ``training.tables.rules``.
        scaler: gradients are divided by it.

    Raises:
        ValueError: a name is unknown, a gradient has another shape, a table has the states of another rule, or some
            lookups of a table come from ``merge_gradients`` and others do not.
        TypeError: a lookup is one of an array.
    """

def lookup_threads() -> int:
    """Return how many threads may work on one lookup."""

def set_lookup_threads(threads: int) -> None:
    """Set how many threads may work on one lookup, in every table of this process.

    A lookup of 16,384 keys or more is shared between its caller and the threads of one small pool. The pool takes one
    lookup at a time; a lookup that finds the pool busy runs on its caller alone. The answer has the same bits. The
    default is the environment's ``HOTROW_LOOKUP_THREADS``, or else one thread per usable core, at most 8. Affinity and
    the CPU quota of a container decide which cores are usable.

    Args:
        threads: 1 to 64, including the caller. With 1, lookups are not shared.

    Raises:
        ValueError: ``threads`` is out of range.
    """

def instruction_set() -> str: ...
def use_avx2(enabled: bool) -> bool: ...

class FeatureTransform:
    """Raw features to keys and dense numbers, in one call; see ``kernels/host/features/transform.hpp``.

    First ``add_*`` is called once for each slot and each dense column, each followed by ``limit`` if the feature is a
    list. ``run`` may then be called from any thread.
    """

    def __init__(self, columns: int, slots: int, dense_dim: int) -> None:
        """Make a transform without features of so many columns, for S slots and F dense columns."""

    def add_hash(self, column: int, slot: int, offset: int, buckets: int, hash: str, salt: tuple[int, int]) -> None:
        """Add ``offset`` to the hash modulo ``buckets``; 0: to its low 63 bits."""

    def add_vocabulary(self, column: int, slot: int, offset: int, path: str, unknown_buckets: int) -> None:
        """Add ``offset + unknown_buckets`` to the place of a value. Raises ValueError if the file cannot be used."""

    def add_bucketize(self, column: int, slot: int, offset: int, boundaries: Sequence[float]) -> None:
        """Add ``offset`` to how many ascending boundaries are at most the number."""

    def add_identity(self, column: int, slot: int, offset: int, size: int) -> None:
        """Add ``offset`` to the value, which must be less than ``size``; 0: any key."""

    def add_cross(
        self, parts: Sequence[tuple[int, Sequence[float], bool]], slot: int, offset: int, buckets: int
    ) -> None:
        """Hash the values of several columns together: a text, an integer, or the bucket of a number with boundaries.

        The third item of a part says that the values are text. An integer is then its decimal digits.
        """

    def add_dense(
        self, column: int, place: int, lowest: float, highest: float, takes_log: bool, mean: float, scale: float
    ) -> None:
        """Clip if ``lowest < highest``, take log(1 + x), subtract ``mean`` and divide by ``scale``."""

    def limit(self, most_values: int, keep: str) -> None:
        """Take at most so many values of a sample: the ``"first"`` or the ``"last"``; else more are a fault."""

    def fill(self, column: int, kind: str, text: str, integer: int, number: float) -> None:
        """Use a value of the kind ``"text"``, ``"integer"`` or ``"float"`` in place of a column's missing values."""

    def spread(self, slots: int) -> None:
        """Give the values of the list that was added last slots of their own, from its slot on."""

    def weigh(self, feature: int) -> None:
        """Give the dense feature that was added last a number for each key of a list feature, in places of its own."""

    def run(self, columns: Sequence[tuple[object, ...] | None], samples: int) -> tuple[Any, ...]:
        """Transform the samples.

        Args:
            columns: see ``read``.
            samples: B.

        Returns:
            keys int64[N], row_ptrs int32[B * S + 1], dense float32[B, F], and twice int64 for each feature in the order
            in which they were added: how many values its vocabulary has, and does not have. If a value cannot be
            transformed: the number of the feature, the row, the value and why.

        Raises:
            TypeError, ValueError: the columns do not fit.
        """

    def read(
        self,
        columns: Sequence[tuple[object, ...] | None],
        samples: int,
        tables: Sequence[int],
        users: npt.NDArray[np.int32] | None,
        tensors: Tensors | None = None,
    ) -> tuple[Any, ...]:
        """Transform the samples, with the keys of each table together.

        A slot has the rows of its column; a cross, the most rows of its columns. The bags of a table are those of its
        slots with the fewest rows, row by row, and then those of its slots with more rows.

        Args:
            columns: ``("text", bytes uint8[T], begins int64[V], ends int64[V], valid, splits)``, or ``("integer",
                values int64[V], valid, splits)``, or ``("float", values float32[V], valid, splits)``. ``valid`` is
                bool[V] or None, ``splits`` int64[R + 1] or None. Or ``("tensor", number, lists)``: ``lists`` is None,
                True if the first extent says how many lists of one length there are, or a tuple with the number of the
                tensor of their offsets.
                A column has a row for each sample, one row for all, or a row for each user. A column that no feature
                reads may be None.
            samples: B.
            tables: the slots of each table.
            users: int32[B], the user of each sample, from 0 in steps of 0 or 1; None: one user.
            tensors: those of columns.

        Returns:
            dense float32[B, F]; keys int64[N], table after table; row_ptrs int32, a CSR for each table; how many
            offsets each table has; of each table int32[B * S], the bag of each slot of each sample, or None if each has
            its own, sample-major; of each table a number of keys that no sample exceeds; and twice int64 for each
            feature, as ``run``. Or the four items of ``run`` if a value cannot be transformed. With the reason
            ``"offsets"``, the first item is the number of a column whose offsets are wrong, and the third how many
            values it has.

        Raises:
            TypeError, ValueError: the columns do not fit.
        """

class Tensors:
    """The tensors of a request, in its body."""

    def texts(self, tensor: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where the texts of a tensor of texts begin and end in its bytes."""

def numbers_in_json(text: bytes, are_numbered: bool = False) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Return a JSON text with 0 in place of each whole number outside of strings, and the numbers.

    Numbers with a sign or more than 18 digits stay. Valid texts with the same form differ in these numbers alone. With
    ``are_numbered``, the form has 0, 1, 2, ... in place of the numbers.
    """

def split_message(data: bytes, most_fields: int) -> tuple[int, tuple[bytes, str, str, str, bytes] | None]:
    """Take a ``ModelInferRequest`` of KServe v2 apart, which may be any bytes.

    Returns:
        how many fields it has, with those of its tensors and of their contents, counted up to ``most_fields + 1``. And
        its bytes except the id and the raw contents, the model's name and version, the id, and the raw contents one
        after another. Messages that are equal in the first have tensors of the same names, datatypes, shapes and sizes.
        None instead if there are more fields, or if the bytes are no message, or have protobuf's groups.
    """

def tensor_forms(
    places: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64] | None:
    """Return int64[T, 4]: the datatype of each tensor, its items, its bytes and its first extent.

    Args:
        places: int64[T, 4]: the datatype of each tensor, where its extents begin in the numbers, how many they are, and
            where its bytes are. The datatypes are 0: texts, each of which comes after its length as uint32; 1: int64;
            2: int32; 3: uint32; 4: float32; 5: float64; 6: bool. All are little-endian.
        numbers: int64[K].
        size: the bytes of all tensors.

    Returns:
        None if an extent, a product of extents or a number of bytes is not possible.

    Raises:
        TypeError, ValueError: an argument has another form.
    """

def read_tensors(forms: npt.NDArray[np.int64], body: bytes, begin: int) -> Tensors | tuple[int, int]:
    """Read the tensors that are one after another in a body, from ``begin`` to its end.

    Args:
        forms: what ``tensor_forms`` returns.
        body: the bytes, which stay in memory as long as the tensors.
        begin: where the tensors begin.

    Returns:
        The tensors. Or the number of the first tensor whose bytes are not its texts, and what ``find_texts`` returns.

    Raises:
        TypeError, ValueError: the forms do not fit the body.
    """

def find_texts(bytes: npt.NDArray[np.uint8], count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | int:
    """Return where ``count`` texts begin and end, each of which comes after its length as little-endian uint32.

    If the bytes end too early or go on, return how many texts were found, or ``count + 1``.
    """

def cut_texts(
    bytes: npt.NDArray[np.uint8],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    valid: npt.NDArray[np.bool_] | None,
    separator: str,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut each text at a separator; return where the parts begin and end, and the splits int64[V + 1]."""

def integers_of(
    bytes: npt.NDArray[np.uint8],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    valid: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.int64] | int:
    """Return the integers that texts stand for, 0 for a missing text; or the place of a text that stands for none."""

def floats_of(
    bytes: npt.NDArray[np.uint8],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    valid: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float32] | int:
    """Return the numbers that texts stand for, 0 for a missing text; or the place of a text that stands for none."""

def vocabulary_file(bytes: npt.NDArray[np.uint8], begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Any:
    """Return the bytes of the file of a vocabulary, or the places of two equal texts."""
