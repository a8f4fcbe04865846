"""The durable tier: one RocksDB database, one column family per table."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kernels.host import RowDtype
from serving.config import MOST_ROCKSDB_BATCH_ROWS
from serving.errors import StoreError
from serving.storage.hps_layout import storable
from serving.storage.rocksdb.bulk_load import BulkLoader
from serving.storage.rocksdb.database import Database, LoadRecord
from serving.storage.rocksdb.engine import STORE_NAME, check_new_folder, translated_errors
from serving.storage.rocksdb.follower import FilesState, FollowedTables, Follower, files_state, open_beside_writer
from serving.storage.rocksdb.table import RocksDbTable, opened_table
from serving.storage.row_codec import RowCodec
from serving.storage.store import CHANGED, Keys, Mask, TableSpec, Vectors, new_seal, none_found

logger = logging.getLogger(__name__)


class RocksDbStore:
    """Rows on disk, one database per store. See ``DurableStore``.

    Keys and values have HPS's layout, so a database written by HPS (HugeCTR v24.06) can be read; with a ``row_dtype``
    other than fp32 the values have not. What a table was loaded from is recorded in the default column family, which
    HPS does not use. An ``insert`` that has returned survives the process and the machine; reads verify checksums.
    One process writes; any number of others read beside it, as the database was when they opened it, or following it.
    """

    def __init__(
        self,
        path: str | Path,
        read_only: bool = False,
        num_threads: int = 16,
        max_batch_size: int = 65536,
        *,
        row_dtype: RowDtype | None = None,
        warm_up: bool = True,
        catch_up_interval_ms: int | None = None,
    ) -> None:
        """Open the database, creating it if it is absent and ``read_only`` is False.

        Args:
            path: its folder.
            read_only: open beside a process that writes.
            num_threads: background threads.
            max_batch_size: most keys of one read or write batch; above ``MOST_ROCKSDB_BATCH_ROWS`` it counts as
                that, and calls with more keys are made in several batches.
            row_dtype: keep the rows of each table in this form, which must be the table's; None keeps float32.
            warm_up: have the system read the files ahead when they are opened, and those of a bulk load after it.
            catch_up_interval_ms: with ``read_only``: see what has been written meanwhile, as often as this; None: see
                the database as it is now.

        Raises:
            MissingExtraError: rocksdict is not installed.
            StoreError: the database is open for writing elsewhere, damaged, or (read-only) absent.
            ValueError: ``catch_up_interval_ms`` without ``read_only``, or less than 1.
        """
        if catch_up_interval_ms is not None and (not read_only or catch_up_interval_ms < 1):
            raise ValueError(f"catch_up_interval_ms: {catch_up_interval_ms}, with read_only {read_only}")
        self._path = Path(path)
        self._read_only = read_only
        self._row_dtype = row_dtype
        self._warm_up = warm_up
        self._batch_rows = min(max_batch_size, MOST_ROCKSDB_BATCH_ROWS)
        self._num_threads = num_threads
        self._tables: dict[str, RocksDbTable] = {}  # replaced as a whole, never changed in place: reads take no lock
        self._next_seals: dict[str, tuple[str | None, str]] = {}  # by table, after which; see ``_lock``
        self._closed = False
        self._tables_lock = threading.RLock()  # one change of the tables at a time, whole loads; taken before the next
        self._lock = threading.RLock()  # one user of the database handle at a time; reads use their column family's
        self._seen: FilesState = []
        self._followed = FollowedTables(self._path)
        self._open()
        self._follower = Follower(self.catch_up, catch_up_interval_ms) if catch_up_interval_ms else None

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return STORE_NAME

    @property
    def keeps_row_dtype(self) -> bool:
        """See ``Store.keeps_row_dtype``."""
        return self._row_dtype is not None

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; a read-only store must already have the table."""
        with self._tables_lock, self._lock, self._translated(spec.name):
            codec = RowCodec(STORE_NAME, spec, self._row_dtype)
            if self._database.family(spec.name) is None:
                if self._read_only:
                    raise self._error(spec.name, "the database has no such table, and is open read-only")
                self._database.create_family(spec.name)
            self._take(spec, codec)

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``."""
        self._check_open(table)
        return None if table in self._tables else 0

    def tables(self) -> list[str]:
        """See ``Store.tables``."""
        self._check_open()
        return sorted(self._tables)

    def count(self, table: str) -> int:
        """See ``Store.count``; RocksDB does not know, so every row is read."""
        self._check_open(table)
        held = self._tables.get(table)
        return held.count() if held else 0

    def estimated_rows(self, table: str) -> int:
        """RocksDB's guess at ``count``, at once; for a progress bar, and for nothing that must not fail."""
        with self._translated(table):
            held = self._tables.get(table)
            return held.estimated_rows() if held else 0

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return none_found(keys, out)
        if out.shape[1] != held.spec.dim:
            raise self._error(table, f"holds vectors of {held.spec.dim} floats, asked for {out.shape[1]}")
        found = np.zeros(keys.size, dtype=np.bool_)
        for start in range(0, keys.size, self._batch_rows):
            part = slice(start, start + self._batch_rows)
            held.fetch(keys[part], out[part], found[part])
        return found

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``; on the disk when it returns, in write batches each of which is there whole or not."""
        with self._lock, self._translated(table):
            held = self._writable_table(table)
            if rows.shape[1] != held.spec.dim:
                raise self._error(table, f"holds vectors of {held.spec.dim} floats, got {rows.shape[1]}")
            self._database.write(held.spec, keys, held.codec.encode(keys, rows), self._batch_rows)

    def evict(self, table: str, keys: Keys) -> int | None:
        """See ``Store.evict``; RocksDB deletes without looking, so it cannot tell how many there were."""
        with self._lock, self._translated(table):
            if table not in self._tables:
                return 0
            held = self._writable_table(table)
            fits = storable(keys, held.spec.key_bytes)
            self._database.write(held.spec, keys if fits is None else keys[fits], None, self._batch_rows)
            return None

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; a read-only store closes it, and raises StoreError, as its rows stay."""
        with self._tables_lock, self._lock, self._translated(table):
            self._tables = {name: held for name, held in self._tables.items() if name != table}
            self._followed.forget(table)
            if self._database.family(table) is not None:
                self._check_writable(table)
                self._database.drop_family(table)

    def items(self, table: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``; the table as it was when the walk began, in the order of the keys' raw bytes."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is not None:
            yield from held.items(batch_rows)

    def loaded_from(self, table: str) -> str | None:
        """See ``DurableStore.loaded_from``; None too where the rows were loaded in another form than asked for."""
        with self._lock, self._translated(table):
            load = self._database.last_load(table)
            return load.digest if load and load.row_dtype == (self._row_dtype or "fp32") else None

    def mark_changed(self, table: str) -> None:
        """See ``DurableStore.mark_changed``."""
        with self._lock, self._translated(table):
            held = self._writable_table(table)
            digest = self.loaded_from(table)
            if digest is not None and not digest.endswith(CHANGED):
                self._database.record_load(table, LoadRecord(digest + CHANGED, held.codec.row_dtype))

    def note_others(self, table: str, are_behind: bool, seal: str | None = None) -> None:
        """See ``WitnessStore.note_others``."""
        with self._lock, self._translated(table):
            self._check_writable(table)
            self._database.record_others(table, are_behind, seal)
            if seal is not None:
                self._next_seals.pop(table, None)

    def seal(self, table: str) -> str | None:
        """See ``WitnessStore.seal``."""
        with self._lock, self._translated(table):
            if self._read_only:
                return None
            seal = self._database.seal(table)
            if seal is None:
                seal = new_seal(None)
                self._database.record_seal(table, seal)
            return seal

    def next_seal(self, table: str) -> str:
        """See ``WitnessStore.next_seal``."""
        with self._lock, self._translated(table):
            self._check_writable(table)
            seal = self.seal(table)
            former, following = self._next_seals.get(table, (None, ""))
            if former != seal:  # the first of this process, or the table was loaded anew
                following = new_seal(seal)
                self._next_seals[table] = (seal, following)
            return following

    def others_are_behind(self, table: str) -> bool:
        """See ``WitnessStore.others_are_behind``."""
        with self._lock, self._translated(table):
            return not self._read_only and self._database.others_are_behind(table)

    def bulk_load(
        self, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], digest: str, *, unless_loaded: bool = False
    ) -> None:
        """See ``DurableStore.bulk_load``.

        The new rows are sorted and written first, beside the old ones, which stay as they are where that fails. Then
        the old ones go, the files are taken in, and what they were loaded from is recorded; killed between the first of
        these acts and the last, the table counts as not loaded. Followers keep the old rows until then. Rows of other
        tables can be inserted and evicted all the while; of this table they go with the old ones.
        """
        with self._tables_lock, self._translated(spec.name):
            codec = RowCodec(STORE_NAME, spec, self._row_dtype)
            if self._read_only:
                with self._lock:
                    load = self._database.last_load(spec.name)
                was = f"was loaded from {load}" if load else "has no record of a load that ended"
                reason = f"{was}, expected {LoadRecord(digest, codec.row_dtype)}; the database is open read-only"
                raise self._error(spec.name, reason)
            database = self._database  # stays open: ``close`` waits for the load
            loader = BulkLoader(database.rocksdict, database.options, self._path / "loading", spec, codec)
            with loader.written(batches) as files, self._lock:
                database.begin_load(spec.name)
                try:
                    loader.take_in(database.family(spec.name), files)
                    database.record_load(spec.name, LoadRecord(digest, codec.row_dtype))
                finally:
                    self._take(spec, codec)  # the old column family must not be read any more
            if self._warm_up:
                database.read_ahead(wait=True)

    def checkpoint(self, folder: str | Path) -> None:
        """Make a copy of the database as it is now: a database itself, to be opened like any other.

        On the database's own file system files are linked, not copied, and it takes milliseconds.

        Args:
            folder: where it is to be; must not be there yet, but the folder around it must.

        Raises:
            StoreError: it cannot be made; of a read-only store it would lack rows that are in no file yet.
        """
        with self._tables_lock, self._lock:
            self._check_open()
            self._check_writable("")
            check_new_folder(Path(folder))
            with translated_errors(Path(folder)):
                self._database.checkpoint(Path(folder))

    def catch_up(self) -> None:
        """See what the writer has acknowledged until now; a store that is not read-only sees it anyway.

        A table that is just being loaded, or was loaded from other files, for which another network was trained, or has
        another dimension or form now, stays as it was.

        Raises:
            StoreError: the database cannot be opened anew; the store goes on with what it saw before.
        """
        with self._lock, self._translated(""):
            if self._read_only and files_state(self._path, "MANIFEST-*", "*.log") != self._seen:
                self._open()

    def close(self) -> None:
        """See ``Store.close``."""
        if self._follower is not None:
            self._follower.stop()
        with self._tables_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            for held in self._tables.values():
                held.close()
            self._tables = {}
            try:
                with translated_errors(self._path):
                    self._database.close()
            except StoreError as err:  # a full disk, say: what was acknowledged is there, and nothing else is lost
                logger.warning("closing: %s", err)

    def _open(self) -> None:
        """Open the database, for the first time or, to follow the writer, anew with the tables that are open."""
        seen = files_state(self._path, "MANIFEST-*", "*.log")
        if self._read_only:
            database = open_beside_writer(self._path, self._num_threads)
        else:
            database = Database(self._path, self._num_threads, read_only=False)
        tables = self._followed.in_database(database, self._tables)
        self._database, self._tables, self._seen = database, tables, seen
        if self._warm_up:
            database.read_ahead(wait=False)

    def _take(self, spec: TableSpec, codec: RowCodec) -> None:
        self._tables = {**self._tables, spec.name: opened_table(self._path, self._database, spec, codec)}

    def _writable_table(self, table: str) -> RocksDbTable:
        self._check_writable(table)
        held = self._tables.get(table)
        if held is None:
            raise self._error(table, "not an open table")
        return held

    def _check_writable(self, table: str) -> None:
        if self._read_only:
            raise self._error(table, "the database is open read-only, and this would write")

    def _check_open(self, table: str = "") -> None:
        if self._closed:
            raise self._error(table, "the store is closed")

    def _error(self, table: str, reason: str) -> StoreError:
        return StoreError(STORE_NAME, table, f"{self._path}: {reason}")

    def _translated(self, table: str) -> Any:
        self._check_open(table)
        return translated_errors(self._path, table)
