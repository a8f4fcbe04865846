"""How many rows of each table the memory tier has room for, before any memory is taken."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernels.host import HostTable, OverflowPolicy, RowDtype
from serving.config import MOST_ROWS, rows_with_headroom
from serving.storage.store import TableSpec

_BOUNDS = ("capacity_rows", "capacity_bytes", "capacity_rows_per_table", "capacity_rows_of_each_table")


@dataclass(frozen=True, slots=True)
class Room:
    """What one table is given.

    Attributes:
        rows: 0 to MOST_ROWS.
        is_bounded: the table's model, with headroom where there is no budget, could have used more.
    """

    rows: int
    is_bounded: bool


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What all tables of a memory tier share. See ``MemoryStore`` for the meaning of its fields.

    Raises:
        ValueError: more than one bound is given, a budget is less than 1, or a table's capacity less than 0.
    """

    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    capacity_rows_per_table: Mapping[str, int] | None = None
    capacity_rows_of_each_table: int | None = None
    overflow_policy: OverflowPolicy | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        given = [name for name in _BOUNDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"expected one bound, got {' and '.join(given)}")
        for name in ("capacity_rows", "capacity_bytes", "capacity_rows_of_each_table"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for name, value in (self.capacity_rows_per_table or {}).items():
            if value < 0:
                raise ValueError(f"capacity_rows_per_table: expected at least 0 for {name!r}, got {value}")

    def room_for(self, spec: TableSpec, wanted_rows: int, held: Iterable[tuple[TableSpec, int]]) -> Room:
        """What a table is given.

        Args:
            spec: the table.
            wanted_rows: those of its model.
            held: the tables that are open already, and the rows that each was given.
        """
        most = rows_with_headroom(wanted_rows)
        left = self._rows_left(spec, held)
        if left is None:
            left = MOST_ROWS if self.capacity_rows_of_each_table is None else self.capacity_rows_of_each_table
        else:
            most = min(max(wanted_rows, 1), MOST_ROWS)
        return Room(min(most, left), left <= most)

    def _rows_left(self, spec: TableSpec, held: Iterable[tuple[TableSpec, int]]) -> int | None:
        """Rows of the table that its own capacity, or the rest of the budget, has room for; None without either."""
        if spec.name in (self.capacity_rows_per_table or {}):
            return (self.capacity_rows_per_table or {})[spec.name]
        if self.capacity_rows is not None:
            return max(self.capacity_rows - sum(rows for _, rows in held), 0)
        if self.capacity_bytes is None:
            return None
        policy = self.overflow_policy
        taken = sum(HostTable.memory_bytes(one.dim, rows, one.row_dtype, policy) for one, rows in held if rows)
        return rows_within(self.capacity_bytes - taken, spec.dim, spec.row_dtype, policy)


def rows_within(
    size_bytes: int, dim: int, row_dtype: RowDtype = "fp32", overflow_policy: OverflowPolicy | None = None
) -> int:
    """The most rows of ``dim`` columns that a host table of at most ``size_bytes`` has room for; 0 if not even one."""
    fits, too_many = 0, min(max(size_bytes, 0) // dim + 1, MOST_ROWS + 1)  # no row takes less than a byte per column
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if HostTable.memory_bytes(dim, middle, row_dtype, overflow_policy) <= size_bytes:
            fits = middle
        else:
            too_many = middle
    return fits
