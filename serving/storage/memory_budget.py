"""How many rows each table of a memory tier may hold, computed before memory is taken."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

from kernels.host import HostTable, OverflowPolicy, RowDtype
from serving.model.capacity import HEADROOM_RATIO, MOST_ROWS, rows_with_headroom
from serving.model.names import without_version
from serving.storage.store import TableSpec

TableRows = tuple[TableSpec, int]

# The bounds, and their keys in a ps.json.
_BOUNDS = {
    "capacity_rows": "capacity_rows",
    "capacity_bytes": "capacity_bytes",
    "capacity_rows_per_table": "capacity_rows_per_table",
    "capacity_rows_of_each_table": "overflow_margin",
}


@dataclass(frozen=True, slots=True)
class Quota:
    """The rows that one table may hold.

    Attributes:
        rows: 0 to MOST_ROWS.
        is_bounded: the budget makes the table smaller than it would be.
    """

    rows: int
    is_bounded: bool


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The budget of all tables of a memory tier; ``MemoryStore`` explains the fields and their errors."""

    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    capacity_rows_per_table: Mapping[str, int] | None = None
    capacity_rows_of_each_table: int | None = None
    overflow_policy: OverflowPolicy | None = None
    headroom_ratio: float = HEADROOM_RATIO

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
        """The name of the bound that all tables share, as in a ``ps.json``; empty without one."""
        return next((name for name in ("capacity_rows", "capacity_bytes") if getattr(self, name) is not None), "")

    @property
    def advice(self) -> str:
        """What to change in a ``ps.json`` if the system does not have the memory."""
        given = next((key for name, key in _BOUNDS.items() if getattr(self, name) is not None), None)
        return f"lower volatile_db.{given}" if given else "bound the rows in RAM with volatile_db.capacity_bytes"

    def quotas(self, wanted: Sequence[TableRows], given: Iterable[TableRows]) -> list[Quota]:
        """Return the quotas of tables that are opened together.

        If a shared bound is too small for all rows, each table gets one row while the bound lasts. The rest of the
        bound is divided in proportion to the tables' rows or bytes, whichever the bound counts.

        Args:
            wanted: the tables, and the rows of their models.
            given: the tables that have their quota already, and its rows.
        """
        if not self.shared:
            return [self._quota_alone(spec, rows) for spec, rows in wanted]
        left = (self.capacity_rows or self.capacity_bytes or 0) - sum(self._cost(*table_rows) for table_rows in given)
        wanted = [(spec, min(max(rows, 1), MOST_ROWS)) for spec, rows in wanted]
        if self.headroom_ratio != HEADROOM_RATIO:  # new keys will come
            roomy = [(spec, rows_with_headroom(rows, self.headroom_ratio)) for spec, rows in wanted]
            wanted = roomy if sum(starmap(self._cost, roomy)) < left else wanted
        is_bounded = sum(starmap(self._cost, wanted)) >= left
        if not is_bounded:
            return [Quota(rows, False) for _, rows in wanted]
        return [Quota(rows, True) for rows in self._divided(wanted, left)]

    def no_room(self, table: str) -> str:
        """Return the message about a table for which the shared bound has no rows left."""
        return (
            f"table {table} has no room in RAM, so none of its rows are kept there; raise volatile_db.{self.shared}, "
            "or set volatile_db.capacity_rows_per_table"
        )

    def quota(self, spec: TableSpec, wanted_rows: int, given: Iterable[TableRows]) -> Quota:
        """Return the quota of one table; see ``quotas``."""
        return self.quotas([(spec, wanted_rows)], given)[0]

    def _quota_alone(self, spec: TableSpec, wanted_rows: int) -> Quota:
        own = (self.capacity_rows_per_table or {}).get(without_version(spec.name))
        if own is not None:
            return Quota(min(max(wanted_rows, 1), MOST_ROWS, own), own <= max(wanted_rows, 1))
        most_rows = rows_with_headroom(wanted_rows, self.headroom_ratio)
        left = MOST_ROWS if self.capacity_rows_of_each_table is None else self.capacity_rows_of_each_table
        return Quota(min(most_rows, left), left <= most_rows)

    def _divided(self, wanted: Sequence[TableRows], left: int) -> list[int]:
        """Return the rows of each table, where all tables together cost ``left`` or more."""
        least = [self._cost(spec, 1) for spec, _ in wanted]
        beyond = [self._cost(*table_rows) - cost for table_rows, cost in zip(wanted, least, strict=True)]
        to_share, all_beyond = max(left - sum(least), 0), max(sum(beyond), 1)
        ends = [
            to_share * end // all_beyond for end in accumulate(beyond, initial=0)
        ]  # running totals, so that rounding loses no row
        quotas, spare = [], 0
        for (spec, rows), first, (begin, end) in zip(wanted, least, pairwise(ends), strict=True):
            most_cost = min(first + end - begin + spare, left)
            given = min(self._rows_within(most_cost, spec), rows)
            left -= self._cost(spec, given)
            spare = max(most_cost - self._cost(spec, given), 0)
            quotas.append(given)
        return quotas

    def _cost(self, spec: TableSpec, rows: int) -> int:
        """Return how much of the shared bound so many rows take."""
        if self.capacity_bytes is None:
            return rows
        return HostTable.memory_bytes(spec.dim, rows, spec.row_dtype, self.overflow_policy) if rows else 0

    def _rows_within(self, cost: int, spec: TableSpec) -> int:
        """Return how many rows of a table fit into ``cost``."""
        if self.capacity_bytes is None:
            return max(cost, 0)
        return rows_within(cost, spec.dim, spec.row_dtype, self.overflow_policy)


def rows_within(
    size_bytes: int, dim: int, row_dtype: RowDtype = "fp32", overflow_policy: OverflowPolicy | None = None
) -> int:
    """Return how many rows of ``dim`` columns fit into a host table of ``size_bytes``."""
    fits, too_many = 0, min(max(size_bytes, 0) // dim + 1, MOST_ROWS + 1)  # no row takes less than a byte per column
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if HostTable.memory_bytes(dim, middle, row_dtype, overflow_policy) <= size_bytes:
            fits = middle
        else:
            too_many = middle
    return fits
