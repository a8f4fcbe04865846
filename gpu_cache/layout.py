"""How a cache lies in a device's memory: the lines of line.cuh, the rows of rows.cuh, the counters of table.cuh.

Letters for shapes: D embedding_vec_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gpu_cache.numbers import whole_number

KeyType = Literal["I64", "U32"]
RowDtype = Literal["fp32", "fp16", "bf16", "int8", "uint8", "fp8"]
Kind = Literal["dynamic", "static", "uvm"]

MOST_COLUMNS = 65_536
MOST_CHAIN_LINES = 16
# Part of a static table's slots that is used when it is full. Its keys have no other place, so some slots must be free.
STATIC_LOAD_RATIO = {15: Fraction(4, 5), 7: Fraction(7, 10)}
# float32 parameters at a row's head, and bytes per column.
_ROW_BYTES: dict[RowDtype, tuple[int, int]] = {
    "fp32": (0, 4),
    "fp16": (0, 2),
    "bf16": (0, 2),
    "int8": (4, 1),
    "uint8": (8, 1),
    "fp8": (4, 1),
}
_LINES: dict[tuple[KeyType, int], int] = {("I64", 15): 128, ("I64", 7): 64, ("U32", 15): 64}

TABLE_BYTES = 64  # ``struct Table`` of table.cuh
# ``enum Counter`` of table.cuh.
COUNTERS = (
    "found_keys",
    "missed_keys",
    "rows",
    "inserted_rows",
    "replaced_rows",
    "refused_first_misses",
    "refused_by_cap",
    "refused_by_counters",
    "refused_without_slot",
    "unfit_rows",
    "updated_rows",
    "erased_rows",
)


@dataclass(frozen=True)
class Layout:
    """The form of a cache's lines and rows; two caches of one form run the same compiled kernels.

    Args:
        dim: embedding_vec_size, 1 to 65,536.
        row_dtype: how rows are kept.
        key_type: ``"I64"``, or ``"U32"`` for keys from 0 to 2^32 - 3, whose lines take half the bytes.
        line_keys: keys per line: 15, or 7 for ``"I64"`` lines of 64 bytes.

    Raises:
        TypeError: ``dim`` is no whole number.
        ValueError: one of these is none of the values named.
    """

    dim: int
    row_dtype: RowDtype = "fp32"
    key_type: KeyType = "I64"
    line_keys: int = 15

    def __post_init__(self) -> None:
        """Check every field."""
        whole_number("dim", self.dim, 1, MOST_COLUMNS)
        if self.row_dtype not in _ROW_BYTES:
            raise ValueError(f"row_dtype: expected one of {', '.join(get_args(RowDtype))}, got {self.row_dtype!r}")
        if (self.key_type, self.line_keys) not in _LINES:
            raise ValueError(
                "key_type and line_keys: expected 'I64' with 15 or 7 keys or 'U32' with 15, "
                f"got {self.key_type!r} with {self.line_keys}"
            )

    @property
    def line_bytes(self) -> int:
        """Bytes of a line: its keys and its meta word."""
        return _LINES[self.key_type, self.line_keys]

    @property
    def tile_lanes(self) -> int:
        """Lanes of 16 bytes that read a line together."""
        return self.line_bytes // 16

    @property
    def key_word(self) -> type[np.uint64] | type[np.uint32]:
        """What a line is made of: keys and a meta word."""
        return np.uint64 if self.key_type == "I64" else np.uint32

    @property
    def empty_key(self) -> np.uint64 | np.uint32:
        """The word of a slot without a key."""
        return np.uint64(2**63 - 1) if self.key_type == "I64" else np.uint32(2**32 - 1)

    def can_hold(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these keys a line can hold, bool[N]: others are misses always.

        The two largest values of the key type, and of int64 the two smallest, have a meaning of their own in lines.
        """
        if self.key_type == "U32":
            return (keys >= 0) & (keys < 2**32 - 2)
        return (keys > -(2**63) + 1) & (keys < 2**63 - 2)

    @property
    def row_stride_bytes(self) -> int:
        """Bytes from one row to the next: whole 16, so that a lane reads 16 at a time."""
        head_bytes, column_bytes = _ROW_BYTES[self.row_dtype]
        return -(-(head_bytes + self.dim * column_bytes) // 16) * 16

    @property
    def form(self) -> str:
        """The form as the kernels' option HOTROW_FORMS has it, without its number: ``"fp32, 16"``."""
        return f"{self.row_dtype}, {self.dim}"

    def defines(self) -> dict[str, str]:
        """Options to compile kernels for this form alone, as number 0."""
        return self.line_defines() | {"HOTROW_FORMS": f"FORM(0, {self.form})"}

    def line_defines(self) -> dict[str, str]:
        """Options that say what lines are like; all tables of a launch share them."""
        return {"HOTROW_KEY": self.key_type.lower(), "HOTROW_LINE_KEYS": str(self.line_keys)}
