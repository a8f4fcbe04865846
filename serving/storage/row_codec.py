"""Rows as stores keep them in values of bytes: float32, or the form of the table's row type."""

import numpy as np
from numpy.typing import NDArray

from kernels.errors import RowValueError
from kernels.host import RowDtype, decode_rows, encode_rows, row_bytes
from serving.errors import StoreError
from serving.storage.hps_layout import storable
from serving.storage.store import Keys, TableSpec, Vectors


class RowCodec:
    """The values of one table in one store. Every method may be called from any thread.

    Attributes:
        row_dtype: the form of the values: ``kernels.host.encode_rows``.
        value_bytes: size of one value.
    """

    def __init__(self, store: str, spec: TableSpec, row_dtype: RowDtype | None) -> None:
        """Say what the values are.

        Args:
            store: the store's name, for messages.
            spec: the table.
            row_dtype: what the store was told to keep; None is float32, whatever the table's row type.

        Raises:
            StoreError: ``row_dtype`` is not the table's: a row would differ by the tier that it comes from.
        """
        if row_dtype not in (None, spec.row_dtype):
            reason = f"a table of {spec.row_dtype} rows in a store that was told to keep {row_dtype} rows"
            raise StoreError(store, spec.name, reason)
        self.row_dtype: RowDtype = row_dtype or "fp32"
        self.value_bytes = row_bytes(spec.dim, self.row_dtype)
        self._store = store
        self._spec = spec

    def encode(self, keys: Keys, rows: Vectors) -> NDArray[np.uint8]:
        """Bring rows into the form of the values.

        Args:
            keys: int64[N].
            rows: float32[N, D].

        Returns:
            uint8[N, value_bytes]; of float32 rows, the rows' own memory where they are contiguous.

        Raises:
            StoreError: a key does not fit the table's width, or a value the form; the message names the key.
        """
        fits = storable(keys, self._spec.key_bytes)
        if fits is not None:
            reason = f"key {keys[np.argmin(fits)]} does not fit {self._spec.key_bytes} bytes"
            raise StoreError(self._store, self._spec.name, reason)
        rows = np.ascontiguousarray(rows)
        if self.row_dtype == "fp32":
            return rows.view(np.uint8).reshape(rows.shape[0], self.value_bytes)
        try:
            return encode_rows(rows, self.row_dtype)
        except RowValueError as err:
            of_key = RowValueError(err.row_dtype, err.value, err.position, err.column, int(keys[err.position]))
            raise StoreError(self._store, self._spec.name, str(of_key)) from err

    def decode(self, values: bytes) -> Vectors:
        """The inverse of ``encode``, as the form rounds the rows.

        Args:
            values: N values, one after the other.

        Returns:
            float32[N, D], read-only where no decoding was needed.
        """
        if self.row_dtype == "fp32":
            return np.frombuffer(values, dtype=np.float32).reshape(-1, self._spec.dim)
        encoded = np.frombuffer(values, dtype=np.uint8).reshape(-1, self.value_bytes)
        rows = np.empty((encoded.shape[0], self._spec.dim), dtype=np.float32)
        decode_rows(encoded, self.row_dtype, rows)
        return rows

    def expectation(self) -> str:
        """How long a value is and why, for messages: ``4 floats are 16``."""
        form = "" if self.row_dtype == "fp32" else f" as {self.row_dtype}"
        return f"{self._spec.dim} floats{form} are {self.value_bytes}"


def value_list(encoded: NDArray[np.uint8]) -> list[bytes]:
    """The bytes of each value of uint8[N, value_bytes]."""
    listed: list[bytes] = encoded.view(f"V{encoded.shape[1]}").reshape(-1).tolist()
    return listed
