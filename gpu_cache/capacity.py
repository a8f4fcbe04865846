"""How many rows a cache has room for, and what memory that takes; known before any is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, get_args

from gpu_cache.layout import COUNTERS, STATIC_LOAD_RATIO, TABLE_BYTES, Kind, Layout
from gpu_cache.numbers import whole_number

_MOST_LINES = 2**32 - 1
_FIXED_BYTES = TABLE_BYTES + 8 * len(COUNTERS)


class MemoryBytes(NamedTuple):
    """What a cache takes.

    Attributes:
        device_bytes: of the device's memory.
        host_bytes: of page-locked memory of the host; 0 but for the kind ``"uvm"``, whose rows lie there.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Capacity:
    """A number of lines, which is what a cache is made of.

    Args:
        layout: of its lines and rows.
        kind: of cache: a ``"static"`` one keeps part of its slots free, a ``"uvm"`` one has its rows in host memory.
        line_count: 1 to 2^32 - 1.

    Raises:
        ValueError: a number is out of its range, or the kind is unknown.
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
        """Return the smallest capacity for at least so many rows.

        Raises:
            TypeError: ``rows`` is no whole number.
            ValueError: it is less than 1, or too large.
        """
        rows = whole_number("capacity_rows", rows, 1)
        return cls(layout, kind, math.ceil(rows / (layout.line_keys * _load_ratio(layout, kind))))

    @classmethod
    def of_bytes(cls, layout: Layout, kind: Kind, size_bytes: int) -> Capacity:
        """Return the largest capacity that takes at most so many bytes of the device.

        Raises:
            ValueError: not even one line fits.
        """
        one, two = (cls(layout, kind, lines).device_bytes for lines in (1, 2))
        if size_bytes < one:
            raise ValueError(f"a cache of one line takes {one} bytes, got {size_bytes}")
        return cls(layout, kind, min(_MOST_LINES, 1 + (size_bytes - one) // (two - one)))

    @classmethod
    def of_ratio(cls, layout: Layout, kind: Kind, table_rows: int, ratio: float) -> Capacity:
        """Return the smallest capacity for that part of a table's rows; ``ratio`` is above 0 and at most 1.

        Raises:
            ValueError: the ratio is out of its range, or the table has no rows.
        """
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: expected more than 0 and at most 1, got {ratio}")
        return cls.of_rows(layout, kind, min(table_rows, math.ceil(table_rows * ratio)))

    @property
    def slots(self) -> int:
        """Places for rows."""
        return self.line_count * self.layout.line_keys

    @property
    def rows(self) -> int:
        """Rows the cache has room for."""
        return math.floor(self.slots * _load_ratio(self.layout, self.kind))

    @property
    def slab_bytes(self) -> int:
        """Bytes of all slots' rows."""
        return self.slots * self.layout.row_stride_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory: lines, rows, counters and the table's descriptor."""
        rows = 0 if self.kind == "uvm" else self.slab_bytes
        return self.line_count * self.layout.line_bytes + rows + _FIXED_BYTES

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory of the host."""
        return self.slab_bytes if self.kind == "uvm" else 0

    @property
    def memory_bytes(self) -> MemoryBytes:
        """What a cache of this capacity takes, on the device and on the host."""
        return MemoryBytes(self.device_bytes, self.host_bytes)


def _load_ratio(layout: Layout, kind: Kind) -> Fraction:
    return STATIC_LOAD_RATIO[layout.line_keys] if kind == "static" else Fraction(1)
