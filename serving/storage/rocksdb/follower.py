"""Reading a RocksDB database next to the process that writes it, and following that process.

RocksDB's secondary instances are not used: a reload of a table removes a column family, and then a secondary instance
crashes the process (RocksDB as of rocksdict 0.3.29). A read-only opening takes milliseconds, plus the time to read the
log of the newest writes. A follower opens the database again whenever its files have changed.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from serving.errors import StoreError
from serving.storage.rocksdb.database import Database
from serving.storage.rocksdb.engine import STORE_NAME, translated_errors
from serving.storage.rocksdb.table import RocksDbTable, opened_table
from serving.storage.row_codec import RowCodec
from serving.storage.store import TableSpec

logger = logging.getLogger(__name__)

OPENING_TRIES = 8

FilesState = list[tuple[str, int]]  # names and sizes of files that are only ever appended to


def open_beside_writer(path: Path, num_threads: int) -> Database:
    """Open a database read-only; another process may be writing to it.

    RocksDB reads the list of files first, then the log. An opening would miss rows that the writer moves from the log
    to files in between, so an opening during which the list changed is not used.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: the database cannot be opened, or its files changed during every try.
    """
    for left in reversed(range(OPENING_TRIES)):
        before = files_state(path, "MANIFEST-*")
        try:
            database = Database(path, num_threads, read_only=True)
        except StoreError:  # a file may be gone since the list of files was read
            if not left or files_state(path, "MANIFEST-*") == before:
                raise
            continue
        if files_state(path, "MANIFEST-*") == before:
            return database
    raise StoreError(STORE_NAME, "", f"{path}: its files changed while it was opened, {OPENING_TRIES} times")


def verify_database(path: Path) -> int:
    """Read every row of the database at ``path``, as it is now; another process may be writing to it.

    Returns:
        rows of all tables; 0 where there is no database yet.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: the database cannot be opened, or a checksum is wrong; the message names the file.
    """
    with translated_errors(path):
        if not (path / "CURRENT").exists():
            return 0
        database = open_beside_writer(path, num_threads=1)
        try:
            return database.read_all()
        finally:
            database.close()


def files_state(path: Path, *patterns: str) -> FilesState:
    """Return what changes with the list of the database's files, ``MANIFEST-*``, or its newest writes, ``*.log``."""
    state = []
    with translated_errors(path):
        for pattern in patterns:
            for file in path.glob(pattern):
                with suppress(FileNotFoundError):  # the file has just been replaced
                    state.append((file.name, file.stat().st_size))
    return sorted(state)


class _Expected(NamedTuple):
    """What a followed table must be; does not keep its files open."""

    spec: TableSpec
    codec: RowCodec
    digest: str | None


class FollowedTables:
    """The tables of a follower, from one opening of the database to the next. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Follow the tables of the database at ``path``."""
        self._path = path
        self._expected: dict[str, _Expected] = {}  # by name; also tables that the writer dropped and may load again
        self._logged: dict[str, str] = {}  # by name: the last message about a table that differs from the writer's

    def in_database(self, database: Database, tables: Mapping[str, RocksDbTable]) -> dict[str, RocksDbTable]:
        """Return the followed tables as ``database`` holds them.

        A table stays as it was while it is being loaded, and if it belongs to other files now: its handle keeps the
        older files open. A table that the writer has dropped is absent until the writer loads it again.
        """
        for name, held in tables.items():
            self._expected[name] = _Expected(held.spec, held.codec, held.digest)
        followed = {}
        for name, expected in self._expected.items():
            table = self._followed(database, expected, tables.get(name))
            if table is not None:
                followed[name] = table
        return followed

    def forget(self, name: str) -> None:
        """Stop following a table, if it is followed."""
        self._expected.pop(name, None)
        self._logged.pop(name, None)

    def _followed(self, database: Database, expected: _Expected, held: RocksDbTable | None) -> RocksDbTable | None:
        name = expected.spec.name
        try:
            record = database.record(name)
        except StoreError as err:
            self._log_once(err, "the table stays as it was")
            return held
        if record is not None and not record.digest:  # a load is running, or was killed
            return held
        if database.family(name) is None:
            self._log_once(self._error(name, "the writer has dropped it"), "its keys are unknown until it is back")
            return None
        try:
            table = opened_table(self._path, database, expected.spec, expected.codec)
            if expected.digest is not None and table.digest != expected.digest:
                other = f"the writer has loaded it from other files, {table.digest}; this process uses"
                raise self._error(name, f"{other} {expected.digest}: restart it with the writer's files")
        except StoreError as err:  # other tables are followed anyway
            self._log_once(err, "the table stays as it was")
            return held
        self._logged.pop(name, None)
        return table

    def _log_once(self, error: StoreError, effect: str) -> None:
        if self._logged.get(error.table) != str(error):
            logger.warning("%s; %s", error, effect)
        self._logged[error.table] = str(error)

    def _error(self, name: str, reason: str) -> StoreError:
        return StoreError(STORE_NAME, name, f"{self._path}: {reason}")
