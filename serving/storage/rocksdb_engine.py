"""How RocksDB is opened and spoken to: options, order of keys, errors. The store says what is kept where."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import MissingExtraError, StoreError
from serving.storage.store import Keys

STORE_NAME = "rocksdb"
BLOOM_BITS_PER_KEY = 10


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
    """Options of the database and of every column family: point lookups from mapped files, checksums verified."""
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    options.create_if_missing(True)
    options.increase_parallelism(num_threads)
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
        names = rocksdict.Rdict.list_cf(str(path)) if (path / "CURRENT").exists() or read_only else ["default"]
        database = rocksdict.Rdict(str(path), options, {name: options for name in names}, access)
        return database, {name: database.get_column_family(name) for name in names if name != "default"}


def check_database(path: Path, read_only: bool) -> None:
    """Check, without making a database, that one can be opened at ``path``: its folder is made, and removed again.

    Raises:
        MissingExtraError: rocksdict is not installed.
        StoreError: the folder cannot be made, or, with ``read_only``, has no database.
    """
    rocksdict = import_rocksdict()
    if read_only:
        with translated_errors(path):
            rocksdict.Rdict.list_cf(str(path))
        return
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise StoreError(STORE_NAME, "", f"{path}: {err.strerror} (os error {err.errno})") from err
    finally:
        for folder in missing:
            with suppress(OSError):  # was not made, or somebody else uses it already
                folder.rmdir()


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
    """Turn what rocksdict raises into StoreError: it raises plain ``Exception`` and tells cases apart by text only."""
    try:
        yield
    except Exception as err:
        if type(err) is not Exception and type(err).__module__ != "rocksdict":
            raise
        reason = str(err)
        if "/LOCK" in reason:
            reason = f"already open for writing; close the other or open this one read-only ({reason})"
        raise StoreError(STORE_NAME, table, f"{path}: {reason}") from err


def bytewise_order(keys: Keys, key_bytes: int) -> NDArray[np.intp]:
    """The order of the keys' raw bytes, as RocksDB compares them; equal keys keep their order."""
    raw = keys.view(np.uint64) if key_bytes == 8 else keys.astype(np.uint32)
    return np.argsort(raw.astype(raw.dtype.newbyteorder("<"), copy=False).byteswap(), kind="stable")
