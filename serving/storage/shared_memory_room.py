"""What each table is given of the memory that processes share, and how much of that all tables need."""

from collections.abc import Sequence

from kernels.host import HostTable
from serving.errors import StoreFullError
from serving.model.capacity import rows_with_headroom
from serving.storage.memory_budget import MemoryBudget, TableRows
from serving.storage.store import TableSpec

STORE_NAME = "shared_memory"


def shared_room(size_bytes: int, spec: TableSpec, rows: int, held: Sequence[TableRows]) -> int:
    """How many rows a table is given: all of its own, and headroom for new ones as far as the memory goes.

    Args:
        size_bytes: of all tables together.
        spec: the table.
        rows: that it has.
        held: the tables that have their room already, and the rows that each was given.

    Raises:
        StoreFullError: there is no room for its rows.
    """
    room = MemoryBudget(capacity_bytes=size_bytes).room_for(spec, rows_with_headroom(rows), held).rows
    if room < rows:
        reason = (
            f"the table has {rows:,} rows, volatile_db.shared_memory_size, {size_bytes:,} bytes for all tables, leaves "
            f"room for {room:,}; hotrow check tells what it must be at least"
        )
        raise StoreFullError(STORE_NAME, spec.name, reason)
    return room


def least_shared_bytes(tables: Sequence[TableRows]) -> int:
    """The least memory with room for tables of so many rows, loaded in this order: the last can do without headroom."""
    given = [(spec, rows_with_headroom(rows)) for spec, rows in tables[:-1]] + list(tables[-1:])
    return sum(HostTable.memory_bytes(spec.dim, rows, spec.row_dtype) for spec, rows in given)
