"""Reading a RocksDB database beside the process that writes it, and following that.

RocksDB has secondary instances for this. They are not used: one that meets the removal of a column family, which every
reload of a table is, crashed the process (RocksDB as of rocksdict 0.3.29). A read-only opening takes milliseconds and
what the log of the newest writes takes to read; followers make a new one whenever the files have changed.
"""

import logging
import threading
from collections.abc import Callable, Mapping
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

    Which files there are is read first, then the log of the newest writes. Where the writer brings rows from the log
    into files in between, an opening would have them in neither; it is not used.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: it cannot be opened, or its files changed during every try.
    """
    for left in reversed(range(OPENING_TRIES)):
        before = files_state(path, "MANIFEST-*")
        try:
            database = Database(path, num_threads, read_only=True)
        except StoreError:  # a file may have gone since the list of files was read
            if not left or files_state(path, "MANIFEST-*") == before:
                raise
            continue
        if files_state(path, "MANIFEST-*") == before:
            return database
    raise StoreError(STORE_NAME, "", f"{path}: its files changed while it was opened, {OPENING_TRIES} times")


def verify_database(path: Path) -> int:
    """Read every row of the database at ``path``, as it is now; another process may be writing to it.

    Returns:
        the rows of all its tables; 0 where there is no database yet.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: it cannot be opened, or a checksum is wrong; the message names the file.
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
    """What changes with the list of the database's files, ``MANIFEST-*``, or with its newest writes, ``*.log``.

    Raises:
        StoreError: the folder cannot be read.
    """
    state = []
    with translated_errors(path):
        for pattern in patterns:
            for file in path.glob(pattern):
                with suppress(FileNotFoundError):  # it has just been replaced
                    state.append((file.name, file.stat().st_size))
    return sorted(state)


class _Expected(NamedTuple):
    """What a followed table must be, held without holding its files open."""

    spec: TableSpec
    codec: RowCodec
    files: str | None


class FollowedTables:
    """The tables of a store that follows a writer, from one opening of the database to the next. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Follow the tables of the database at ``path``."""
        self._path = path
        self._expected: dict[str, _Expected] = {}  # by name; those that the writer dropped too: it may load them again
        self._told: dict[str, str] = {}  # what the log says of a table that is not as the writer has it, by its name

    def in_database(self, database: Database, tables: Mapping[str, RocksDbTable]) -> dict[str, RocksDbTable]:
        """Those of ``tables``, and of earlier ones that were not forgotten, that ``database`` has, as it has them.

        One that is just being loaded, or is of another model by now, stays as it was: its handle keeps the files of
        that time open. One that the writer has dropped is none until that has loaded it again.
        """
        for name, held in tables.items():
            self._expected[name] = _Expected(held.spec, held.codec, held.files)
        followed = {}
        for name, expected in self._expected.items():
            table = self._followed(database, expected, tables.get(name))
            if table is not None:
                followed[name] = table
        return followed

    def forget(self, name: str) -> None:
        """Do not follow a table any more; one that is not followed does nothing."""
        self._expected.pop(name, None)
        self._told.pop(name, None)

    def _followed(self, database: Database, expected: _Expected, held: RocksDbTable | None) -> RocksDbTable | None:
        name = expected.spec.name
        if database.is_loading(name):
            return held
        if database.family(name) is None:
            self._tell_once(self._error(name, "the writer has dropped it"), "its keys are unknown until it is back")
            return None
        try:
            table = opened_table(self._path, database, expected.spec, expected.codec)
            if expected.files is not None and table.files != expected.files:
                other = f"the writer has loaded it from other files, {table.files}; this process goes by"
                raise self._error(name, f"{other} {expected.files}: restart it with those")
        except StoreError as err:  # no reason to hold back the others
            self._tell_once(err, "it stays as it was")
            return held
        self._told.pop(name, None)
        return table

    def _tell_once(self, error: StoreError, effect: str) -> None:
        if self._told.get(error.table) != str(error):
            logger.warning("%s; %s", error, effect)
        self._told[error.table] = str(error)

    def _error(self, name: str, reason: str) -> StoreError:
        return StoreError(STORE_NAME, name, f"{self._path}: {reason}")


class Follower:
    """A thread that does something again and again, until it is stopped.

    A failure is logged once when failures start and once when they end.
    """

    def __init__(self, catch_up: Callable[[], None], interval_ms: int) -> None:
        """Begin to call ``catch_up`` every ``interval_ms``."""
        self._catch_up = catch_up
        self._interval_s = interval_ms / 1000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rocksdb follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; returns when the thread has ended. Stopping twice is allowed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        was_failing = False
        while not self._stop.wait(self._interval_s):
            try:
                self._catch_up()
            except StoreError as err:
                if not was_failing:
                    logger.warning("cannot follow the writer: %s", err)
                was_failing = True
            else:
                if was_failing:
                    logger.warning("following the writer again")
                was_failing = False
