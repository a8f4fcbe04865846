"""Convert text fields to numbers, a whole block of lines at a time.

Every field is read as the 8 bytes before its end, so one gather reads all fields of a block.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WORD_BYTES = 8
_NOT_A_DIGIT = 255

_HEX_DIGITS = np.full(256, _NOT_A_DIGIT, dtype=np.uint8)
_HEX_DIGITS[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
_HEX_DIGITS[np.frombuffer(b"ABCDEF", dtype=np.uint8)] = np.arange(10, 16)

_DECIMAL_DIGITS = np.full(256, _NOT_A_DIGIT, dtype=np.uint8)
_DECIMAL_DIGITS[np.frombuffer(b"0123456789", dtype=np.uint8)] = np.arange(10)
_POWERS_OF_TEN = 10.0 ** np.arange(_WORD_BYTES - 1, -1, -1)

# For a field of n bytes: the mask of its bytes in the word that ends with it, and the "0" characters before them.
# Words are little-endian, so the field's bytes are the high bytes.
_ALL = 2**64 - 1
_KEEP = np.array([_ALL >> 8 * absent << 8 * absent for absent in range(_WORD_BYTES, -1, -1)], dtype=np.uint64)
_ZEROS = np.bitwise_and(~_KEEP, np.frombuffer(b"0" * _WORD_BYTES, dtype="<u8")[0])

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FieldBlock:
    """Lines of text cut into fields.

    Attributes:
        text: the lines, each with a newline.
        starts: int64[R, C], where each field begins in ``text``.
        ends: int64[R, C], one past the end of each field.
    """

    text: bytes
    starts: Positions
    ends: Positions

    @classmethod
    def cut(cls, text: bytes, separator: bytes, columns: int) -> "FieldBlock | UnevenLine":
        """Cut whole lines into ``columns`` fields each, or return the first line with another number of fields."""
        codes = np.frombuffer(text, dtype=np.uint8)
        is_newline = codes == ord("\n")
        ends = np.flatnonzero(is_newline | (codes == separator[0]))
        last_of_line = np.flatnonzero(is_newline[ends])
        found = np.diff(last_of_line, prepend=-1)
        uneven = np.flatnonzero(found != columns)
        if uneven.size:
            return UnevenLine(row=int(uneven[0]), columns=int(found[uneven[0]]))
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        return cls(text, starts.reshape(-1, columns), ends.reshape(-1, columns))

    def take(self, columns: slice | list[int]) -> "FieldBlock":
        """Select columns."""
        return FieldBlock(self.text, self.starts[:, columns], self.ends[:, columns])

    def field(self, row: int, column: int) -> str:
        """Return one field as text, for messages. Bytes that are not UTF-8 are escaped."""
        return self.text[self.starts[row, column] : self.ends[row, column]].decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class UnevenLine:
    """The first line of a block with another number of columns than expected."""

    row: int
    columns: int


def read_hex(block: FieldBlock) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Read fields of 8 hexadecimal digits as uint32[R, C], and bool[R, C] for the fields that are readable."""
    digits = _HEX_DIGITS[_last_bytes(block)]
    readable = (block.ends - block.starts == _WORD_BYTES) & (digits != _NOT_A_DIGIT).all(axis=-1)
    big_endian = np.ascontiguousarray(digits[..., 0::2] << 4 | digits[..., 1::2])
    values = big_endian.view(">u4")[..., 0].astype(np.uint32)
    return np.where(readable, values, np.uint32(0)), readable


def read_numbers(block: FieldBlock) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Read numbers as float64[R, C], NaN if unreadable, and bool[R, C], which is true for empty fields too.

    Whole numbers, also in the form ``260.0``, are read fast. Infinite and not-a-number fields are not readable.
    """
    starts, ends = block.starts, block.ends
    codes = np.frombuffer(block.text, dtype=np.uint8)
    negative = (ends > starts) & (codes[np.minimum(starts, codes.size - 1)] == ord("-"))
    has_point_zero = (ends - starts >= 3) & (codes[ends - 2] == ord(".")) & (codes[ends - 1] == ord("0"))
    whole = FieldBlock(block.text, starts + negative, ends - 2 * has_point_zero)

    lengths = whole.ends - whole.starts
    digits = _DECIMAL_DIGITS[_last_bytes(whole, lengths)]
    is_whole = (lengths >= 1) & (lengths <= _WORD_BYTES) & (digits != _NOT_A_DIGIT).all(axis=-1)
    values = np.where(is_whole, digits @ _POWERS_OF_TEN, np.nan)
    values = np.where(negative, -values, values)

    readable = is_whole | (ends == starts)
    for row, column in np.argwhere(~readable).tolist():
        values[row, column] = number = _read_one(block.field(row, column))
        readable[row, column] = math.isfinite(number)
    return values, readable


def _read_one(field: str) -> float:
    try:
        return float(field) if "_" not in field and field.strip() == field else math.nan
    except ValueError:
        return math.nan


def _last_bytes(block: FieldBlock, lengths: Positions | None = None) -> NDArray[np.uint8]:
    """Return uint8[R, C, 8], the bytes before each field's end. With ``lengths``, bytes before the field are "0"."""
    padded = b"\0" * _WORD_BYTES + block.text
    words = np.ndarray(len(block.text) + 1, dtype="<u8", buffer=padded, strides=(1,))[block.ends]
    if lengths is not None:
        short = np.clip(lengths, 0, _WORD_BYTES)
        words = words & _KEEP[short] | _ZEROS[short]
    return np.ascontiguousarray(words).view(np.uint8).reshape(*block.ends.shape, _WORD_BYTES)
