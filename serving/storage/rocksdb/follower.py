"""Reading a RocksDB database next to the process that writes it, and following that process.

RocksDB's secondary instances are not used: a reload of a table removes a column family, and then a secondary instance
crashes the process (RocksDB as of rocksdict 0.3.29). A read-only opening takes milliseconds, plus the time to read the
log of the newest writes. A follower opens the database again whenever its files have changed.
"""

from contextlib import suppress
from pathlib import Path

from serving.errors import StoreError
from serving.storage.rocksdb.database import Database
from serving.storage.rocksdb.engine import has_database, translated_errors
from serving.storage.rocksdb.family import FamilyRows, family_rows
from serving.storage.rocksdb.file_checks import STORE_NAME, check_manifest
from serving.storage.row_codec import RowCodec

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
        if not has_database(path):
            check_manifest(path)
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


def followed_rows(
    database: Database, codec: RowCodec, digest: str | None, rows_until_now: FamilyRows | None
) -> tuple[FamilyRows | None, StoreError | None]:
    """Return a followed table's rows in ``database``, a newer opening, and why they are not what the writer has.

    Args:
        database: the opening.
        codec: the table, and the form of its values.
        digest: of the files that the table must be of; None: of any.
        rows_until_now: its rows until now; None: the writer has dropped the table.

    Returns:
        ``rows_until_now`` while the table is being loaded, or if it is of other files now. None if the writer has
        dropped it.
    """
    name = codec.spec.name
    try:
        record = database.record(name)
    except StoreError as err:
        return rows_until_now, err
    if record is not None and not record.digest:  # a load is running, or was killed
        return rows_until_now, None
    if database.family(name) is None:
        return None, StoreError(STORE_NAME, name, f"{database.path}: the writer has dropped it")
    try:
        rows = family_rows(database, codec)
    except StoreError as err:  # other tables are followed anyway
        return rows_until_now, err
    if digest is not None and rows.digest != digest:
        reason = f"the writer has loaded it from other files, {rows.digest}; this process uses {digest}"
        return rows_until_now, StoreError(
            STORE_NAME, name, f"{database.path}: {reason}: restart it with the writer's files"
        )
    return rows, None
