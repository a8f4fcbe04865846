"""An open RocksDB database: one column family per table, and the tables' markers in the default column family."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.background import make_way
from serving.errors import StoreError
from serving.storage.hps_layout import key_list, tag
from serving.storage.marker import NOT_LOADED, Marker
from serving.storage.rocksdb.engine import all_items, import_rocksdict, open_database, table_options
from serving.storage.rocksdb.exit_gate import exit_gate
from serving.storage.rocksdb.file_checks import STORE_NAME
from serving.storage.rocksdb.sort import ordinals
from serving.storage.row_codec import value_list
from serving.storage.store import Keys, Reached, TableSpec

READ_AHEAD_BYTES = 8 * 2**20
# RocksDB applies a batch while Python's global lock is held, so this many rows take 0.4 ms. The pause hands the lock
# over; it is the shortest of the system.
UPDATE_BATCH_ROWS, UPDATE_PAUSE_S = 256, 1e-6
_MARKER_KEY = b"hotrow.table."
_REACHED_KEY = b"hotrow.reached."  # then the table, a zero byte and the partition


class RowsChange(NamedTuple):
    """A change of one table.

    Attributes:
        spec: the table.
        keys: int64[N]; each fits the table.
        values: uint8[N, B]; None deletes the keys.
    """

    spec: TableSpec
    keys: Keys
    values: NDArray[np.uint8] | None


class Database:
    """One opening of a database; callers allow one user at a time, except for reads of column families.

    Tables are known by their full names. Methods raise what rocksdict raises, see ``translated_errors``.

    Attributes:
        path: its folder.
        rocksdict: the module.
        options: options of the database and of each column family.
    """

    def __init__(self, path: Path, num_threads: int, read_only: bool) -> None:
        """Open the database at ``path`` with all its column families.

        Args:
            path: the database's folder.
            num_threads: background threads.
            read_only: open the database as it is now, next to a process that writes; False: create it if absent.

        Raises:
            MissingExtraError: rocksdict is not installed.
            StoreError: the database cannot be opened; the message names the folder and the fault.
        """
        self.rocksdict = import_rocksdict()
        self.options = table_options(self.rocksdict, num_threads)
        self.path = path
        self._read_only = read_only
        self._handle, self._families = open_database(self.rocksdict, path, read_only, num_threads)
        self._lock_file = self._lock_number()

    def family(self, table: str) -> Any | None:
        """Return the handle of the table's column family, if there is one; reads of it need no lock."""
        return self._families.get(tag(table))

    def tables(self) -> list[str]:
        """Return the names of all tables in the database."""
        return [family.removeprefix(tag("")) for family in self._families if family.startswith(tag(""))]

    def create_family(self, table: str) -> None:
        """Create an empty table."""
        self._families[tag(table)] = self._handle.create_column_family(tag(table), self.options)

    def drop_family(self, table: str) -> None:
        """Remove a table's marker, then its rows."""
        self._write_markers({table: None}, forgotten=table)
        self._flush_log()
        self._remove_family(table)

    def begin_load(self, table: str, keep: bool) -> None:
        """Replace the table's marker by one of a load that has not ended; without ``keep``, also empty the table.

        The table's states of logs go: the files that are loaded have a position of their own.
        """
        self._write_markers({table: Marker("", changed=keep)}, forgotten=table)
        self._flush_log()
        if self.family(table) is not None and not keep:
            self._remove_family(table)
        if self.family(table) is None:
            self.create_family(table)

    def ingest(self, table: str, files: Sequence[str]) -> None:
        """Take sorted files into a table as one act; newer than every row of the table, their rows win."""
        options = self.rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        if files:
            self._families[tag(table)].ingest_external_file(list(files), options)

    def end_load(self, table: str, marker: Marker) -> None:
        """Write the table's marker to the disk, once every row of the load is there."""
        self._write_markers({table: marker})
        self._flush_log()

    def marker(self, table: str) -> Marker | None:
        """Return the marker of the table's last load, if that load has ended."""
        record = self.record(table)
        return record if record and record.digest else None

    def record(self, table: str) -> Marker | None:
        """Return the table's marker; its ``digest`` is empty while a load runs, and after one that was killed.

        Raises:
            StoreError: the record is not a marker.
        """
        raw = self._handle.get(_MARKER_KEY + table.encode())
        if raw is None:
            return None
        try:
            record = Marker.read(bytes(raw))
        except (TypeError, ValueError) as err:
            raise StoreError(STORE_NAME, table, f"{self.path}: the table's marker is damaged: {err}") from err
        return replace(record, current_caches=None) if self._read_only else record  # only the writer refills caches

    def write_flags(self, table: str, marker: Marker) -> None:
        """Write a marker of changed flags; it is on the disk when the next ``write`` is."""
        self._write_markers({table: marker})

    def reached(self, table: str) -> dict[str, str]:
        """Return the table's states of logs by partition."""
        prefix = _reached_key(table)
        options = self.rocksdict.ReadOptions()
        options.set_iterate_upper_bound(prefix[:-1] + b"\x01")
        found = {}
        for key, value in self._handle.items(from_key=prefix, read_opt=options):
            found[bytes(key)[len(prefix) :].decode()] = bytes(value).decode()
        return found

    def write(self, changes: Sequence[RowsChange], batch_rows: int, reached: Reached | None = None) -> None:
        """Write and delete rows; all of it is on the disk when this returns.

        Args:
            changes: of one table or several, in their order.
            batch_rows: rows of one write batch, which is written whole or not at all.
            reached: the state of a log, which is written for each table, in one batch with all rows. If the changes are
                repeatable, they are several small batches, with pauses, so that requests get the processor. If the
                writer gives way, see ``make_way`` for the pauses. The last batch has the state. ``sync`` brings all of
                it to the disk.
        """
        if reached is None and not any(change.keys.size for change in changes):
            return
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        if reached is not None:
            all_rows = sum(change.keys.size for change in changes)
            batch_rows = min(batch_rows, UPDATE_BATCH_ROWS) if reached.is_repeatable else all_rows
        room, began_s = batch_rows, monotonic()
        for spec, keys, values in changes:
            family, begin = self._handle.get_column_family_handle(tag(spec.name)), 0
            if reached is not None:  # sorted rows take two thirds of the time; the last row of equal keys still wins
                order = np.argsort(ordinals(keys, spec.key_bytes), kind="stable")
                keys, values = keys[order], None if values is None else values[order]
            while begin < keys.size:
                if not room:
                    self._handle.write(batch)
                    if reached is not None:
                        _pause(reached, monotonic() - began_s)
                        began_s = monotonic()
                    batch, room = self.rocksdict.WriteBatch(raw_mode=True), batch_rows
                part = slice(begin, begin + room)
                batch.set_default_column_family(family)
                _add_to(batch, key_list(keys[part], spec.key_bytes), None if values is None else values[part])
                size = min(keys.size - begin, room)
                begin, room = begin + size, room - size
        if reached is not None:
            batch.set_default_column_family(self._handle.get_column_family_handle("default"))
            for table in dict.fromkeys(change.spec.name for change in changes):
                batch[_reached_key(table) + reached.partition.encode()] = reached.state.encode()
        self._handle.write(batch)
        self._flush_log(sync=reached is None)

    def sync(self) -> None:
        """Bring everything that was written to the disk."""
        self._flush_log()

    def read_ahead(self, wait: bool) -> None:
        """Have the system read the files ahead, so that first reads do not wait for the disk.

        A load leaves most of its pages on the disk only. Pages in memory are skipped, a GiB in about 30 milliseconds.
        At most half of the memory is filled.

        Args:
            wait: return when the files are in memory, otherwise when reading has begun.
        """
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        for file in self._handle.live_files():
            # Compaction may have removed the file. A file that cannot be read is reported when a row is read from it.
            with suppress(OSError), (self.path / file["name"].lstrip("/")).open("rb") as opened:
                size = min(os.fstat(opened.fileno()).st_size, left)
                starts = range(0, size, READ_AHEAD_BYTES)
                for start in starts:
                    length = min(READ_AHEAD_BYTES, size - start)
                    os.posix_fadvise(opened.fileno(), start, length, os.POSIX_FADV_WILLNEED)
                for start in starts if wait else ():
                    os.pread(opened.fileno(), 1, min(start + READ_AHEAD_BYTES, size) - 1)
                left -= size

    def read_all(self) -> int:
        """Read every row of every table and return how many there are; RocksDB verifies each checksum."""
        return sum(1 for family in self._families.values() for _ in all_items(family))

    def checkpoint(self, folder: Path) -> None:
        """Make a database at ``folder`` of what this database holds now; its files are links where possible.

        In the copy no cache is current, because caches hold the rows of the original. The markers here say the same
        while the copy is made. If the process is killed then, the next start refills the caches.
        """
        tables = [name.removeprefix(tag("")) for name in self._families]
        markers = {table: self.record(table) for table in tables}
        stale = {
            table: replace(marker or Marker(NOT_LOADED, changed=True), current_caches=())
            for table, marker in markers.items()
        }
        self._write_markers(stale)
        try:
            self.rocksdict.Checkpoint(self._handle).create_checkpoint(str(folder))
        finally:
            self._write_markers(markers)

    def close(self) -> None:
        """Flush and close the database; running reads hold their column family, and so the database, open."""
        self._families = {}
        try:
            if not self._read_only:
                self._flush_log()
        finally:
            self._handle.close()

    def _write_markers(self, markers: Mapping[str, Marker | None], *, forgotten: str | None = None) -> None:
        """Write or remove markers, and remove the states of logs of the table ``forgotten``, all or none."""
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        for partition in self.reached(forgotten) if forgotten is not None else ():
            del batch[_reached_key(str(forgotten)) + partition.encode()]
        for table, marker in markers.items():
            key = _MARKER_KEY + table.encode()
            if marker is None:
                del batch[key]
            else:
                batch[key] = marker.write()
        self._handle.write(batch)

    def _flush_log(self, *, sync: bool = True) -> None:
        """Bring what was written to the system, and with ``sync`` to the disk.

        Raises:
            OSError: the files at the path are not those that are open. RocksDB itself goes on without them.
        """
        exit_gate.call(self._handle.flush_wal, sync)
        if sync and self._lock_number() != self._lock_file:
            raise OSError("the folder was removed, moved or replaced while it was open, so new rows are lost: restart")

    def _lock_number(self) -> int | None:
        """Return the number of the file that is made when the database is opened, and stays; None if it is absent."""
        try:
            return os.stat(self.path / "LOCK").st_ino
        except FileNotFoundError:
            return None

    def _remove_family(self, table: str) -> None:
        self._handle.drop_column_family(tag(table))
        del self._families[tag(table)]


def _pause(reached: Reached, took_s: float) -> None:
    if reached.gives_way:
        make_way(took_s)
    else:
        sleep(UPDATE_PAUSE_S)


def _reached_key(table: str) -> bytes:
    return _REACHED_KEY + table.encode() + b"\0"


def _add_to(batch: Any, raw_keys: list[bytes], values: NDArray[np.uint8] | None) -> None:
    """Add rows of the batch's default column family, or their removal."""
    if values is None:
        for key in raw_keys:
            del batch[key]
    else:
        for key, value in zip(raw_keys, value_list(values), strict=True):
            batch[key] = value
