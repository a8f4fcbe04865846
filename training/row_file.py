"""The file of a table's rows in a checkpoint: keys, vectors, states of the optimizer, and checksums.

A file begins with a line of JSON: the format, the name of the optimizer's rule, D and S. Then come blocks. A block has
the number of its rows as uint32, the rows, and the CRC-32 of everything before it except other checksums. A row has its
int64 key, the int64 step of its last update, its uint64 slot, its vector float32[D] and its states float32[S]. Every
block except the last two has 65,536 rows. The last block has none. All numbers are little-endian.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from kernels.host import TrainingTable
from serving.errors import ModelFileError
from serving.model.regular_file import open_regular

#: The name of the optimizer's rule, D and S.
Shape = tuple[str, int, int]
#: Of the name of a file of rows.
ROWS_SUFFIX = ".rows"
#: At the end of the file.
CHECKSUM_BYTES = 4
#: Rows of a block.
BLOCK_ROWS = 65_536
_FORMAT = "hotrow rows 1"
_MOST_HEADER_BYTES = 4096
_NUMBER = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class TableRows:
    """Everything that a table knows of V of its rows.

    Attributes:
        keys: int64[V].
        vectors: float32[V, D].
        states: float32[V, S], the states of the optimizer.
        last_steps: int64[V], the step of each row's last update; 0: none is known.
        slot_ids: uint64[V], the slot in which each key was first seen.
    """

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    states: NDArray[np.float32]
    last_steps: NDArray[np.int64]
    slot_ids: NDArray[np.uint64]

    def __len__(self) -> int:
        """Return V."""
        return len(self.keys)

    def __getitem__(self, some: slice | NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """Select rows by slice, by int64 positions or by bool[V]."""
        return type(self)(
            self.keys[some], self.vectors[some], self.states[some], self.last_steps[some], self.slot_ids[some]
        )


def shape_of(table: TrainingTable) -> Shape:
    """Return the shape of a table's rows."""
    return table.rule, table.dim, len(table.first_states)


def write_rows(file: BinaryIO, rule: str, dim: int, states: int, parts: Iterable[TableRows]) -> None:
    """Write rows, part by part.

    Args:
        file: an empty file.
        rule: the name of the rule whose states the rows have.
        dim: D. 0: only the states are written.
        states: S.
        parts: the rows.
    """
    dtype, checksum = _row_dtype(dim, states), 0

    def write(data: bytes) -> None:
        nonlocal checksum
        checksum = zlib.crc32(data, checksum)
        file.write(data)

    def write_block(rows: bytes) -> None:
        write(_NUMBER.type(len(rows) // dtype.itemsize).tobytes())
        write(rows)
        file.write(_NUMBER.type(checksum).tobytes())

    write(json.dumps({"format": _FORMAT, "rule": rule, "dim": dim, "states": states}).encode() + b"\n")
    waiting, block_bytes = bytearray(), BLOCK_ROWS * dtype.itemsize
    for part in parts:
        rows = np.empty(len(part), dtype)
        rows["key"], rows["last_step"], rows["slot"] = part.keys, part.last_steps, part.slot_ids
        rows["vector"], rows["states"] = part.vectors[:, :dim], part.states
        waiting += rows.tobytes()
        while len(waiting) >= block_bytes:
            write_block(bytes(waiting[:block_bytes]))
            del waiting[:block_bytes]
    if waiting:
        write_block(bytes(waiting))
    write_block(b"")


def read_rows(path: Path, rule: str, dim: int, states: int) -> Iterator[TableRows]:
    """Yield the rows of a file, block by block.

    Args:
        path: what ``write_rows`` has written.
        rule: the name of the rule whose states the rows must have.
        dim: D, which the rows must have. 0: they have no vectors.
        states: S, which the rows must have.

    Raises:
        ModelFileError: the file is missing or damaged, or has other rows.
    """
    dtype, first = _row_dtype(dim, states), 0
    try:
        with open_regular(path) as file:
            header = file.readline(_MOST_HEADER_BYTES)
            _check_header(path, header, rule, dim, states)
            checksum = zlib.crc32(header)
            while True:
                place = f"the block that begins at row {first:,}"
                number = _read(file, path, _NUMBER.itemsize, place)
                count = int(np.frombuffer(number, _NUMBER)[0])
                if count > BLOCK_ROWS:
                    raise ModelFileError(path, f"{place}: expected at most {BLOCK_ROWS:,} rows, found {count:,}")
                data = _read(file, path, count * dtype.itemsize, place)
                checksum = zlib.crc32(data, zlib.crc32(number, checksum))
                found = int(np.frombuffer(_read(file, path, _NUMBER.itemsize, place), _NUMBER)[0])
                if found != checksum:
                    raise ModelFileError(path, f"{place}: expected CRC-32 {found:08x}, found {checksum:08x}")
                if not count:
                    break
                rows = np.frombuffer(data, dtype)
                yield TableRows(*(rows[name].astype(kind) for name, kind in _COLUMNS))
                first += count
            if file.read(1):
                raise ModelFileError(path, f"expected the end of the file after {first:,} rows, found more bytes")
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def is_row_file(path: Path) -> bool:
    """Return whether a file begins as ``write_rows`` begins. Raise OSError if it cannot be read."""
    with open_regular(path) as file:
        return _format_of(file.readline(_MOST_HEADER_BYTES)) is not None


def check_rule(path: Path, expected: str, found: str) -> None:
    """Raise ModelFileError if rows have the states of another optimizer's rule."""
    if found != expected:
        raise ModelFileError(path, f"expected the states of {expected}, found those of {found}")


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("key", np.int64),
    ("vector", np.float32),
    ("states", np.float32),
    ("last_step", np.int64),
    ("slot", np.uint64),
)


def _row_dtype(dim: int, states: int) -> np.dtype[Any]:
    numbers = [("key", "<i8"), ("last_step", "<i8"), ("slot", "<u8")]
    return np.dtype([*numbers, ("vector", "<f4", (dim,)), ("states", "<f4", (states,))])


def _read(file: BinaryIO, path: Path, size: int, place: str) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ModelFileError(path, f"{place}: expected {size:,} bytes, found {len(data):,} before the end of the file")
    return data


def _format_of(header: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(header)
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("format") == _FORMAT else None


def _check_header(path: Path, header: bytes, rule: str, dim: int, states: int) -> None:
    document = _format_of(header)
    if document is None:
        raise ModelFileError(path, f"expected a file that begins with the format {_FORMAT!r}, found {header[:32]!r}")
    check_rule(path, rule, document.get("rule", "an unknown optimizer"))
    if (found := (document.get("dim"), document.get("states"))) != (dim, states):
        expected = f"vectors of {dim} floats and {states} floats of states"
        raise ModelFileError(path, f"expected {expected}, found {found[0]} and {found[1]}")
