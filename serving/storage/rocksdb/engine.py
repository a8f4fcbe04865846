"""Opening RocksDB: options, checks of the folder, and errors."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from traceback import clear_frames
from typing import Any

from serving.errors import MissingExtraError, StoreError, StoreInUseError
from serving.storage.rocksdb.file_checks import (
    STORE_NAME,
    check_files,
    check_logs,
    check_manifest,
    damaged_logs_named,
)

# With ten bits, one unknown key of a hundred reads a block; RocksDB's tuning guide recommends no more.
BLOOM_BITS_PER_KEY = 10
# A lookup checks the checksum of a whole block and searches it. With 1M rows of 128 bytes in mapped files, blocks of
# 1 KiB gave 576,000 rows/s, RocksDB's default of 4 KiB 471,000, and 512 bytes 575,000. The files are 2 % larger.
BLOCK_BYTES = 1024
# Memory of inserted rows before they become files: of one table, and of all tables. A table fills small memtables one
# after the other, because a row goes into 8 MiB in 1.8 us and into 32 MiB in 2.3 us. Four of them become one file.
MEMTABLE_BYTES, MERGED_MEMTABLES, MOST_MEMTABLES = 8 * 2**20, 4, 8
MEMTABLES_BYTES = 256 * 2**20
# Every opening reads the log of those rows at about 125 MiB/s with Python's global lock held, and followers open often.
LOG_BYTES = 64 * 2**20
# A bloom filter over whole keys takes this part of a memtable; reads of keys that are not in the memtable skip it.
MEMTABLE_BLOOM_RATIO = 0.02
# Files go to the disk while they are written, so that the last fsync does not stall reads (tuning guide).
SYNC_EVERY_BYTES = 2**20
INFO_LOGS, INFO_LOG_BYTES = 4, 4 * 2**20
MOST_SUBCOMPACTIONS = 4
# rocksdict's own file next to RocksDB's files; rocksdict writes it at every opening, even a read-only one.
SETTINGS_FILE = "rocksdict-config.json"
_HERE, _FULL = "lock hold by current process", "No space left on device"  # RocksDB's words


def import_rocksdict() -> Any:
    """Return the ``rocksdict`` module, or raise MissingExtraError if it is not installed."""
    try:
        import rocksdict
    except ModuleNotFoundError as err:
        raise MissingExtraError("rocksdict", "rocksdb", "a persistent_db of type rocks_db") from err
    return rocksdict


def table_options(rocksdict: Any, num_threads: int) -> Any:
    """Return options of the database and of every column family, for point lookups from mapped files.

    Files written with other options, such as HPS's, are read as they are. Rows are not compressed: floats shrink
    little, and only uncompressed blocks are read in place. Files stay open, so a follower can read files that the
    writer removed.
    """
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
    blocks.set_block_size(BLOCK_BYTES)
    blocks.set_cache_index_and_filter_blocks(False)
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    options.set_max_open_files(-1)
    options.set_write_buffer_size(MEMTABLE_BYTES)
    options.set_min_write_buffer_number_to_merge(MERGED_MEMTABLES)
    options.set_max_write_buffer_number(MOST_MEMTABLES)
    options.set_db_write_buffer_size(MEMTABLES_BYTES)
    options.set_max_total_wal_size(LOG_BYTES)
    # RocksDB's default, point_in_time, silently skips everything after a damaged place of a log.
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(MEMTABLE_BLOOM_RATIO)
    options.set_bytes_per_sync(SYNC_EVERY_BYTES)
    options.set_keep_log_file_num(INFO_LOGS)
    options.set_max_log_file_size(INFO_LOG_BYTES)
    options.set_stats_dump_period_sec(0)  # nobody reads the statistics
    options.create_if_missing(True)
    options.increase_parallelism(num_threads)
    options.set_max_subcompactions(min(num_threads, MOST_SUBCOMPACTIONS))
    return options


def open_database(rocksdict: Any, path: Path, read_only: bool, num_threads: int) -> tuple[Any, dict[str, Any]]:
    """Open the database at ``path`` with all its column families.

    Returns:
        the database, and its column families by name.

    Raises:
        StoreError: the database cannot be opened; the message names the folder and the fault.
    """
    options = table_options(rocksdict, num_threads)
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    with translated_errors(path):
        _check_folder(path)
        names = _check_content(rocksdict, path, read_only)
        opened_folder = _writable_folder(path) if read_only else nullcontext(path)
        with opened_folder as folder, damaged_logs_named(path):
            database = rocksdict.Rdict(str(folder), options, {name: options for name in names}, access)
        return database, {name: database.get_column_family(name) for name in names if name != "default"}


def recover_database(path: str | Path) -> None:
    """Make a database with a damaged log usable again, without the writes after the damage.

    A power loss may leave a gap among writes that were not acknowledged yet; no acknowledged row is lost then. Other
    damage may cost acknowledged rows, so copy the folder first. No other process may have the database open.

    Args:
        path: the database's folder.

    Raises:
        StoreError: the database still cannot be opened.
        MissingExtraError: rocksdict is not installed.
    """
    rocksdict, folder = import_rocksdict(), Path(path)
    options = table_options(rocksdict, 1)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    with translated_errors(folder):
        _check_made(folder)
        check_files(folder)
        check_manifest(folder)
        families = {name: options for name in rocksdict.Rdict.list_cf(str(folder))}
        rocksdict.Rdict(str(folder), options, families).close()  # opening moves the rows of the log to files


def has_database(path: Path) -> bool:
    """Return whether there is a database at ``path`` already."""
    return (path / "CURRENT").exists()


def _check_content(rocksdict: Any, path: Path, read_only: bool) -> list[str]:
    """Check the files of a database before it is opened, and return the names of its column families."""
    if read_only:
        _check_made(path)
    check_files(path)
    check_manifest(path)
    check_logs(path)
    names: list[str] = rocksdict.Rdict.list_cf(str(path)) if read_only or has_database(path) else ["default"]
    return names


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreError(STORE_NAME, "", f"{path}: is a file; expected a folder, which is created if it is absent")


def _check_made(path: Path) -> None:
    """Raise StoreError if there is no database; RocksDB reports a damaged database itself."""
    if not has_database(path) and not any(path.glob("MANIFEST-*")):
        reason = f"{path}: there is no database; loading models creates it, for example `hotrow serve`"
        raise StoreError(STORE_NAME, "", reason)


@contextmanager
def _writable_folder(path: Path) -> Iterator[Path]:
    """Give a folder to open read-only: the database's own, or one of links if rocksdict cannot write its settings.

    The links are removed once the database is open, because RocksDB then has every file open.
    """
    settings = path / SETTINGS_FILE
    if _allows(path, os.W_OK) and (not settings.exists() or _allows(settings, os.W_OK)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hotrow-rocksdb-") as folder:
        for file in path.iterdir():
            if file.name != SETTINGS_FILE:
                (Path(folder) / file.name).symlink_to(file.absolute())
        yield Path(folder)


def _allows(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def check_database(path: Path, read_only: bool) -> None:
    """Check that a database can be opened at ``path``, without making one.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: the folder cannot be created or written to, or with ``read_only`` has no database; or a file of the
            database is missing or damaged. Files of rows are not read.
    """
    rocksdict = import_rocksdict()
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        with translated_errors(path):
            _check_folder(path)
            if not read_only:
                path.mkdir(parents=True, exist_ok=True)
                if not _allows(path, os.R_OK | os.W_OK | os.X_OK):
                    raise StoreError(STORE_NAME, "", f"{path}: no permission to write to it; read_only needs none")
            _check_content(rocksdict, path, read_only)
    finally:
        for folder in missing:
            with suppress(OSError):  # was not created, or another process uses it already
                folder.rmdir()


def check_new_folder(folder: Path) -> None:
    """Raise StoreError if ``folder`` exists already or its parent does not, in clearer words than RocksDB's."""
    around = folder.absolute().parent
    if os.path.lexists(folder):
        fault = "exists already; a checkpoint is made in a new folder"
    elif not around.is_dir():
        fault = f"{around} {'is not a folder' if os.path.lexists(around) else 'does not exist'}; create it first"
    else:
        return
    raise StoreError(STORE_NAME, "", f"{folder}: {fault}")


def all_items(database: Any) -> Iterator[tuple[bytes, bytes]]:
    """Read all pairs of a database or a column family as they are now, in the order of the keys' bytes.

    rocksdict's own iterator ends silently at a damaged block; this iterator raises an error there.
    """
    key = None
    for key, value in database.items():
        yield key, value
    end = database.iter()
    if key is None:
        end.seek_to_first()
    else:
        end.seek(key)
        if end.valid():
            end.next()
    end.status()


@contextmanager
def translated_errors(path: Path, table: str = "") -> Iterator[None]:
    """Turn errors of the system and of rocksdict into StoreError.

    rocksdict raises plain ``Exception``, and only the text tells errors apart. The frames of the failed calls are
    cleared, because their handles would keep the database open and locked for as long as the error is kept.
    """
    try:
        yield
    except OSError as err:
        reason = (
            f"{err.strerror} (os error {err.errno})" if err.errno else str(err)
        )  # rocksdict's OSError has only a text
        raise StoreError(STORE_NAME, table, f"{err.filename or path}: {reason}") from err
    except Exception as err:
        if type(err) is not Exception and type(err).__module__ != "rocksdict":
            raise
        clear_frames(err.__traceback__)
        reason = str(err)
        if _FULL in reason:
            raise StoreError(STORE_NAME, table, f"{path}: {_FULL}") from err
        if "/LOCK" not in reason:
            raise StoreError(STORE_NAME, table, f"{path}: {reason}") from err
        locked = f"{path}: already open for writing,"
        if _HERE in reason:
            advice = "close the other store first, and end loops over its rows"
            raise StoreError(STORE_NAME, table, f"{locked} in this process: {advice}") from err
        other = "by another process, such as `hotrow serve` or Triton: stop it first"
        raise StoreInUseError(STORE_NAME, table, f"{locked} {other}") from err
