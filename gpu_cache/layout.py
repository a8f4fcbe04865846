"""The layout of a cache: lines, rows and counters (line.cuh, rows.cuh, table.cuh), and capacity in rows and bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gpu_cache.arguments import whole_number

KeyType = Literal["I64", "U32"]
RowDtype = Literal["fp32", "fp16", "bf16", "int8", "uint8", "fp8"]
Kind = Literal["dynamic", "static", "uvm"]

MOST_COLUMNS = 65_536
MOST_CHAIN_LINES = 16
# The share of a static table's slots that is used when it is full. Some slots stay free, so that each key finds one.
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
    "absent_keys",
    "absent_answers",
)

_MOST_LINES = 2**32 - 1
_LINES_PER_ABSENT_LINE = 8
_MOST_CAP = 2**31  # no call has more keys
_FIXED_BYTES = 2 * TABLE_BYTES + 8 * len(COUNTERS)


@dataclass(frozen=True)
class Layout:
    """The layout of a cache's lines and rows; two caches of one layout run the same compiled kernels.

    Args:
        dim: embedding_vec_size, 1 to 65,536.
        row_dtype: how rows are kept.
        key_type: ``"I64"``, or ``"U32"`` for keys from 0 to 2^32 - 3 and lines of half the bytes.
        line_keys: keys per line: 15, or 7 for ``"I64"`` lines of 64 bytes.

    Raises:
        TypeError: ``dim`` is not a whole number.
        ValueError: an argument is not one of these values.
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
        """The type of a line's words: its keys and its meta word."""
        return np.uint64 if self.key_type == "I64" else np.uint32

    @property
    def empty_key(self) -> np.uint64 | np.uint32:
        """The word of a slot without a key."""
        return np.uint64(2**63 - 1) if self.key_type == "I64" else np.uint32(2**32 - 1)

    @property
    def has_marks(self) -> bool:
        """Whether lines remember which keys were missed recently."""
        return self.key_type == "I64"

    def can_hold(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which keys a line can hold, bool[N]; the others, which have a meaning of their own, always miss."""
        if self.key_type == "U32":
            return (keys >= 0) & (keys < 2**32 - 2)
        return (keys > -(2**63) + 1) & (keys < 2**63 - 2)

    @property
    def row_stride_bytes(self) -> int:
        """Bytes from one row to the next: a multiple of 16, because a lane reads 16 bytes at a time."""
        head_bytes, column_bytes = _ROW_BYTES[self.row_dtype]
        return -(-(head_bytes + self.dim * column_bytes) // 16) * 16

    @property
    def form(self) -> str:
        """The form as in the kernels' option HOTROW_FORMS, without its number: ``"fp32, 16"``."""
        return f"{self.row_dtype}, {self.dim}"

    def defines(self) -> dict[str, str]:
        """Return the options that compile kernels for this form alone, as number 0."""
        return self.line_defines() | {"HOTROW_FORMS": f"FORM(0, {self.form})"}

    def line_defines(self) -> dict[str, str]:
        """Return the options that describe the lines; all tables of a launch share them."""
        return {"HOTROW_KEY": self.key_type.lower(), "HOTROW_LINE_KEYS": str(self.line_keys)}


class MemoryBytes(NamedTuple):
    """The memory of a cache.

    Attributes:
        device_bytes: device memory.
        host_bytes: page-locked host memory; 0 except for the kind ``"uvm"``, whose rows are there.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Capacity:
    """The size of a cache as a number of lines.

    Args:
        layout: of its lines and rows.
        kind: a ``"static"`` cache keeps some of its slots free, a ``"uvm"`` cache has its rows in host memory.
        line_count: 1 to 2^32 - 1.

    Raises:
        ValueError: a number is out of range, or the kind is unknown.
    """

    layout: Layout
    kind: Kind
    line_count: int

    def __post_init__(self) -> None:
        """Check kind and number."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind: expected one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not 1 <= self.line_count <= _MOST_LINES:
            raise ValueError(f"capacity: expected 1 to {_MOST_LINES} lines, got {self.line_count}")

    @classmethod
    def of_rows(cls, layout: Layout, kind: Kind, rows: int) -> Capacity:
        """Return the smallest capacity for at least ``rows`` rows, or raise ValueError if there is none."""
        rows = whole_number("capacity_rows", rows, 1)
        return cls(layout, kind, math.ceil(rows / (layout.line_keys * _load_ratio(layout, kind))))

    @classmethod
    def of_bytes(cls, layout: Layout, kind: Kind, size_bytes: int) -> Capacity:
        """Return the largest capacity of at most ``size_bytes`` device bytes, or raise ValueError if no line fits."""
        lines = bisect_right(range(1, _MOST_LINES + 1), size_bytes, key=lambda n: cls(layout, kind, n).device_bytes)
        if not lines:
            raise ValueError(f"a cache of one line takes {cls(layout, kind, 1).device_bytes} bytes, got {size_bytes}")
        return cls(layout, kind, lines)

    @classmethod
    def of_ratio(cls, layout: Layout, kind: Kind, table_rows: int, ratio: float) -> Capacity:
        """Return the smallest capacity for the share ``ratio`` of a table's rows, above 0 and at most 1."""
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: expected more than 0 and at most 1, got {ratio}")
        return cls.of_rows(layout, kind, min(table_rows, math.ceil(table_rows * ratio)))

    @property
    def slots(self) -> int:
        """Slots for rows."""
        return self.line_count * self.layout.line_keys

    @property
    def rows(self) -> int:
        """Rows that fit."""
        return math.floor(self.slots * _load_ratio(self.layout, self.kind))

    @property
    def absent_line_count(self) -> int:
        """Lines for absent keys, an eighth as many."""
        return -(-self.line_count // _LINES_PER_ABSENT_LINE)

    @property
    def slab_bytes(self) -> int:
        """Bytes of all slots' rows."""
        return self.slots * self.layout.row_stride_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory: lines, rows, counters and the table's descriptors."""
        rows = 0 if self.kind == "uvm" else self.slab_bytes
        return (self.line_count + self.absent_line_count) * self.layout.line_bytes + rows + _FIXED_BYTES

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked host memory."""
        return self.slab_bytes if self.kind == "uvm" else 0

    @property
    def insertion_cap(self) -> int:
        """New keys that one call may put into other keys' slots: a fifth of the slots, or a tenth in ``U32`` lines."""
        return self._share(self.line_count)

    @property
    def absent_cap(self) -> int:
        """``insertion_cap`` for absent keys."""
        return self._share(self.absent_line_count)

    def _share(self, lines: int) -> int:
        return min(max(1, lines * self.layout.line_keys // (5 if self.layout.has_marks else 10)), _MOST_CAP)

    @property
    def memory_bytes(self) -> MemoryBytes:
        """The memory of a cache of this capacity."""
        return MemoryBytes(self.device_bytes, self.host_bytes)


def _load_ratio(layout: Layout, kind: Kind) -> Fraction:
    return STATIC_LOAD_RATIO[layout.line_keys] if kind == "static" else Fraction(1)


def admission_limits(caps: NDArray[np.uint64], new_keys: NDArray[np.uint64], *, has_marks: bool) -> NDArray[np.uint64]:
    """Return the limits of policy.cuh, 2^32 times the share of the new keys that is let in, for one call.

    They keep a call that brings more keys than a cache can hold from sweeping the cache clean. Without marks a limit is
    never more than a quarter.

    Args:
        caps: uint64[T], ``Capacity.insertion_cap`` of each cache.
        new_keys: uint64[T], keys of the call for each cache.
        has_marks: ``Layout.has_marks``, the same for all of them.
    """
    shift, most = np.uint64(32), np.uint64(2**32 if has_marks else 2**30)
    limits: NDArray[np.uint64] = np.minimum((caps << shift) // np.maximum(new_keys, np.uint64(1)), most)
    return limits
