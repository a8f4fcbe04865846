"""How RocksDB is opened and spoken to: options, errors. The store says what is kept where."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from traceback import clear_frames
from typing import Any

from serving.errors import MissingExtraError, StoreError
from serving.storage.rocksdb.file_checks import check_logs, check_manifest, damaged_logs_named

STORE_NAME = "rocksdb"

# Ten bits make one unknown key of a hundred read a block; RocksDB's tuning guide stops there, too.
BLOOM_BITS_PER_KEY = 10
# A lookup checks the checksum of a whole block and searches it. Of 1M rows of 128 bytes in mapped files, blocks of
# 1 KiB gave 576,000 rows/s, of RocksDB's usual 4 KiB 471,000, of 512 bytes 575,000; the files are 2 % larger.
BLOCK_BYTES = 1024
# What rows that were inserted one by one take of memory before they become files: of one table, and over all tables.
MEMTABLE_BYTES, MEMTABLES_BYTES = 32 * 2**20, 256 * 2**20
# The log that brings them back is read at every opening, some 125 MiB/s, with Python's global lock held; followers open
# often.
LOG_BYTES = 64 * 2**20
# A bloom filter over whole keys, of this part of a memtable: a read that the memtable cannot answer skips its search.
MEMTABLE_BLOOM_RATIO = 0.02
# Files are handed to the disk while they are written, so that the last fsync does not stall reads (tuning guide).
SYNC_EVERY_BYTES = 2**20
INFO_LOGS, INFO_LOG_BYTES = 4, 4 * 2**20
MOST_SUBCOMPACTIONS = 4
# rocksdict's own, beside RocksDB's files, and written anew at every opening, even one that is only to read.
SETTINGS_FILE = "rocksdict-config.json"
# What RocksDB says where the process itself has the lock, and what can be done then, and otherwise.
_HERE = "lock hold by current process"
_LOCKED_HERE = "in this process: close that first, and end walks over its rows"
_LOCKED_ELSEWHERE = (
    "by a `hotrow serve` without read_only say: end that first, or only read it, with persistent_db.read_only or "
    "`hotrow dump`"
)


def import_rocksdict() -> Any:
    """The ``rocksdict`` module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import rocksdict
    except ModuleNotFoundError as err:
        raise MissingExtraError("rocksdict", "rocksdb", "a persistent_db of type rocks_db") from err
    return rocksdict


def table_options(rocksdict: Any, num_threads: int) -> Any:
    """Options of the database and of every column family: point lookups from mapped files, checksums verified.

    Files say themselves how they were written, so those of another program, HPS say, are read as they are. Rows are
    not compressed: floats do not shrink by much, and only uncompressed blocks are read from the mapped file in place.
    Index and filter blocks stay with their files, which stay open: a follower reads files that the writer has removed.
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
    options.set_db_write_buffer_size(MEMTABLES_BYTES)
    options.set_max_total_wal_size(LOG_BYTES)
    # RocksDB's own choice, point_in_time, silently leaves out all that a log has behind a damaged place.
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(MEMTABLE_BLOOM_RATIO)
    options.set_bytes_per_sync(SYNC_EVERY_BYTES)
    options.set_keep_log_file_num(INFO_LOGS)
    options.set_max_log_file_size(INFO_LOG_BYTES)
    options.set_stats_dump_period_sec(0)  # nobody reads them there
    options.create_if_missing(True)
    options.increase_parallelism(num_threads)
    options.set_max_subcompactions(min(num_threads, MOST_SUBCOMPACTIONS))
    return options


def open_database(rocksdict: Any, path: Path, read_only: bool, num_threads: int) -> tuple[Any, dict[str, Any]]:
    """Open the database at ``path`` with all its column families.

    Returns:
        the database, and its column families by name.

    Raises:
        StoreError: it cannot be opened; the message names the folder, and what is wrong with it.
    """
    options = table_options(rocksdict, num_threads)
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    with translated_errors(path):
        if read_only:
            _check_made(path)
        check_manifest(STORE_NAME, path)
        check_logs(STORE_NAME, path)
        is_there = read_only or (path / "CURRENT").exists()
        names = rocksdict.Rdict.list_cf(str(path)) if is_there else ["default"]
        opened_folder = _writable_folder(path) if read_only else nullcontext(path)
        with opened_folder as folder, damaged_logs_named(STORE_NAME, path):
            database = rocksdict.Rdict(str(folder), options, {name: options for name in names}, access)
        return database, {name: database.get_column_family(name) for name in names if name != "default"}


def recover_database(path: str | Path) -> None:
    """Let a database whose log is damaged be opened again, without what that log has behind the damage.

    A loss of power may leave a hole among the last writes, of which nobody was told yet that they are done; all that
    was acknowledged lies before it. Other damage may cost acknowledged rows, and which cannot be told: copy the folder
    first. Nobody else may have the database open.

    Raises:
        StoreError: it cannot be opened all the same.
        MissingExtraError: rocksdict is not installed.
    """
    rocksdict, folder = import_rocksdict(), Path(path)
    options = table_options(rocksdict, 1)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    with translated_errors(folder):
        _check_made(folder)
        check_manifest(STORE_NAME, folder)
        families = {name: options for name in rocksdict.Rdict.list_cf(str(folder))}
        rocksdict.Rdict(str(folder), options, families).close()  # rows of the log go to files as it is opened


def _check_made(path: Path) -> None:
    """Tell a database that was never made from one that is damaged, which is RocksDB's to say."""
    if not (path / "CURRENT").exists() and not any(path.glob("MANIFEST-*")):
        reason = f"{path}: there is no database; it is made when models are loaded into it, by `hotrow serve` say"
        raise StoreError(STORE_NAME, "", reason)


@contextmanager
def _writable_folder(path: Path) -> Iterator[Path]:
    """The folder of a database that is only read, or, where rocksdict may not write its settings there, one of links.

    The links may go as soon as it is open, for RocksDB then has every file open that it reads.
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
    """Check, without making a database, that one can be opened at ``path``: its folder is made, and removed again.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: the folder cannot be made or written to, or, with ``read_only``, has no database.
    """
    rocksdict = import_rocksdict()
    if read_only:
        with translated_errors(path):
            _check_made(path)
            rocksdict.Rdict.list_cf(str(path))
        return
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        with translated_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if not _allows(path, os.R_OK | os.W_OK | os.X_OK):
                raise StoreError(STORE_NAME, "", f"{path}: may not be written to; with read_only it need not be")
    finally:
        for folder in missing:
            with suppress(OSError):  # was not made, or somebody else uses it already
                folder.rmdir()


def check_new_folder(folder: Path) -> None:
    """Check that a checkpoint can be made at ``folder``, which RocksDB itself refuses in words of its own.

    Raises:
        StoreError: it is there already, or the folder around it is not.
    """
    around = folder.absolute().parent
    if os.path.lexists(folder):
        fault = "exists already; a checkpoint is made in a new folder"
    elif not around.is_dir():
        fault = f"{around} {'is no folder' if os.path.lexists(around) else 'does not exist'}; make it first"
    else:
        return
    raise StoreError(STORE_NAME, "", f"{folder}: {fault}")


def all_items(database: Any) -> Iterator[tuple[bytes, bytes]]:
    """All pairs of a database or a column family, in the order of their keys' bytes, as they are now.

    rocksdict's own iterator ends at a damaged block as if nothing came behind it; this one raises, as rocksdict does.
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
    """Turn what the system and rocksdict raise into StoreError.

    rocksdict raises plain ``Exception`` and tells cases apart by text only. Variables of the calls that failed are
    forgotten, for handles among them would keep the database open, and locked, as long as somebody keeps the error.
    """
    try:
        yield
    except OSError as err:
        reason = f"{err.strerror} (os error {err.errno})" if err.errno else str(err)  # rocksdict's have the text alone
        raise StoreError(STORE_NAME, table, f"{err.filename or path}: {reason}") from err
    except Exception as err:
        if type(err) is not Exception and type(err).__module__ != "rocksdict":
            raise
        clear_frames(err.__traceback__)
        reason = str(err)
        if "/LOCK" in reason:
            reason = f"already open for writing, {_LOCKED_HERE if _HERE in reason else _LOCKED_ELSEWHERE} ({reason})"
        raise StoreError(STORE_NAME, table, f"{path}: {reason}") from err
