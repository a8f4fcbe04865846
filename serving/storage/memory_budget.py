"""How many rows of each table the memory tier has room for, before any memory is taken."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kernels.host import HostTable, OverflowPolicy, RowDtype
from serving.model.capacity import MOST_ROWS, rows_with_headroom
from serving.storage.store import TableSpec

TableRows = tuple[TableSpec, int]

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

    @property
    def shared(self) -> str:
        """The bound that all tables share, as a ``ps.json`` names it; empty without one."""
        return next((name for name in ("capacity_rows", "capacity_bytes") if getattr(self, name) is not None), "")

    def rooms(self, wanted: Sequence[TableRows], held: Iterable[TableRows]) -> list[Room]:
        """What tables are given that are to be held together.

        Where they share a bound and it has no room for all of their rows, each is given one row, as far as the bound
        goes, and of what is left a part in proportion to what it takes, in rows or bytes as the bound counts.

        Args:
            wanted: the tables, and the rows of their models.
            held: the tables that have their room already, and the rows that each was given.
        """
        if not self.shared:
            return [self._room_alone(spec, rows) for spec, rows in wanted]
        left = (self.capacity_rows or self.capacity_bytes or 0) - sum(self._cost(*one) for one in held)
        wanted = [(spec, min(max(rows, 1), MOST_ROWS)) for spec, rows in wanted]
        is_bounded = sum(self._cost(*one) for one in wanted) >= left
        if not is_bounded:
            return [Room(rows, False) for _, rows in wanted]
        return [Room(rows, True) for rows in self._shares(wanted, left)]

    def no_room(self, table: str) -> str:
        """What is to be told of a table to which the shared bound leaves no room."""
        return (
            f"table {table} has no room in RAM, no row of it will be kept there; raise volatile_db.{self.shared}, or "
            "say in volatile_db.capacity_rows_per_table what each table is given"
        )

    def room_for(self, spec: TableSpec, wanted_rows: int, held: Iterable[TableRows]) -> Room:
        """What one table is given; see ``rooms``."""
        return self.rooms([(spec, wanted_rows)], held)[0]

    def _room_alone(self, spec: TableSpec, wanted_rows: int) -> Room:
        own = (self.capacity_rows_per_table or {}).get(spec.name)
        if own is not None:
            return Room(min(max(wanted_rows, 1), MOST_ROWS, own), own <= max(wanted_rows, 1))
        most = rows_with_headroom(wanted_rows)
        left = MOST_ROWS if self.capacity_rows_of_each_table is None else self.capacity_rows_of_each_table
        return Room(min(most, left), left <= most)

    def _shares(self, wanted: Sequence[TableRows], left: int) -> list[int]:
        """Rows by table, where all together cost ``left`` or more."""
        least = [self._cost(spec, 1) for spec, _ in wanted]
        beyond = [self._cost(*one) - cost for one, cost in zip(wanted, least, strict=True)]
        to_share, all_beyond = max(left - sum(least), 0), max(sum(beyond), 1)
        ends = [to_share * end // all_beyond for end in accumulate(beyond, initial=0)]  # so that no row is lost
        shares, spare = [], 0
        for (spec, rows), first, (begin, end) in zip(wanted, least, pairwise(ends), strict=True):
            most = min(first + end - begin + spare, left)
            given = min(self._rows_within(most, spec), rows)
            left -= self._cost(spec, given)
            spare = max(most - self._cost(spec, given), 0)
            shares.append(given)
        return shares

    def _cost(self, spec: TableSpec, rows: int) -> int:
        """What so many rows take of the shared bound."""
        if self.capacity_bytes is None:
            return rows
        return HostTable.memory_bytes(spec.dim, rows, spec.row_dtype, self.overflow_policy) if rows else 0

    def _rows_within(self, cost: int, spec: TableSpec) -> int:
        """The most rows of a table that take at most ``cost``."""
        if self.capacity_bytes is None:
            return max(cost, 0)
        return rows_within(cost, spec.dim, spec.row_dtype, self.overflow_policy)


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
