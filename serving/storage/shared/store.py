"""The store of tables in shared memory, and the memory that such tables need."""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from kernels.errors import SharedMemoryError
from kernels.host import HostTable
from kernels.shared import SharedTable
from kernels.system_memory import huge_page_advice
from serving.errors import StoreError, StoreFullError, StoreUnreachableError
from serving.model.capacity import rows_with_headroom
from serving.storage.marker import Marker
from serving.storage.memory_budget import MemoryBudget, TableRows
from serving.storage.shared.folder import SHARED_MEMORY, SharedFolder
from serving.storage.store import Batches, Keys, TableSpec, Truth, Vectors
from serving.storage.tables import HostTableStore

logger = logging.getLogger(__name__)

STORE_NAME = "shared_memory"
_POLL_S = 0.02
_ANY_SIZE = 1 << 50  # of the tables of workers: no configuration has set it


def shared_capacity(size_bytes: int, spec: TableSpec, rows: int, held: Sequence[TableRows]) -> int:
    """Return the capacity of a table in rows: its own rows, and headroom as far as the memory lasts.

    Args:
        size_bytes: memory of all tables together.
        spec: the table.
        rows: the table's own rows.
        held: the tables that have their memory already, and their capacities.

    Raises:
        StoreFullError: the memory does not hold the table's rows.
    """
    capacity = MemoryBudget(capacity_bytes=size_bytes).quota(spec, rows_with_headroom(rows), held).rows
    if capacity < rows:
        reason = (
            f"the table has {rows:,} rows, but volatile_db.shared_memory_size, {size_bytes:,} bytes for all tables, "
            f"leaves room for {capacity:,}; `hotrow check` says how much is needed"
        )
        raise StoreFullError(STORE_NAME, spec.name, reason)
    return capacity


def least_shared_bytes(tables: Sequence[TableRows]) -> int:
    """Return the least memory for tables of so many rows, loaded in this order; the last needs no headroom."""
    given = [(spec, rows_with_headroom(rows)) for spec, rows in tables[:-1]] + list(tables[-1:])
    return sum(HostTable.memory_bytes(spec.dim, rows, spec.row_dtype) for spec, rows in given)


@cache
def _log_huge_page_advice(folder: Path) -> None:
    advice = huge_page_advice(folder)
    if advice:
        logger.info("shared memory without huge pages makes lookups slower; to allow them, run: %s", advice)


class SharedMemoryStore(HostTableStore[SharedTable]):
    """Rows in memory that the processes of one machine share; see ``serving.storage.shared`` for who does what."""

    outlives_process = True

    _NAME = STORE_NAME

    def __init__(
        self,
        shared_name: str,
        capacity_bytes: int,
        auto_remove: bool = True,
        wait_ms: int = 600_000,
        folder: Path = SHARED_MEMORY,
    ) -> None:
        """Join the processes that share under this name.

        Args:
            shared_name: the folder's name in /dev/shm; processes with the same name share.
            capacity_bytes: most memory of all tables together.
            auto_remove: the last process to leave removes the tables.
            wait_ms: how long to wait for a table that another process fills.
            folder: a file system in memory, instead of /dev/shm.

        Raises:
            StoreError: the folder belongs to another user, or cannot be created.
        """
        super().__init__()
        self._capacity_bytes = capacity_bytes
        self._auto_remove = auto_remove
        self._wait_ms = wait_ms
        self._writing = threading.Lock()  # held by each write of rows: none may run when another process writes
        self._lock = threading.Lock()  # one change of the fields below at a time
        self._found: dict[str, SharedTable] = {}  # tables that others have filled, until they are opened
        self._sizes: dict[str, TableRows] = {}  # the capacities of tables that were opened and not dropped since
        self._folder = SharedFolder(self.name, folder / shared_name)
        _log_huge_page_advice(folder)
        self._folder.try_to_write()
        atexit.register(self.close)  # a process that does not close its server must not leave tables

    @property
    def identity(self) -> str:
        """See ``Store.identity``."""
        return f"{self.name} {self._folder.path}"

    @property
    def writes(self) -> bool:
        """Whether this process is the writer."""
        return self._folder.writes

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``."""
        with self._lock:
            self._open_tables(spec.name)
            table = self._found.pop(spec.name, None) or self._current(spec.name)
            if table is None:
                if not self.writes:
                    raise self._refused(spec.name)
                table = self._create(spec, capacity_rows, "")
                self._folder.publish(spec.name)
            self._check_spec(spec, table.dim, table.row_dtype)
            self._serve(spec, table)

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``; None, because a loaded table holds all of its rows."""
        return None if table in self._open_tables(table) else 0

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``; refused in a process that only reads."""
        with self._writing:
            held = self._to_write(table)
            self._insert_rows(table, held, keys, rows)

    def evict(self, table: str, keys: Keys) -> None:
        """See ``Store.evict``; refused in a process that only reads."""
        with self._writing:
            if table in self._open_tables(table):
                self._to_write(table).evict(keys)

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; refused in a process that only reads. Processes that have the table keep it."""
        with self._lock:
            tables = self._open_tables(table)
            if not self.writes and (table in tables or self._folder.table_file(table).exists()):
                raise self._refused(table)
            self._folder.table_file(table).unlink(missing_ok=True)
            self._tables = {name: held for name, held in tables.items() if name != table}
            self._sizes.pop(table, None)

    def close_table(self, table: str) -> None:
        """See ``Store.close_table``; the table is unmapped, and its file still counts as memory."""
        with self._lock:
            self._tables = {name: held for name, held in self._open_tables(table).items() if name != table}
            self._found.pop(table, None)

    def marker(self, table: str) -> Marker | None:
        """See ``Store.marker``; waits while another process fills the table.

        Raises:
            StoreError: that process did not fill the table in time.
        """
        held = self._wait_for(table, lambda _: True)
        if held is None or not held.source:
            return None
        return Marker(held.source, len(held), held.row_dtype, held.is_changed)

    def write_flags(
        self, table: str, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None
    ) -> None:
        """See ``Store.write_flags``; only ``changed`` is kept, and only a load clears it."""
        if changed:
            self._to_write(table).mark_changed()

    def load(self, spec: TableSpec, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``Store.load``; takes memory for ``marker.rows`` and headroom.

        A process that only reads waits until the writer has loaded the table from the same files.

        Raises:
            StoreError: the writer did not load the table in time.
        """
        self._wait_for(spec.name, lambda held: self._is_of(held, spec, marker.digest))
        with self._lock:
            self._open_tables(spec.name)
            if not self.writes:
                return self._serve(spec, self._found.pop(spec.name))
            kept = self._current(spec.name) if keep else None
            if kept is not None and len(kept):
                self._check_spec(spec, kept.dim, kept.row_dtype)
                batches = chain(kept.items(), batches)
            kept_rows = len(kept) if kept is not None else 0
            table = self._create(spec, marker.rows + kept_rows, marker.digest)
            try:
                if marker.changed or kept_rows:
                    table.mark_changed()
                for keys, rows in batches:
                    self._insert_rows(spec.name, table, keys, rows)
            except BaseException:
                self._folder.new_file(spec.name).unlink()
                raise
            self._folder.publish(spec.name)
            self._serve(spec, table)

    def fill(self, spec: TableSpec, truth: Truth, *, starting: bool) -> bool:
        """See ``Store.fill``; only the writer can drop rows, so a process may have to take its place first."""
        with self._lock:
            is_writer = self.writes or self._take_over()
        if not is_writer and starting and not truth.marker().is_current(self.identity):
            raise self._refused(spec.name)
        return super().fill(spec, truth, starting=starting)

    def close(self) -> None:
        """See ``Store.close``."""
        atexit.unregister(self.close)
        if self._folder.is_left:  # a forked child's copies of the locks below may be held forever
            self._tables = None
            return
        with self._lock, self._writing:
            self._tables = None
            self._folder.leave(self._auto_remove)

    def _wait_for(self, table: str, is_wanted: Callable[[SharedTable], bool]) -> SharedTable | None:
        """Wait for a table that ``is_wanted``, and return it; None if this process is the writer that must fill it."""
        deadline = time.monotonic() + self._wait_ms / 1000
        while True:
            with self._lock:
                held = self._current(table)
                if held is not None and not held.writes:
                    self._found[table] = held
                if held is not None and is_wanted(held):
                    return held
                if self.writes or self._take_over():
                    return None
            if time.monotonic() > deadline:
                reason = f"{self._folder.writer()}, which writes, has not loaded it within {self._wait_ms / 1000:g} s"
                raise StoreError(self.name, table, reason)
            time.sleep(_POLL_S)

    def _current(self, table: str) -> SharedTable | None:
        """Return the table of the file as it is now, which may be a newer copy than the open table."""
        file = self._folder.table_file(table)
        for held in (self._found.get(table), self._held_table(table)):
            if held is not None and (held.writes if self.writes else held.is_at(file)):
                return held
        return self._attach(table)

    def _attach(self, table: str) -> SharedTable | None:
        """Attach to the table's file; None if there is no file, or the writer cannot use it."""
        file = self._folder.table_file(table)
        if not file.exists():
            return None
        try:
            return SharedTable.attach(file, self.writes)
        except SharedMemoryError as err:
            if self.writes:  # such as a file of another version: the table is loaded again
                return None
            raise StoreError(self.name, table, str(err)) from err

    def _take_over(self) -> bool:
        """Become the writer, if the former writer has ended."""
        if not self._folder.try_to_write():
            return False
        self._found = {}
        self._tables = {
            name: None if held is None else self._taken_over(name, held) for name, held in self._open_tables("").items()
        }
        return True

    def _taken_over(self, table: str, held: SharedTable) -> SharedTable:
        """Return an open table to write to, or the same copy to read if its file is gone or is of other files now."""
        attached = self._attach(table)
        return attached if attached is not None and attached.source == held.source else held

    def _is_of(self, held: SharedTable, spec: TableSpec, digest: str) -> bool:
        return (held.source, held.dim, held.row_dtype) == (digest, spec.dim, spec.row_dtype)

    def _create(self, spec: TableSpec, rows: int, digest: str) -> SharedTable:
        held = [size for name, size in self._sizes.items() if name != spec.name]
        capacity = shared_capacity(self._capacity_bytes, spec, rows, held)
        try:
            return SharedTable.create(self._folder.new_file(spec.name), spec.dim, capacity, spec.row_dtype, digest)
        except SharedMemoryError as err:
            reason = str(err)
            if self._capacity_bytes < _ANY_SIZE:
                reason += f"; volatile_db.shared_memory_size is {self._capacity_bytes:,}"
            raise StoreError(self.name, spec.name, reason) from err

    def _serve(self, spec: TableSpec, table: SharedTable) -> None:
        self._tables = {**self._open_tables(spec.name), spec.name: table}
        self._sizes[spec.name] = (spec, table.capacity_rows)

    def _to_write(self, table: str) -> SharedTable:
        held = self._held_table(table)
        if held is None:
            raise StoreError(self.name, table, "not an open table")
        if not held.writes:
            raise self._refused(table)
        return held

    def _refused(self, table: str) -> StoreError:
        if self.writes:
            reason = "the writer removed or replaced it, and this process has a read-only copy: load its model again"
        else:
            reason = f"this process only reads {self._folder.path}; {self._folder.writer()} writes: change the table "
            reason += "there or, if it has ended, in the next process to start"
        return StoreUnreachableError(self.name, table, reason)
