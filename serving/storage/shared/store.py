"""The memory tier that processes of one machine share: one copy in /dev/shm; one writes, the others read."""

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kernels.errors import SharedMemoryError
from kernels.shared import SharedTable
from serving.errors import StoreError
from serving.storage.host_tables import HostTables
from serving.storage.shared.folder import SHARED_MEMORY, SharedFolder
from serving.storage.shared.room import STORE_NAME, shared_room
from serving.storage.store import CHANGED, Keys, TableSpec, Vectors, files_of, has_rows_of

_POLL_S = 0.02


class SharedMemoryStore(HostTables[SharedTable]):
    """Rows in memory that processes share. See ``PooledStore``, ``ReservingStore`` and ``DurableStore``.

    The first process writes: it fills the tables. The others wait for them, read the same copy and see what the writer
    changes. When the writer ends, however it ends, they read on, and the next process that starts writes. The tables
    outlive the writer; they go with the last process, unless that is killed: then the next one finds them.
    A table that the writer loads anew, from other files, is a new copy: processes that have the old one keep it until
    they load it, too. A forked child has left: what it asks for raises an error.
    """

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
            wait_ms: how long to wait for a table that another process is to fill.
            folder: a file system that is memory, instead of /dev/shm.

        Raises:
            StoreError: the folder belongs to another user, or cannot be made.
        """
        super().__init__()
        self._capacity_bytes = capacity_bytes
        self._auto_remove = auto_remove
        self._wait_ms = wait_ms
        self._writing = threading.Lock()  # held by each write of rows: none may run when another process writes
        self._lock = threading.Lock()  # one change of the fields below at a time
        self._reserved: dict[str, tuple[TableSpec, int]] = {}
        self._found: dict[str, SharedTable] = {}  # that others have filled, until they are opened
        self._folder = SharedFolder(self.name, folder / shared_name)
        self._folder.try_to_write()
        atexit.register(self.close)  # or the tables of a process that does not close its server would stay

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self._folder.writes

    def reserve(self, spec: TableSpec, rows: int) -> None:
        """See ``ReservingStore.reserve``."""
        with self._lock:
            self._reserved = {**self._reserved, spec.name: (spec, rows)}

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``."""
        with self._lock:
            tables = self._open_tables(spec.name)
            table = self._found.pop(spec.name, None) or self._current(spec.name)
            if table is None:
                if not self._folder.writes:
                    raise self._refused(spec.name)
                table = self._create(spec, capacity_rows, "")
                self._folder.publish(spec.name)
            self._check_form(spec, table.dim, table.row_dtype)
            self._tables = {**tables, spec.name: table}

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``: None, as a table that was loaded has all of its rows."""
        return None if table in self._open_tables(table) else 0

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``; only in the process that writes."""
        with self._writing:
            held = self._to_write(table)
            self._insert_rows(table, held, keys, rows)

    def evict(self, table: str, keys: Keys) -> int | None:
        """See ``Store.evict``; exact; only in the process that writes."""
        with self._writing:
            return self._to_write(table).evict(keys) if table in self._open_tables(table) else 0

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; only in the process that writes. Others that have the table keep it."""
        with self._lock:
            tables = self._open_tables(table)
            if not self._folder.writes and (table in tables or self._folder.table_file(table).exists()):
                raise self._refused(table)
            self._folder.table_file(table).unlink(missing_ok=True)
            self._tables = {name: held for name, held in tables.items() if name != table}

    def loaded_from(self, table: str) -> str | None:
        """See ``DurableStore.loaded_from``; waits while another process is to fill the table.

        Raises:
            StoreError: that process has not filled it in time.
        """
        held = self._wait_for(table, lambda _: True)
        return None if held is None else self._record(table, held)

    def mark_changed(self, table: str) -> None:
        """See ``DurableStore.mark_changed``."""
        self._to_write(table).mark_changed()

    def bulk_load(
        self, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], digest: str, *, unless_loaded: bool = False
    ) -> None:
        """See ``DurableStore.bulk_load``; after ``reserve``. Waits while another process is to load it.

        Raises:
            StoreError: that process has not loaded it, from the same files, in time.
        """

        def is_loaded(held: SharedTable) -> bool:
            return has_rows_of(self._record(spec.name, held), digest)

        self._wait_for(spec.name, is_loaded)
        with self._lock:
            tables = self._open_tables(spec.name)
            if not self._folder.writes:
                self._tables = {**tables, spec.name: self._found.pop(spec.name)}
                return
            table = self._create(spec, self._reserved[spec.name][1], digest.removesuffix(CHANGED))
            try:
                if digest.endswith(CHANGED):
                    table.mark_changed()
                for keys, rows in batches:
                    self._insert_rows(spec.name, table, keys, rows)
            except BaseException:
                self._folder.new_file(spec.name).unlink()
                raise
            self._folder.publish(spec.name)
            self._tables = {**tables, spec.name: table}

    def close(self) -> None:
        """See ``Store.close``."""
        atexit.unregister(self.close)
        if self._folder.is_left:  # a forked child's copies of the locks below may be taken for ever
            self._tables = None
            return
        with self._lock, self._writing:
            self._tables = None
            self._folder.leave(self._auto_remove)

    def _wait_for(self, table: str, is_wanted: Callable[[SharedTable], bool]) -> SharedTable | None:
        """The table, once its file is as wanted; None where this process is to make it so."""
        deadline = time.monotonic() + self._wait_ms / 1000
        while True:
            with self._lock:
                held = self._current(table)
                if held is not None and not held.writes:
                    self._found[table] = held
                if held is not None and is_wanted(held):
                    return held
                if self._folder.writes or self._take_over():
                    return None
            if time.monotonic() > deadline:
                reason = f"{self._folder.writer()}, which writes, has not loaded it within {self._wait_ms / 1000:g} s"
                raise StoreError(self.name, table, reason)
            time.sleep(_POLL_S)

    def _current(self, table: str) -> SharedTable | None:
        """The table as its file is now: to a reader, a copy that has taken the place of the one that it has."""
        file = self._folder.table_file(table)
        for held in (self._found.get(table), self._held_table(table)):
            if held is not None and (held.writes if self._folder.writes else held.is_at(file)):
                return held
        return self._attach(table)

    def _attach(self, table: str) -> SharedTable | None:
        """The table as it lies in shared memory; None where there is none, or, for the writer, none to be used."""
        file = self._folder.table_file(table)
        if not file.exists():
            return None
        try:
            return SharedTable.attach(file, self._folder.writes)
        except SharedMemoryError as err:
            if self._folder.writes:  # of another version, say: it will be loaded anew
                return None
            raise StoreError(self.name, table, str(err)) from err

    def _take_over(self) -> bool:
        """Become the process that writes, if that one has ended."""
        if not self._folder.try_to_write():
            return False
        self._found = {}
        self._tables = {
            name: None if held is None else self._taken_over(name, held) for name, held in self._open_tables("").items()
        }
        return True

    def _taken_over(self, table: str, held: SharedTable) -> SharedTable:
        """An open table, to write to; to be read only where its file is gone or has the rows of other files by now."""
        attached = self._attach(table)
        return attached if attached is not None and files_of(attached.source) == files_of(held.source) else held

    def _record(self, table: str, held: SharedTable) -> str | None:
        spec, _ = self._reserved.get(table, (None, 0))
        if not held.source or (spec is not None and (held.dim, held.row_dtype) != (spec.dim, spec.row_dtype)):
            return None
        return held.source + (CHANGED if held.is_changed else "")

    def _create(self, spec: TableSpec, rows: int, digest: str) -> SharedTable:
        tables = self._open_tables(spec.name)
        held = [
            (TableSpec(name, one.dim, 8, one.row_dtype), one.capacity_rows)
            for name, one in tables.items()
            if one is not None and name != spec.name
        ]
        capacity = shared_room(self._capacity_bytes, spec, rows, held)
        try:
            return SharedTable.create(self._folder.new_file(spec.name), spec.dim, capacity, spec.row_dtype, digest)
        except SharedMemoryError as err:
            raise StoreError(self.name, spec.name, str(err)) from err

    def _to_write(self, table: str) -> SharedTable:
        held = self._held_table(table)
        if held is None:
            raise StoreError(self.name, table, "not an open table")
        if not held.writes:
            raise self._refused(table)
        return held

    def _refused(self, table: str) -> StoreError:
        if self._folder.writes:
            reason = "who wrote it removed or replaced it, and this process has a copy to read: load its model anew"
        else:
            reason = f"this process only reads {self._folder.path}; {self._folder.writer()} writes: change it there"
        return StoreError(self.name, table, reason)
