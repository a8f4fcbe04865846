"""The store of tables in shared memory, and the memory that such tables need."""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path

from kernels.errors import SharedMemoryError
from kernels.host import HostTable
from kernels.shared import SharedTable
from kernels.system_memory import huge_page_advice
from serving.errors import StoreError, StoreFullError, StoreUnreachableError
from serving.model.capacity import HEADROOM_RATIO, rows_with_headroom
from serving.storage.marker import Marker
from serving.storage.memory_budget import MemoryBudget, TableRows
from serving.storage.shared.folder import SHARED_MEMORY, STORE_NAME, SharedFolder
from serving.storage.shared.redo import RedoLog
from serving.storage.store import (
    Batches,
    Change,
    Keys,
    LastingStore,
    LastingTable,
    Reached,
    StoreTable,
    TableSpec,
    Truth,
    Vectors,
    with_sums,
)
from serving.storage.tables import HostRowsTable
from serving.stream.log_state import LogState

logger = logging.getLogger(__name__)

_POLL_S = 0.02
# How long a process that only reads waits for a change of the writer, and how often it looks.
_WRITER_S, _LOOK_S = 5.0, 0.002
_ANY_SIZE = 1 << 50  # of the tables of workers: no configuration has set it


def shared_capacity(
    size_bytes: int, spec: TableSpec, rows: int, given: Sequence[TableRows], headroom_ratio: float = HEADROOM_RATIO
) -> int:
    """Return the capacity of a table in rows: its own rows, and headroom as far as the memory lasts.

    Args:
        size_bytes: memory of all tables together.
        spec: the table.
        rows: the table's own rows.
        given: the tables that have their memory already, and their capacities.
        headroom_ratio: the headroom as a share of the rows.

    Raises:
        StoreFullError: the memory does not hold the table's rows.
    """
    wanted = rows_with_headroom(rows, headroom_ratio)
    capacity = MemoryBudget(capacity_bytes=size_bytes).quota(spec, wanted, given).rows
    if capacity < rows:
        reason = (
            f"the table has {rows:,} rows, but volatile_db.shared_memory_size, {size_bytes:,} bytes for all tables, "
            f"leaves room for {capacity:,}; `hotrow check` says how much is needed"
        )
        raise StoreFullError(STORE_NAME, spec.name, reason)
    return capacity


def least_shared_bytes(tables: Sequence[TableRows], headroom_ratio: float = HEADROOM_RATIO) -> int:
    """Return the least memory for tables of so many rows, loaded in this order; the last needs no headroom."""
    given = [(spec, rows_with_headroom(rows, headroom_ratio)) for spec, rows in tables[:-1]] + list(tables[-1:])
    return sum(HostTable.memory_bytes(spec.dim, rows, spec.row_dtype) for spec, rows in given)


@cache
def _log_huge_page_advice(folder: Path) -> None:
    advice = huge_page_advice(folder)
    if advice:
        logger.info("shared memory without huge pages makes lookups slower; to allow them, run: %s", advice)


class SharedMemoryStore(LastingStore):
    """Rows in memory that the processes of one machine share; see ``serving.storage.shared`` for who does what."""

    name = STORE_NAME
    keeps_row_dtype = True
    has_one_writer = False

    def __init__(
        self,
        shared_name: str,
        capacity_bytes: int,
        auto_remove: bool = True,
        wait_ms: int = 600_000,
        folder: Path = SHARED_MEMORY,
        headroom_ratio: float = HEADROOM_RATIO,
    ) -> None:
        """Join the processes that share under this name.

        Args:
            shared_name: the folder's name in /dev/shm; processes with the same name share.
            capacity_bytes: maximum memory of all tables together.
            auto_remove: the last process to leave removes the tables.
            wait_ms: how long to wait for a table that another process fills.
            folder: a file system in memory, instead of /dev/shm.
            headroom_ratio: the room for new keys in a table, as a share of its rows, as far as the memory lasts.

        Raises:
            StoreError: the folder belongs to another user, or cannot be created.
        """
        super().__init__()
        self._capacity_bytes = capacity_bytes
        self._auto_remove = auto_remove
        self._wait_ms = wait_ms
        self._headroom_ratio = headroom_ratio
        self._writing = threading.Lock()  # held by each write of rows: none may run when another process writes
        self._lock = threading.Lock()  # one change of the tables at a time
        self._sizes: dict[str, TableRows] = {}  # the capacities of tables that were opened and not erased since
        self._folder = SharedFolder(folder / shared_name)
        _log_huge_page_advice(folder)
        self._folder.try_to_write()
        atexit.register(self.close)  # a process that does not close its server must not leave tables

    @property
    def identity(self) -> str:
        """See ``LastingStore.identity``."""
        return f"{self.name} {self._folder.path}"

    @property
    def writes(self) -> bool:
        """Whether this process is the writer."""
        return self._folder.writes

    def _new_table(self, spec: TableSpec) -> "SharedMemoryTable":
        return SharedMemoryTable(self, spec)

    def erase(self, table: str) -> None:
        """See ``Store.erase``; refused in a process that only reads. Processes that have the table keep it."""
        with self._lock:
            self._check_open(table)
            open_table = self._tables.get(table)
            if not self.writes and (open_table is not None or self._folder.table_file(table).exists()):
                raise self._refused(table)
            self._folder.table_file(table).unlink(missing_ok=True)
            RedoLog(self._folder.table_file(table)).remove()
            self._sizes.pop(table, None)
        if open_table is not None:
            open_table.close()

    def close(self) -> None:
        """See ``Store.close``."""
        atexit.unregister(self.close)
        if self._folder.is_left:  # a forked child's copies of the locks below may be held forever
            self.is_closed, self._tables = True, {}
            return
        super().close()
        with self._lock, self._writing:
            self._folder.leave(self._auto_remove)

    def _take_over(self) -> bool:
        """Become the writer, if the former writer has ended. The lock is held."""
        if not self._folder.try_to_write():
            return False
        for table in self._tables.values():
            if isinstance(table, SharedMemoryTable):
                table.take_over()
        return True

    def _create(self, spec: TableSpec, rows: int, digest: str) -> SharedTable:
        given = [size for name, size in self._sizes.items() if name != spec.name]
        capacity = shared_capacity(self._capacity_bytes, spec, rows, given, self._headroom_ratio)
        try:
            return SharedTable.create(self._folder.new_file(spec.name), spec.dim, capacity, spec.row_dtype, digest)
        except SharedMemoryError as err:
            reason = str(err)
            if self._capacity_bytes < _ANY_SIZE:
                reason += f"; volatile_db.shared_memory_size is {self._capacity_bytes:,}"
            raise StoreError(self.name, spec.name, reason) from err

    def _refused(self, table: str) -> StoreError:
        if self.writes:
            reason = "the writer removed or replaced it, and this process has a read-only copy: load its model again"
        else:
            reason = f"this process only reads {self._folder.path}; {self._folder.writer()} writes: change the table "
            reason += "there or, if it has ended, in the next process to start"
        return StoreUnreachableError(self.name, table, reason)


class SharedMemoryTable(HostRowsTable[SharedTable], LastingTable):
    """A table of a ``SharedMemoryStore``."""

    store: SharedMemoryStore

    def __init__(self, store: SharedMemoryStore, spec: TableSpec) -> None:
        """Attach to nothing yet."""
        super().__init__(store, spec)
        self._found: SharedTable | None = None  # a copy that another process has filled, until the table is opened
        self._redo = RedoLog(store._folder.table_file(spec.name))

    @property
    def capacity_rows(self) -> int | None:
        """See ``StoreTable.capacity_rows``; None, because a loaded table holds all of its rows."""
        self._open_rows()
        return None

    @property
    def used_ratio(self) -> float | None:
        """See ``StoreTable.used_ratio``."""
        copy = self._open_rows()
        return len(copy) / copy.capacity_rows

    def open(self, rows: int) -> None:
        """See ``StoreTable.open``."""
        store = self.store
        with store._lock:
            store.check_name(self)
            copy = self._current() if self._found is None or store.writes else self._found
            if copy is None:
                if not store.writes:
                    raise store._refused(self.spec.name)
                copy = store._create(self.spec, rows, "")
                store._folder.publish(self.spec.name)
                self._redo.remove()  # of an older copy
            self._check_same(copy.dim, copy.row_dtype)
            self._serve(copy)

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``; refused in a process that only reads."""
        with self.store._writing:
            self._insert_into(self._to_write(), keys, rows)

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``; refused in a process that only reads."""
        with self.store._writing:
            self._to_write().evict(keys)

    def close(self) -> None:
        """See ``StoreTable.close``; the table is unmapped, and its file still counts as memory."""
        with self.store._lock, self.store._writing:
            self.store.remove(self)
            self._hold(None)
            self._found = None

    def marker(self) -> Marker | None:
        """See ``LastingTable.marker``; waits while another process fills the table.

        Raises:
            StoreError: that process did not fill the table in time.
        """
        copy = self._wait_for(lambda _: True)
        if copy is None or not copy.source:
            return None
        return Marker(copy.source, len(copy), copy.row_dtype, copy.is_changed)

    def write_flags(self, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None) -> None:
        """See ``LastingTable.write_flags``; only the writer keeps ``changed``, and only a load clears it."""
        if changed and self.store.writes:
            self._to_write().mark_changed()

    def reached(self) -> Mapping[str, str]:
        """See ``LastingTable.reached``; the writer first makes a change that a killed writer has left."""
        with self.store._writing, self._translated():
            copy = self._open_rows()
            if copy.writes:
                with suppress(StoreError):  # the table is full: the change waits
                    self._make_waiting(copy)
            return self._redo.states(copy.inode)

    def write(self, change: Change[StoreTable], reached: Reached | None = None) -> None:
        """See ``Store.write``; with ``reached``, a process that only reads waits until the writer has made the change.

        Raises:
            StoreError: the writer has not made the change within 5 seconds.
        """
        if reached is None:
            return super().write(change)
        wanted = LogState.read(reached.state).order
        if not self.store.writes:
            return self._wait_until_made(reached.partition, wanted)
        with self.store._writing, self._translated():
            copy = self._to_write()
            self._make_waiting(copy)
            states = self._redo.states(copy.inode)
            if not _is_reached(states, reached.partition, wanted):
                _, keys, rows, *_ = with_sums(change, self.spec.name, copy.fetch)
                copy.mark_changed()
                self._redo.write(copy.inode, {**states, reached.partition: reached.state}, keys, rows)
                self._make_waiting(copy)
        return None

    def _make_waiting(self, copy: SharedTable) -> None:
        """Make the change that is written down but may not be in the table."""
        waiting = self._redo.waiting(copy.inode)
        if waiting is None:
            return
        keys, rows = waiting
        if rows is None:
            copy.evict(keys)
        else:
            self._insert_into(copy, keys, rows)
        self._redo.made()

    def _wait_until_made(self, partition: str, wanted: tuple[int, ...]) -> None:
        end_s = time.monotonic() + _WRITER_S
        while True:
            with self._translated():
                if _is_reached(self._redo.states(self._open_rows().inode), partition, wanted):
                    return
            if time.monotonic() > end_s:
                raise self._error(f"the writer, {self.store._folder.writer()}, is behind the update log")
            time.sleep(_LOOK_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SharedMemoryError) as err:
            raise self._error(str(err)) from err

    def load(self, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``LastingTable.load``; takes memory for ``marker.rows`` and headroom.

        A process that only reads waits until the writer has loaded the table from the same files.

        Raises:
            StoreError: the writer did not load the table in time.
        """
        store, spec = self.store, self.spec
        store.check_name(self)
        wanted = marker.digest, spec.dim, spec.row_dtype
        found = self._wait_for(lambda copy: (copy.source, copy.dim, copy.row_dtype) == wanted)
        with store._lock:
            store._check_open(spec.name)
            if not store.writes and found is not None:
                return self._serve(found)
            kept = self._current() if keep else None
            if kept is not None and len(kept):
                self._check_same(kept.dim, kept.row_dtype)
                batches = chain(kept.items(), batches)
            kept_rows = len(kept) if kept is not None else 0
            copy = store._create(spec, marker.rows + kept_rows, marker.digest)
            try:
                if marker.changed or kept_rows:
                    copy.mark_changed()
                for keys, rows in batches:
                    self._insert_into(copy, keys, rows)
            except BaseException:
                store._folder.new_file(spec.name).unlink()
                raise
            store._folder.publish(spec.name)
            self._redo.remove()  # of an older copy
            self._serve(copy)

    def fill(self, truth: Truth, *, starting: bool) -> bool:
        """See ``LastingTable.fill``; only the writer drops rows, so a process may have to take its place first."""
        store = self.store
        with store._lock:
            is_writer = store.writes or store._take_over()
        if not is_writer and starting and not truth.marker().is_current(store.identity):
            raise store._refused(self.spec.name)
        return super().fill(truth, starting=starting)

    def take_over(self) -> None:
        """Attach to the open table as the writer; if its file is gone or is of other files now, the copy is only read.

        The store's lock is held.
        """
        attached = self._attach()
        if self._rows is not None and attached is not None and attached.source == self._rows.source:
            self._hold(attached)

    def _wait_for(self, is_wanted: Callable[[SharedTable], bool]) -> SharedTable | None:
        """Wait for a copy that ``is_wanted``, and return it; None if this process is the writer that must fill it."""
        store = self.store
        deadline = time.monotonic() + store._wait_ms / 1000
        while True:
            with store._lock:
                store._check_open(self.spec.name)
                copy = self._current()
                self._found = copy if copy is not None and not copy.writes else None
                if copy is not None and is_wanted(copy):
                    return copy
                if store.writes or store._take_over():
                    self._found = None
                    return None
            if time.monotonic() > deadline:
                waited = f"{store._wait_ms / 1000:g} s"
                raise self._error(f"{store._folder.writer()}, which writes, has not loaded it within {waited}")
            time.sleep(_POLL_S)

    def _current(self) -> SharedTable | None:
        """Return the table of the file as it is now, which may be a newer copy than the open table."""
        store, file = self.store, self.store._folder.table_file(self.spec.name)
        for copy in (self._found, self._rows):
            if copy is not None and (copy.writes if store.writes else copy.is_at(file)):
                return copy
        return self._attach()

    def _attach(self) -> SharedTable | None:
        """Attach to the table's file; None if there is no file, or the writer cannot use it."""
        file = self.store._folder.table_file(self.spec.name)
        if not file.exists():
            return None
        try:
            return SharedTable.attach(file, self.store.writes)
        except SharedMemoryError as err:
            if self.store.writes:  # such as a file of another version: the table is loaded again
                return None
            raise self._error(str(err)) from err

    def _serve(self, copy: SharedTable) -> None:
        self.store.add(self)
        self._hold(copy)
        self._found = None
        self.store._sizes[self.spec.name] = (self.spec, copy.capacity_rows)

    def _to_write(self) -> SharedTable:
        copy = self._open_rows()
        if not copy.writes:
            raise self.store._refused(self.spec.name)
        return copy


def _is_reached(states: Mapping[str, str], partition: str, wanted: tuple[int, ...]) -> bool:
    state = states.get(partition)
    return state is not None and LogState.read(state).order >= wanted
