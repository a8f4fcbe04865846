"""The durable tier: one RocksDB database, one column family per table."""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.host import RowDtype
from serving.background import PeriodicWorker
from serving.config import MOST_ROCKSDB_BATCH_ROWS
from serving.errors import StoreError
from serving.metrics import MetricSample
from serving.storage.hps_layout import storable
from serving.storage.marker import NOT_LOADED, Marker, kept_rows
from serving.storage.rocksdb.bulk_load import BulkLoader
from serving.storage.rocksdb.database import Database
from serving.storage.rocksdb.engine import STORE_NAME, check_new_folder, translated_errors
from serving.storage.rocksdb.follower import FilesState, FollowedTables, files_state, open_beside_writer
from serving.storage.rocksdb.table import RocksDbTable, opened_table
from serving.storage.row_codec import RowCodec
from serving.storage.store import Batches, Keys, Mask, Store, TableSpec, Vectors, none_found

logger = logging.getLogger(__name__)


class RocksDbStore(Store):
    """Rows on disk, one database per store; see ``serving.storage.rocksdb`` for what lies where.

    An ``insert`` that has returned survives the process and the machine. Reads verify checksums.
    """

    outlives_process = True

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
        """Open the database; create it if it is absent and ``read_only`` is False.

        Args:
            path: the database's folder.
            read_only: open the database next to a process that writes.
            num_threads: background threads.
            max_batch_size: most keys of one read or write batch, at most ``MOST_ROCKSDB_BATCH_ROWS``. A call with more
                keys is made in several batches.
            row_dtype: keep rows in this row type, which must be the table's; None keeps float32.
            warm_up: have the system read the files ahead after opening and after a load.
            catch_up_interval_ms: with ``read_only``: see new writes as often as this; None: see the database as it is
                now.

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
        self._closed = False
        self._tables_lock = threading.RLock()  # one change of the tables at a time, such as a load; taken before _lock
        self._lock = threading.RLock()  # one user of the database handle at a time; reads use a column family's
        self._seen: FilesState = []
        self._followed = FollowedTables(self._path)
        self._open()
        self._follower = (
            PeriodicWorker("hotrow-follow-rocksdb", self.catch_up, catch_up_interval_ms / 1000)
            if catch_up_interval_ms
            else None
        )

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return STORE_NAME

    @property
    def writes(self) -> bool:
        """See ``Store.writes``."""
        return not self._read_only

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

    def count(self, table: str) -> int:
        """See ``Store.count``; reads every row."""
        self._check_open(table)
        held = self._tables.get(table)
        return held.count() if held else 0

    def estimated_rows(self, table: str) -> int:
        """RocksDB's fast guess at ``count``, for progress bars and metrics only."""
        with self._translated(table):
            held = self._tables.get(table)
            return held.estimated_rows() if held else 0

    def samples(self, table: str) -> Iterable[MetricSample]:
        """See ``Store.samples``; none for a table that is not open."""
        if table not in self._tables:
            return ()
        try:
            rows = self.estimated_rows(table)
        except StoreError:  # the table or the store is being closed
            return ()
        help_text = "RocksDB's estimate of its rows: too high after rows were overwritten."
        return (MetricSample("hotrow_tier_estimated_rows", help_text, (), rows, is_gauge=True),)

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return none_found(keys, out)
        if out.shape[1] != held.spec.dim:
            raise self._error(table, f"holds vectors of {held.spec.dim} floats, but {out.shape[1]} were asked for")
        found = np.zeros(keys.size, dtype=np.bool_)
        for start in range(0, keys.size, self._batch_rows):
            part = slice(start, start + self._batch_rows)
            held.fetch(keys[part], out[part], found[part])
        return found

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``; rows are written in batches, each whole or not at all, and are then on the disk."""
        with self._lock, self._translated(table):
            held = self._writable_table(table)
            if rows.shape[1] != held.spec.dim:
                raise self._error(table, f"holds vectors of {held.spec.dim} floats, got {rows.shape[1]}")
            self._database.write(held.spec, keys, held.codec.encode(keys, rows), self._batch_rows)

    def evict(self, table: str, keys: Keys) -> None:
        """See ``Store.evict``."""
        with self._lock, self._translated(table):
            if table not in self._tables:
                return
            held = self._writable_table(table)
            fits = storable(keys, held.spec.key_bytes)
            self._database.write(held.spec, keys if fits is None else keys[fits], None, self._batch_rows)

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; a read-only store closes the table and raises StoreError, as the rows stay."""
        with self._tables_lock, self._lock, self._translated(table):
            self.close_table(table)
            if self._database.family(table) is not None:
                self._check_writable(table)
                self._database.drop_family(table)

    def kept_tables(self) -> Sequence[str]:
        """See ``Store.kept_tables``."""
        with self._lock, self._translated(""):
            return self._database.tables()

    def close_table(self, table: str) -> None:
        """See ``Store.close_table``."""
        with self._tables_lock, self._lock:
            self._tables = {name: held for name, held in self._tables.items() if name != table}
            self._followed.forget(table)

    def items(self, table: str, batch_rows: int = 65536) -> Batches:
        """See ``Store.items``; rows as they were when the walk began, in the order of the keys' raw bytes."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is not None:
            yield from held.items(batch_rows)

    def marker(self, table: str) -> Marker | None:
        """See ``Store.marker``; in a read-only store every cache is current, because the writer refills the caches."""
        with self._lock, self._translated(table):
            return self._database.marker(table)

    def load(self, spec: TableSpec, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``Store.load``.

        The rows are first sorted and written to files, while the table stays as it is. Then three short steps follow:
        the marker goes, the files replace or join the rows, and the new marker is written. Other tables can be changed
        all the while.
        """
        with self._tables_lock, self._translated(spec.name):
            codec = RowCodec(STORE_NAME, spec, self._row_dtype)
            if self._read_only:
                raise self._not_loaded(spec.name, f"{marker.digest} as {codec.row_dtype}")
            database = self._database  # stays open: ``close`` waits for the load
            loader = BulkLoader(database.rocksdict, database.options, self._path / "loading", spec, codec)
            with loader.written(batches) as files, self._lock:
                keeps_rows = keep and self._has_rows_to_keep(spec, codec)
                if database.record(spec.name) is not None:  # a cache may have rows of an earlier load
                    marker = replace(marker, current_caches=())
                database.begin_load(spec.name, keeps_rows)
                try:
                    loader.ingest(database.family(spec.name), files)
                    rows = opened_table(self._path, database, spec, codec).count() if keeps_rows else loader.rows
                    changed = marker.changed or keeps_rows
                    database.end_load(spec.name, replace(marker, rows=rows, row_dtype=codec.row_dtype, changed=changed))
                finally:
                    self._take(spec, codec)  # the old column family must not be read any more
            if self._warm_up:
                database.read_ahead(wait=True)

    def write_flags(
        self, table: str, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None
    ) -> None:
        """See ``Store.write_flags``; a table of another program gets a marker, a read-only store does nothing."""
        with self._lock, self._translated(table):
            if self._read_only:
                return
            held = self._writable_table(table)
            marker = self._database.record(table) or Marker(NOT_LOADED, row_dtype=held.codec.row_dtype, changed=True)
            new = replace(
                marker,
                changed=marker.changed if changed is None else changed,
                current_caches=marker.current_caches if current_caches is None else current_caches,
            )
            if new != marker:
                self._database.write_flags(table, new)

    def checkpoint(self, folder: str | Path) -> None:
        """Make a copy of the database as it is now, which is a database itself.

        On the database's own file system files are linked, not copied, which takes milliseconds. A server of the copy
        refills its caches.

        Args:
            folder: the new database; must not exist yet, its parent must.

        Raises:
            StoreError: the copy cannot be created, or the store is read-only, so that rows in the log would be missing.
        """
        with self._tables_lock, self._lock:
            self._check_open()
            self._check_writable("")
            check_new_folder(Path(folder))
            with translated_errors(Path(folder)):
                self._database.checkpoint(Path(folder))

    def catch_up(self) -> None:
        """See ``Store.catch_up``; only a read-only store has anything to do.

        A table stays as it was while it is being loaded, and if it was loaded from other files or has another
        dimension or row type now.
        """
        with self._lock, self._translated(""):
            if self._read_only and files_state(self._path, "MANIFEST-*", "*.log") != self._seen:
                self._open()

    def close(self) -> None:
        """See ``Store.close``."""
        if self._follower is not None:
            self._follower.close()
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
            except StoreError as err:  # such as a full disk; acknowledged rows are on the disk already
                logger.warning("closing: %s", err)

    def _open(self) -> None:
        """Open the database for the first time, or again with the open tables to follow the writer."""
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

    def _has_rows_to_keep(self, spec: TableSpec, codec: RowCodec) -> bool:
        """Whether a load must keep rows: those of a killed load are dropped; logs rows of other programs."""
        record = self._database.record(spec.name)
        is_only_of_killed_load = record is not None and not record.digest and not record.changed
        if self._database.family(spec.name) is None or is_only_of_killed_load:
            return False
        held = opened_table(self._path, self._database, spec, codec)
        if next(held.items(1), None) is None:
            return False
        if record is None or not record.digest:
            logger.warning("%s", kept_rows(str(self._path), spec.name))
        return True

    def _not_loaded(self, table: str, expected: str) -> StoreError:
        with self._lock:
            marker = self._database.marker(table)
        was = (
            f"was loaded from {marker.digest} as {marker.row_dtype}" if marker else "has no record of a completed load"
        )
        return self._error(table, f"{was}, expected {expected}; the database is open read-only")

    def _writable_table(self, table: str) -> RocksDbTable:
        self._check_writable(table)
        held = self._tables.get(table)
        if held is None:
            raise self._error(table, "not an open table")
        return held

    def _check_writable(self, table: str) -> None:
        if self._read_only:
            raise self._error(table, "the database is open read-only, but this call would write")

    def _check_open(self, table: str = "") -> None:
        if self._closed:
            raise self._error(table, "the store is closed")

    def _error(self, table: str, reason: str) -> StoreError:
        return StoreError(STORE_NAME, table, f"{self._path}: {reason}")

    def _translated(self, table: str) -> Any:
        self._check_open(table)
        return translated_errors(self._path, table)
