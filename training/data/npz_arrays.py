"""The arrays of an ``.npz`` file, read some rows at a time."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from serving.model.numpy_faults import NPZ, UNREADABLE, unreadable
from serving.model.regular_file import open_regular
from training.errors import DataError

Array = NDArray[Any]


def open_arrays(path: Path, stack: ExitStack) -> dict[str, "NpzArray"]:
    """Open all arrays of a file, by name. ``stack`` closes them.

    Raises:
        DataError: the file is missing, or is not an ``.npz`` file.
    """
    with _faults(path, None):
        archive = zipfile.ZipFile(stack.enter_context(open_regular(path)))
        names = archive.namelist()
    arrays = (NpzArray(path, archive, member, stack) for member in names)
    return {array.name: array for array in arrays}


class NpzArray:
    """One array of a file.

    Attributes:
        name: its name.
        dtype: of its numbers.
        shape: of the whole array.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile, member: str, stack: ExitStack) -> None:
        """Read the header. Raise DataError if it is damaged, or does not fit the member's size."""
        self._path = path
        self.name = member.removesuffix(".npy")
        self._done = 0  # rows
        self._is_column = False
        with _faults(path, self.name):
            self._file: IO[bytes] = stack.enter_context(archive.open(member))
            self.shape, is_fortran, self.dtype = _read_header(self._file)
            size_bytes = archive.getinfo(member).file_size - self._file.tell()
            expected_bytes = math.prod(self.shape) * self.dtype.itemsize
            if size_bytes != expected_bytes:
                raise self.error(f"shape {list(self.shape)} takes {expected_bytes:,} bytes, found {size_bytes:,}")
            self._whole = self._read_whole() if is_fortran and len(self.shape) > 1 else None

    def error(self, reason: str) -> DataError:
        """Return the error that names the array."""
        return DataError(self._path, reason, array=self.name)

    def rows(self) -> int:
        """Return the length of the array, which must not be 0."""
        if not self.shape or not self.shape[0]:
            raise self.error(f"expected at least one sample, got shape {list(self.shape)}")
        return self.shape[0]

    def check(self, shape: tuple[int, int], kinds: str = "biuf") -> None:
        """Check that the array is ``shape``, [B, columns], and of one of the kinds of dtypes. One column may be [B]."""
        self._check_kind(kinds)
        if self.shape != shape and not (shape[1] == 1 and self.shape == shape[:1]):
            raise self.error(f"expected shape {list(shape)}, got {list(self.shape)}")
        self._is_column = len(self.shape) == 1

    def check_flat(self, expected: str, length: int | None = None) -> None:
        """Check that the array has integers in one dimension."""
        self._check_kind("iu")
        if len(self.shape) != 1 or (length is not None and self.shape[0] != length):
            raise self.error(f"expected shape {expected}, got {list(self.shape)}")

    def read(self, count: int) -> Array:
        """Return the next rows. Those of an array [B] that ``check`` let pass as one column are [rows, 1]."""
        rows = slice(self._done, self._done + count)
        self._done += count
        if self._whole is not None:
            return self._whole[rows]
        size_bytes = count * math.prod(self.shape[1:]) * self.dtype.itemsize
        with _faults(self._path, self.name):
            data = self._file.read(size_bytes)
            if len(data) != size_bytes:
                raise EOFError("the array is cut short")
        values = np.frombuffer(bytearray(data), self.dtype).reshape(count, *self.shape[1:])  # writable, unlike bytes
        return values[:, None] if self._is_column else values

    def refuse(self, wrong: NDArray[np.bool_], values: Array, expected: str) -> None:
        """Raise DataError for the first of the values read last that is ``wrong``."""
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong.reshape(-1))), wrong.shape)
            inside = [int(place[0]) + self._done - len(values), *map(int, place[1:])][: len(self.shape)]
            raise self.error(f"expected {expected}, got {values[place]} at {inside}")

    def finish(self) -> None:
        """Check that nothing follows, and the checksum of what was read."""
        with _faults(self._path, self.name):
            if self._file.read(1):
                raise ValueError("bytes after the array")

    def _check_kind(self, kinds: str) -> None:
        if self.dtype.kind not in kinds:
            expected = "integers" if kinds == "iu" else "numbers"
            raise self.error(f"expected {expected}, got {self.dtype}")

    def _read_whole(self) -> Array:
        return np.frombuffer(bytearray(self._file.read()), self.dtype).reshape(self.shape, order="F")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether columns are neighbours, and the dtype."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"expected a header of version 1.0 or 2.0, got {version[0]}.{version[1]}")
    shape, is_fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded")
    return shape, is_fortran, dtype


@contextmanager
def _faults(path: Path, name: str | None) -> Iterator[None]:
    """Raise DataError for what a damaged file makes NumPy and zipfile raise."""
    try:
        yield
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err
    except (MemoryError, *UNREADABLE) as err:
        raise DataError(path, unreadable(path, "a .npz file of numbers", err, (NPZ,)), array=name) from err
