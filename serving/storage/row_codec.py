"""Row types in storage: rows as bytes of values, rows as a row type rounds them, and the rounding error."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.errors import RowValueError
from kernels.host import RowDtype, decode_rows, encode_rows, round_rows, row_bytes
from serving.config.row_dtypes import ROW_WISE
from serving.errors import RowTypeError, StoreError
from serving.storage.hps_layout import storable
from serving.storage.store import Keys, Store, TableSpec, Vectors


class RowCodec:
    """The values of one table in one store. Every method may be called from any thread.

    Attributes:
        spec: the table.
        row_dtype: the row type of the values, see ``kernels.host.encode_rows``.
        value_bytes: size of one value.
    """

    def __init__(self, store: str, spec: TableSpec, row_dtype: RowDtype | None) -> None:
        """Choose the form of the values.

        Args:
            store: the store's name, for messages.
            spec: the table.
            row_dtype: the row type that the store keeps; None is float32, whatever the table's row type.

        Raises:
            StoreError: ``row_dtype`` is not the table's, so a row would differ between tiers.
        """
        if row_dtype not in (None, spec.row_dtype):
            reason = f"a table of {spec.row_dtype} rows in a store that keeps {row_dtype} rows"
            raise StoreError(store, spec.name, reason)
        self.row_dtype: RowDtype = row_dtype or "fp32"
        self.value_bytes = row_bytes(spec.dim, self.row_dtype)
        self._store = store
        self.spec = spec

    def encode(self, keys: Keys, rows: Vectors) -> NDArray[np.uint8]:
        """Encode rows as values.

        Args:
            keys: int64[N].
            rows: float32[N, D].

        Returns:
            uint8[N, value_bytes]. Contiguous float32 rows are returned as a view.

        Raises:
            StoreError: a key does not fit the table's width, or a value the row type; the message names the key.
        """
        fits = storable(keys, self.spec.key_bytes)
        if fits is not None:
            reason = f"key {keys[np.argmin(fits)]} does not fit {self.spec.key_bytes} bytes"
            raise StoreError(self._store, self.spec.name, reason)
        rows = np.ascontiguousarray(rows)
        if self.row_dtype == "fp32":
            return rows.view(np.uint8).reshape(rows.shape[0], self.value_bytes)
        try:
            return encode_rows(rows, self.row_dtype)
        except RowValueError as err:
            raise _named_by_key(self._store, self.spec.name, keys, err) from err

    def decode(self, values: bytes) -> Vectors:
        """Decode N values into float32[N, D], which is read-only for float32 values."""
        if self.row_dtype == "fp32":
            return np.frombuffer(values, dtype=np.float32).reshape(-1, self.spec.dim)
        encoded = np.frombuffer(values, dtype=np.uint8).reshape(-1, self.value_bytes)
        rows = np.empty((encoded.shape[0], self.spec.dim), dtype=np.float32)
        decode_rows(encoded, self.row_dtype, rows)
        return rows

    def expectation(self) -> str:
        """Return the length of a value for messages: ``4 floats are 16``."""
        form = "" if self.row_dtype == "fp32" else f" as {self.row_dtype}"
        return f"{self.spec.dim} floats{form} are {self.value_bytes}"


def value_list(encoded: NDArray[np.uint8]) -> list[bytes]:
    """Return the bytes of each value of uint8[N, value_bytes]."""
    listed: list[bytes] = encoded.view(f"V{encoded.shape[1]}").reshape(-1).tolist()
    return listed


def rounded(store: str, table: str, row_dtype: RowDtype, keys: Keys, rows: Vectors) -> Vectors:
    """Round rows as a host table of ``row_dtype`` does; fp32 returns ``rows`` itself.

    Args:
        store: the store that the rows come from or go to, for messages.
        table: the table's full name.
        row_dtype: the row type.
        keys: int64[N].
        rows: float32[N, D], C-contiguous.

    Raises:
        StoreError: the row type cannot hold a value; the message names its key.
    """
    if row_dtype == "fp32":
        return rows
    out = np.empty_like(rows)
    try:
        round_rows(rows, row_dtype, out)
    except RowValueError as err:
        raise _named_by_key(store, table, keys, err) from err
    return out


def may_be_copied(store: Store, row_dtype: RowDtype) -> bool:
    """Whether another store may keep a table's rows as ``store`` returns them, without rounding them twice."""
    return row_dtype not in ROW_WISE or not store.keeps_row_dtype


@dataclass(frozen=True, slots=True)
class RoundingError:
    """The difference between the rows of a table and the same rows rounded.

    Attributes:
        largest: the largest absolute difference of two floats; 0 without rows.
        mean: the mean absolute difference over all floats of all rows.
        magnitude: the mean absolute value, to compare the two with.
    """

    largest: float
    mean: float
    magnitude: float


def rounding_error(
    store: str, table: str, row_dtype: RowDtype, batches: Iterable[tuple[Keys, Vectors]]
) -> RoundingError:
    """Compare all rows of a table with their rounded ones; raises as ``rounded`` does."""
    largest, differences, magnitudes, floats = 0.0, 0.0, 0.0, 0
    for keys, rows in batches:
        difference = np.abs(rounded(store, table, row_dtype, keys, rows) - rows)
        largest = max(largest, float(difference.max(initial=0.0)))
        differences += float(difference.sum(dtype=np.float64))
        magnitudes += float(np.abs(rows).sum(dtype=np.float64))
        floats += rows.size
    return RoundingError(largest, differences / max(floats, 1), magnitudes / max(floats, 1))


def _named_by_key(store: str, table: str, keys: Keys, err: RowValueError) -> RowTypeError:
    of_key = RowValueError(err.row_dtype, err.value, err.position, err.column, int(keys[err.position]))
    return RowTypeError(store, table, str(of_key))
