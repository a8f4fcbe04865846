"""HPS's binary dump of one table (HugeCTR v24.06, ``dump`` and ``load`` of its database backends), little-endian.

    offset 0   the bytes "bin" and a zero
    offset 4   uint32       version, 1
    offset 8   uint32       bytes of a key: 8, or 4 for uint32 models
    offset 12  uint32       bytes of a value: 4 D; 0 for an empty table, absent for a table that HPS does not know
    offset 16  the pairs    key, float32[D], one after the other up to the end of the file

The file has no count and no checksum. The order of the pairs has no meaning, except that the last row of a repeated
key counts: HPS inserts the pairs one after the other.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.atomic import atomic_write
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY, KeyType, row_dtype
from serving.storage.store import Keys, TableSpec, Vectors

MAGIC = b"bin\0"
VERSION = 1
_HEADER = struct.Struct("<4sIII")
_UNKNOWN_TABLE_BYTES = 12  # the header without the size of values


def write_bin(path: Path, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]]) -> None:
    """Write a table batch by batch. An existing file is replaced at once when all rows are on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    pair = _pair(spec)
    with atomic_write(path) as file:
        value_bytes = 0
        for keys, rows in batches:
            if not value_bytes:
                value_bytes = 4 * spec.dim
                file.write(_HEADER.pack(MAGIC, VERSION, spec.key_bytes, value_bytes))
            pairs = np.empty(keys.size, dtype=pair)
            pairs["key"], pairs["vector"] = keys, rows
            file.write(pairs.data)
        if not value_bytes:
            file.write(_HEADER.pack(MAGIC, VERSION, spec.key_bytes, value_bytes))


class BinDump:
    """A ``.bin`` file whose header and size fit a table. See ``Dump``."""

    def __init__(self, path: Path, spec: TableSpec) -> None:
        """Check the header and the size, without reading any pair.

        Raises:
            ModelFileError: the file has another format, does not fit the table, or is cut short.
        """
        self._path = path
        self._spec = spec
        with self._opened() as file:
            header = file.read(_HEADER.size)
            size_bytes = os.fstat(file.fileno()).st_size
        self.rows = self._checked_rows(header, size_bytes)

    def batches(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Dump.batches``."""
        with self._opened() as file:
            file.seek(_HEADER.size)
            for begin in range(0, self.rows, batch_rows):
                pairs = self._read(file, begin, min(batch_rows, self.rows - begin))
                keys = pairs["key"].astype(np.int64)
                self._check_keys(begin, keys)
                yield keys, np.ascontiguousarray(pairs["vector"], dtype=np.float32)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except OSError as err:
            raise ModelFileError(self._path, f"cannot be read: {err.strerror}") from err

    def _checked_rows(self, header: bytes, size_bytes: int) -> int:
        """The number of pairs."""
        if header[:4] != MAGIC:
            raise self._error(0, f"expected {MAGIC!r}, the start of HPS's binary dumps, found {header[:4]!r}")
        if size_bytes < _UNKNOWN_TABLE_BYTES or _UNKNOWN_TABLE_BYTES < size_bytes < _HEADER.size:
            raise self._error(size_bytes, f"the file ends inside its header of {_HEADER.size} bytes")
        _, version, key_bytes, value_bytes = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if version != VERSION:
            raise self._error(4, f"expected version {VERSION}, found {version}")
        if key_bytes != self._spec.key_bytes:
            raise self._error(8, f"expected keys of {self._spec.key_bytes} bytes, found {key_bytes}")
        pairs_bytes = size_bytes - min(size_bytes, _HEADER.size)
        if not pairs_bytes and not value_bytes:
            return 0
        if value_bytes != 4 * self._spec.dim:
            expected = f"{4 * self._spec.dim} bytes, {self._spec.dim} floats"
            raise self._error(12, f"expected values of {expected}, found {value_bytes}")
        pair_bytes = _pair(self._spec).itemsize
        rows, rest = divmod(pairs_bytes, pair_bytes)
        if rest:
            begin = size_bytes - rest
            raise self._error(begin, f"the file ends {rest} bytes into pair {rows:,}, of {pair_bytes} bytes")
        return rows

    def _read(self, file: BinaryIO, begin: int, count: int) -> NDArray[Any]:
        pairs = np.fromfile(file, dtype=_pair(self._spec), count=count)
        if pairs.size != count:
            raise self._error(_HEADER.size, f"had {self.rows:,} pairs when it was opened, but ends after {begin:,}")
        return pairs

    def _check_keys(self, begin: int, keys: Keys) -> None:
        refused = (keys < SMALLEST_KEY) | (keys > LARGEST_KEY)
        if refused.any():
            at = int(np.argmax(refused))
            offset = _HEADER.size + (begin + at) * _pair(self._spec).itemsize
            raise self._error(offset, f"pair {begin + at:,}: key {keys[at]} is reserved")

    def _error(self, offset: int, reason: str) -> ModelFileError:
        return ModelFileError(self._path, f"offset {offset:,}: {reason}")


def _pair(spec: TableSpec) -> np.dtype[Any]:
    key_type: KeyType = "I64" if spec.key_bytes == 8 else "I32"
    return row_dtype(spec.dim, key_type, "distributed")
