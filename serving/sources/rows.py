"""The rows of one table, whatever file they come from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.pooling import Pooling
from serving.model.sparse_rows import Keys, KeyType, Vectors, refuse_repeated_keys

#: float16 and bfloat16 are widened without loss. Other types would have to be rounded, or scaled by an unknown factor.
FLOAT_DTYPES: Final = "float32, float16 or bfloat16"

_NO_POOLING = Pooling()

#: The types of numbers in files without a header.
BareDtype = Literal["fp32", "fp16", "bf16"]
_BARE: dict[BareDtype, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class TableRows:
    """Keys and vectors of one table. Vectors are read on demand.

    Attributes:
        source: the file, and the tensor if the file holds several. For messages.
        rows: V, at least 1.
        dim: D, at least 1.
        keys: int64[V], maybe a view of a file. None means 0 to V - 1, the row numbers of a matrix.
        read: returns rows ``begin`` to ``end`` as a new float32[n, D].
        keys_source: the file of the keys, if it is another file.
        pooling: how training read the table, if its files say so.
    """

    source: str
    rows: int
    dim: int
    keys: Keys | None
    read: Callable[[int, int], Vectors]
    keys_source: str = ""
    pooling: Pooling = _NO_POOLING

    def check_keys(self, key_type: KeyType = "I64") -> None:
        """Raise ModelFileError if a key is reserved or repeated. This takes 8 bytes of memory per row."""
        if self.keys is not None:
            refuse_repeated_keys(self.keys_source or self.source, self.keys, key_type)

    def batches(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """Return int64[n] and float32[n, D] in the source's order, with n at most ``batch_rows``."""
        for begin in range(0, self.rows, batch_rows):
            end = min(begin + batch_rows, self.rows)
            keys = np.arange(begin, end) if self.keys is None else self.keys[begin:end]
            yield np.array(keys, dtype=np.int64), self.read(begin, end)


@dataclass(frozen=True, slots=True)
class BareRows:
    """Keys, and vectors as bytes without a header. No file says the type of their numbers.

    Attributes:
        source: the file, for messages.
        keys: int64[V], V at least 1.
        parts: uint8[n, R] each, V rows together, in the order of the keys.
        keys_source: see ``TableRows``.
    """

    source: str
    keys: Keys
    parts: Sequence[NDArray[np.uint8]]
    keys_source: str = ""

    @property
    def row_bytes(self) -> int:
        """R."""
        return int(self.parts[0].shape[1])

    def fitting(self, sizes: Sequence[int]) -> list[BareDtype]:
        """Return the types with which a network's input of these sizes, (S * D,) or (S, D), can take the rows."""
        sizes_bytes = {dtype: stored.itemsize for dtype, stored in _BARE.items()}
        dims = {dtype: self.row_bytes // size for dtype, size in sizes_bytes.items() if not self.row_bytes % size}
        return [dtype for dtype, dim in dims.items() if (sizes[-1] == dim if len(sizes) == 2 else not sizes[0] % dim)]

    def as_dtype(self, dtype: BareDtype) -> TableRows:
        """Return the rows. Raise ModelFileError if R is no multiple of a number's bytes."""
        number_bytes = _BARE[dtype].itemsize
        if self.row_bytes % number_bytes:
            reason = (
                f"expected rows of {dtype}, {number_bytes} bytes per number, found {self.row_bytes:,} bytes per key"
            )
            raise ModelFileError(self.source, reason)
        parts = [np.ascontiguousarray(part).view(_BARE[dtype]) for part in self.parts]
        return rows_of_parts(self.source, parts, self.keys, self.keys_source)


def bare_rows_of_parts(source: str, parts: Sequence[tuple[Keys, NDArray[np.uint8]]]) -> BareRows:
    """Return the keys and vectors of parts that follow each other; see ``BareRows``.

    Raise ModelFileError if there are no parts, or their rows have different sizes.
    """
    if not parts:
        raise ModelFileError(source, "expected at least one row, found none")
    if len(sizes := sorted({vectors.shape[1] for _, vectors in parts})) > 1:
        found = f"rows of {' and '.join(map(str, sizes))} bytes"
        raise ModelFileError(source, f"expected rows of one dimension in all files, found {found}")
    return BareRows(source, np.concatenate([keys for keys, _ in parts]), [vectors for _, vectors in parts])


def check_matrix(source: str, dtype: str, is_float: bool, shape: tuple[int, ...]) -> None:
    """Raise ModelFileError unless a tensor of this type and shape can be a table's vectors."""
    if not is_float or len(shape) != 2 or 0 in shape:
        raise ModelFileError(source, f"expected {FLOAT_DTYPES} [V, D], V and D at least 1, got {dtype} {list(shape)}")


def rows_of_array(source: str, vectors: NDArray[Any], keys: NDArray[Any] | None, keys_source: str = "") -> TableRows:
    """Return the rows of a float32 or float16 matrix [V, D], with integer keys [V] or None."""
    check_matrix(source, str(vectors.dtype), vectors.dtype.kind == "f" and vectors.dtype.itemsize <= 4, vectors.shape)
    return rows_of_parts(source, [vectors], None if keys is None else as_int64(keys_source, keys), keys_source)


def rows_of_parts(source: str, parts: Sequence[NDArray[Any]], keys: Keys | None, keys_source: str = "") -> TableRows:
    """Return the rows of matrices [n, D] that follow each other, of float32, float16 or, as uint16, bfloat16.

    ``keys`` are int64[V], or None. Raise ModelFileError if there are no rows, or they do not fit each other.
    """
    parts = [part for part in parts if part.size]
    if not parts:
        raise ModelFileError(source, "expected at least one row, found none")
    if len(dims := sorted({part.shape[1] for part in parts})) > 1:
        raise ModelFileError(source, f"expected rows of one dimension, found {' and '.join(map(str, dims))}")
    ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    if keys is not None and keys.size != ends[-1]:
        reason = f"expected {ends[-1]:,} keys, one per vector of {source}, got {keys.size:,}"
        raise ModelFileError(keys_source or source, reason)

    def read(begin: int, end: int) -> Vectors:
        pieces = [
            part[max(begin - first, 0) : max(end - first, 0)]
            for part, (first, last) in zip(parts, pairwise(ends), strict=True)
            if first < end and begin < last
        ]
        stored = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        if stored.dtype == np.uint16:  # the upper half of a float32
            return (stored.astype(np.uint32, order="C") << 16).view(np.float32)
        return np.array(stored, dtype=np.float32, order="C")

    return TableRows(source, ends[-1], dims[0], keys, read, keys_source)


def as_int64(source: str, keys: NDArray[Any]) -> Keys:
    """Return integer keys [V] as int64. Raise ModelFileError if they are something else."""
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ModelFileError(source, f"expected integer keys [V], got {keys.dtype} {list(keys.shape)}")
    if keys.dtype == np.uint64 and keys.size and keys.max() > np.iinfo(np.int64).max:
        row = int(np.argmax(keys > np.iinfo(np.int64).max))
        raise ModelFileError(source, f"row {row:,}: key {keys[row]} is not an int64")
    return keys if keys.dtype == np.int64 else keys.astype(np.int64)
