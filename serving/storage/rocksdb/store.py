"""The durable tier: one RocksDB database, one column family per table."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels.host import RowDtype
from serving.background import PeriodicWorker
from serving.config import MOST_ROCKSDB_BATCH_ROWS
from serving.errors import StoreError
from serving.storage.rocksdb.database import Database
from serving.storage.rocksdb.engine import check_new_folder, translated_errors
from serving.storage.rocksdb.file_checks import STORE_NAME
from serving.storage.rocksdb.follower import FilesState, files_state, open_beside_writer
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.store import Change, LastingStore, Reached, StoreTable, TableSpec

logger = logging.getLogger(__name__)


class RocksDbStore(LastingStore):
    """Rows on disk, one database per store; see ``serving.storage.rocksdb`` for what lies where.

    An ``insert`` that has returned survives the process and the machine. Reads verify checksums.

    Attributes:
        path: the database's folder.
        row_dtype: the row type in which rows are kept; None: float32.
        warms_up: the system reads the files ahead after opening and after a load.
    """

    name = STORE_NAME

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
            max_batch_size: maximum keys of one read or write batch, at most ``MOST_ROCKSDB_BATCH_ROWS``. Larger calls
                take several batches.
            row_dtype: keep rows in this row type, which must be the table's; None keeps float32.
            warm_up: have the system read the files ahead after opening and after a load.
            catch_up_interval_ms: with ``read_only``: see new writes this often; None: see the database as it is now.

        Raises:
            MissingExtraError: rocksdict is not installed.
            StoreError: the database is open for writing elsewhere, damaged, or (read-only) absent.
            ValueError: ``catch_up_interval_ms`` without ``read_only``, or less than 1.
        """
        super().__init__()
        if catch_up_interval_ms is not None and (not read_only or catch_up_interval_ms < 1):
            raise ValueError(f"catch_up_interval_ms: {catch_up_interval_ms}, with read_only {read_only}")
        self.path = Path(path)
        self._read_only = read_only
        self.row_dtype = row_dtype
        self.keeps_row_dtype = row_dtype is not None
        self.warms_up = warm_up
        self._batch_rows = min(max_batch_size, MOST_ROCKSDB_BATCH_ROWS)
        self._num_threads = num_threads
        self._tables_lock = threading.RLock()  # one change of the tables at a time, such as a load; taken before _lock
        self._lock = threading.RLock()  # one user of the database handle at a time; reads use a column family's
        self._seen: FilesState = []
        self._open()
        self._follower = (
            PeriodicWorker("hotrow-follow-rocksdb", self.catch_up, catch_up_interval_ms / 1000)
            if catch_up_interval_ms
            else None
        )

    @property
    def writes(self) -> bool:
        """See ``LastingStore.writes``."""
        return not self._read_only

    def _new_table(self, spec: TableSpec) -> "RocksDbTable":
        return RocksDbTable(self, spec)

    def erase(self, table: str) -> None:
        """See ``Store.erase``; a read-only store raises StoreError, as the rows stay."""
        with self.changing(table) as database:
            if database.family(table) is not None:
                self._check_writable(table)
                database.drop_family(table)
            open_table = self._tables.get(table)
            if open_table is not None:
                open_table.close()

    def write(self, changes: Sequence[Change[StoreTable]], reached: Reached | None = None) -> None:
        """See ``Store.write``; changes are written in batches, each whole or not at all, and are then on the disk.

        With ``reached`` there is one batch. It survives the process at once, and the machine after ``sync``.
        """
        if not changes:
            return
        first = changes[0].table.spec.name
        with self.using(first if all(change.table.spec.name == first for change in changes) else "") as database:
            if self._read_only:
                self._check_writable(first)
            encoded = [
                table.encoded(keys, rows) for table, keys, rows, *_ in changes if isinstance(table, RocksDbTable)
            ]
            database.write(encoded, self._batch_rows, reached)

    def sync(self) -> None:
        """See ``LastingStore.sync``."""
        with self.using("") as database:
            database.sync()

    def kept_tables(self) -> Sequence[str]:
        """See ``LastingStore.kept_tables``."""
        with self.using("") as database:
            return database.tables()

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
        """See ``LastingStore.catch_up``; only a read-only store has anything to do.

        A table stays as it was while it is being loaded, and if it was loaded from other files or has another
        dimension or row type now.
        """
        with self._lock, self._translated(""):
            if self._read_only and files_state(self.path, "MANIFEST-*", "*.log") != self._seen:
                self._open()

    def close(self) -> None:
        """See ``Store.close``."""
        if self._follower is not None:
            self._follower.close()
        with self._tables_lock, self._lock:
            if self.is_closed:
                return
            super().close()
            try:
                with translated_errors(self.path):
                    self._database.close()
            except StoreError as err:  # such as a full disk; acknowledged rows are on the disk already
                logger.warning("closing: %s", err)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Change tables inside the block: no other thread does, and none uses the database."""
        with self._tables_lock, self._lock:
            yield

    @contextmanager
    def changing(self, table: str) -> Iterator[Database]:
        """Change tables inside the block; see ``using``."""
        with self.locked(), self._translated(table):
            yield self._database

    @contextmanager
    def using(self, table: str) -> Iterator[Database]:
        """Use the database inside the block, alone; its errors become StoreError, which names ``table``."""
        with self._lock, self._translated(table):
            yield self._database

    @contextmanager
    def loading(self, table: str) -> Iterator[Database]:
        """Load a table inside the block, while other tables are used; the database stays open."""
        with self._tables_lock, self._translated(table):
            yield self._database

    def parts(self, keys: int) -> Iterator[slice]:
        """The parts of so many keys that one call reads."""
        return (slice(start, start + self._batch_rows) for start in range(0, keys, self._batch_rows))

    def _open(self) -> None:
        """Open the database for the first time, or again to follow the writer."""
        seen = files_state(self.path, "MANIFEST-*", "*.log")
        if self._read_only:
            database = open_beside_writer(self.path, self._num_threads)
        else:
            database = Database(self.path, self._num_threads, read_only=False)
        for table in self._tables.values():
            if isinstance(table, RocksDbTable):
                table.follow(database)
        self._database, self._seen = database, seen
        if self.warms_up:
            database.read_ahead(wait=False)

    def _check_writable(self, table: str) -> None:
        if self._read_only:
            raise self._error(table, "the database is open read-only, but this call would write")

    def _error(self, table: str, reason: str) -> StoreError:
        return StoreError(STORE_NAME, table, f"{self.path}: {reason}")

    def _translated(self, table: str) -> Any:
        self._check_open(table)
        return translated_errors(self.path, table)
