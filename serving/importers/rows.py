"""The rows of one table, whatever file they come from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.sparse_rows import Keys, Vectors, refuse_repeated_keys

#: float16 and bfloat16 are widened without loss. Other types would have to be rounded, or scaled by an unknown factor.
FLOAT_DTYPES: Final = "float32, float16 or bfloat16"


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
    """

    source: str
    rows: int
    dim: int
    keys: Keys | None
    read: Callable[[int, int], Vectors]
    keys_source: str = ""

    def check_keys(self) -> None:
        """Raise ModelFileError if a key is reserved or repeated. This takes 8 bytes of memory per row."""
        if self.keys is not None:
            refuse_repeated_keys(self.keys_source or self.source, self.keys, "I64")

    def batches(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """Return int64[n] and float32[n, D] in the source's order, with n at most ``batch_rows``."""
        for begin in range(0, self.rows, batch_rows):
            end = min(begin + batch_rows, self.rows)
            keys = np.arange(begin, end) if self.keys is None else self.keys[begin:end]
            yield np.array(keys, dtype=np.int64), self.read(begin, end)


def check_matrix(source: str, dtype: str, is_float: bool, shape: tuple[int, ...]) -> None:
    """Raise ModelFileError unless a tensor of this type and shape can be a table's vectors."""
    if not is_float or len(shape) != 2 or 0 in shape:
        raise ModelFileError(source, f"expected {FLOAT_DTYPES} [V, D], V and D at least 1, got {dtype} {list(shape)}")


def rows_of_array(source: str, vectors: NDArray[Any], keys: NDArray[Any] | None, keys_source: str = "") -> TableRows:
    """Return the rows of a float32 or float16 matrix [V, D], with integer keys [V] or None."""
    check_matrix(source, str(vectors.dtype), vectors.dtype.kind == "f" and vectors.dtype.itemsize <= 4, vectors.shape)
    rows, dim = vectors.shape
    if keys is not None:
        keys = _as_int64(keys_source, keys)
        if keys.size != rows:
            raise ModelFileError(keys_source, f"expected {rows:,} keys, one per vector of {source}, got {keys.size:,}")

    def read(begin: int, end: int) -> Vectors:
        return np.array(vectors[begin:end], dtype=np.float32, order="C")

    return TableRows(source, rows, dim, keys, read, keys_source)


def _as_int64(source: str, keys: NDArray[Any]) -> Keys:
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ModelFileError(source, f"expected integer keys [V], got {keys.dtype} {list(keys.shape)}")
    if keys.dtype == np.uint64 and keys.size and keys.max() > np.iinfo(np.int64).max:
        row = int(np.argmax(keys > np.iinfo(np.int64).max))
        raise ModelFileError(source, f"row {row:,}: key {keys[row]} is not an int64")
    return keys if keys.dtype == np.int64 else keys.astype(np.int64)
