"""A column family of a RocksDB database as its readers see it: the rows of one table, their keys and values."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from serving.errors import StoreError
from serving.storage.hps_layout import key_list, keys_of, storable
from serving.storage.marker import NOT_LOADED
from serving.storage.rocksdb.database import Database
from serving.storage.rocksdb.engine import all_items, translated_errors
from serving.storage.rocksdb.exit_gate import exit_gate
from serving.storage.rocksdb.file_checks import STORE_NAME
from serving.storage.row_codec import RowCodec
from serving.storage.store import Batches, Keys, Mask, Vectors


class FamilyRows:
    """The rows of one column family. Every method may be called from any thread; none takes a lock.

    Attributes:
        spec: the table.
        digest: the digest of its marker; None without a marker.
        reached: see ``LastingTable.reached``, as it was when the database was opened.
    """

    def __init__(
        self,
        path: Path,
        codec: RowCodec,
        family: Any,
        digest: str | None,
        reached: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Take a column family of the database at ``path``, whose values ``codec`` reads.

        Raises:
            StoreError: the first row has a key or a value of another length.
        """
        self.spec = codec.spec
        self._codec = codec
        self._family = family  # rocksdict's handle, which keeps the database open
        self.digest = digest
        self.reached = reached
        self._path = path
        self._check_first_row()

    def close(self) -> None:
        """Release the database: running calls keep it open until they end, later calls raise StoreError.

        A kept error holds the table through its traceback, and must not keep the database locked.
        """
        self._family = None

    def count(self) -> int:
        """Count the rows by reading all of them: 0.4 s for a million rows of 64 bytes, 0.9 s of 512 bytes."""
        with self._translated():
            return sum(1 for _ in all_items(self._open_family()))

    def estimated_rows(self) -> int:
        """RocksDB's guess: too high after rows were overwritten, too low after absent rows were evicted."""
        return int(self._open_family().property_int_value("rocksdb.estimate-num-keys"))

    def fetch(self, keys: Keys, out: Vectors, found: Mask) -> None:
        """Read rows in one call to RocksDB into ``out`` and ``found``; see ``StoreTable.fetch``."""
        fits = storable(keys, self.spec.key_bytes)
        if fits is not None:
            rows = np.empty((int(fits.sum()), self.spec.dim), dtype=np.float32)
            hits = np.zeros(rows.shape[0], dtype=np.bool_)
            self.fetch(keys[fits], rows, hits)
            out[...], out[fits], found[fits] = 0.0, rows, hits
            return
        raw_keys = key_list(keys, self.spec.key_bytes)
        with self._translated():
            values = exit_gate.call(self._open_family().get, raw_keys)
        try:
            out[...] = self._rows(raw_keys, values)
            found[...] = True
        except TypeError:  # an absent key's value is None, which join refuses; no test is faster
            found[...] = np.fromiter((value is not None for value in values), dtype=np.bool_, count=len(values))
            present = [pair for pair in zip(raw_keys, values, strict=True) if pair[1] is not None]
            out[...] = 0.0
            out[found] = self._rows([key for key, _ in present], [value for _, value in present])

    def items(self, batch_rows: int) -> Batches:
        """Read all rows as they were when the walk began, in the order of the keys' raw bytes."""
        raw_keys: list[bytes] = []
        values: list[bytes] = []
        with self._translated():
            for key, value in all_items(self._open_family()):
                raw_keys.append(key)
                values.append(value)
                if len(raw_keys) == batch_rows:
                    yield keys_of(raw_keys, self.spec.key_bytes), self._rows(raw_keys, values)
                    raw_keys, values = [], []
            if raw_keys:
                yield keys_of(raw_keys, self.spec.key_bytes), self._rows(raw_keys, values)

    def _rows(self, raw_keys: list[bytes], values: list[bytes]) -> Vectors:
        """Decode values into float32[N, D]; raise TypeError if a value is None."""
        joined = b"".join(values)
        if set(map(len, values)) - {self._codec.value_bytes}:
            at = next(place for place, value in enumerate(values) if len(value) != self._codec.value_bytes)
            key = int(keys_of(raw_keys[at : at + 1], self.spec.key_bytes)[0])
            raise self._error(f"the value of key {key} has {len(values[at])} bytes, {self._codec.expectation()}")
        return self._codec.decode(joined)

    def _check_first_row(self) -> None:
        with self._translated():
            key, value = next(all_items(self._open_family()), (None, None))
        if key is None or value is None:
            return
        if len(key) != self.spec.key_bytes:
            raise self._error(f"holds keys of {len(key)} bytes, expected {self.spec.key_bytes}")
        if len(value) != self._codec.value_bytes:
            raise self._error(f"holds values of {len(value)} bytes, {self._codec.expectation()}")

    def _open_family(self) -> Any:
        family = self._family
        if family is None:
            raise self._error("the store is closed")
        return family

    def _error(self, reason: str) -> StoreError:
        return StoreError(STORE_NAME, self.spec.name, f"{self._path}: {reason}")

    def _translated(self) -> Any:
        return translated_errors(self._path, self.spec.name)


def family_rows(database: Database, codec: RowCodec) -> FamilyRows:
    """Return the rows of a table of the ``database``, whose values ``codec`` reads.

    Raises:
        StoreError: the table holds rows of another row type, or its first row has a key or a value of another length.
    """
    spec = codec.spec
    marker = database.marker(spec.name)
    if marker is not None and marker.row_dtype != codec.row_dtype:  # the values may have the same length
        reason = f"{database.path}: holds rows of {marker.row_dtype}, expected {codec.row_dtype}"
        raise StoreError(STORE_NAME, spec.name, reason)
    digest = marker.digest if marker and marker.digest != NOT_LOADED else None
    return FamilyRows(database.path, codec, database.family(spec.name), digest, database.reached(spec.name))
