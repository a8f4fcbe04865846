"""``hotrow checkpoint``: copy the database of a ``persistent_db``."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from serving.config import read_repository
from serving.errors import ConfigError
from serving.storage import RocksDbStore
from serving.storage.rocksdb.engine import check_database


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "checkpoint",
        description="Copy the RocksDB database into a new folder. On the same file system the copy has hard links and "
        "takes milliseconds. No other process may have the database open for writing; such a process can call "
        "RocksDbStore.checkpoint. The first server that opens the copy refills its caches.",
    )
    parser.add_argument("ps", type=Path, metavar="PS_JSON", help="the tiers: a ps.json or a repository")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the copy; must not exist yet")
    parser.set_defaults(run=checkpoint, error_code=1)


def checkpoint(options: argparse.Namespace) -> int:
    """Make the copy and print its folder. After a HotrowError there is no copy."""
    config = read_repository(options.ps, [])
    disk = config.persistent_db
    if disk.type != "rocks_db" or disk.path is None:
        raise ConfigError(config.source, "persistent_db.type", "expected rocks_db: no other tier has checkpoints")
    check_database(disk.path, read_only=True)  # RocksDbStore would create an absent database
    with closing(RocksDbStore(disk.path, num_threads=disk.num_threads, warm_up=False)) as store:
        store.checkpoint(options.folder)
    print(f"{options.folder}: a copy of the database {disk.path}")
    return 0
