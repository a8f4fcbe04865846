"""``hotrow dump``: write all rows of a table to a file."""

import argparse
from pathlib import Path
from typing import Any

from serving.cli.progress import progress_bar
from serving.dumps import dump_table

_FORMATS = "HPS's dump if it ends in .bin, RocksDB's if in .sst, otherwise a folder with key and emb_vector"


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "dump",
        description="Write all rows of a table to a file. The rows come from the last tier, which holds every row and "
        "may be in use. Without Redis and RocksDB the rows come from the model's file, because the RAM of other "
        "processes cannot be read.",
    )
    add_table_arguments(parser, _FORMATS)
    parser.set_defaults(run=dump, error_code=1)


def add_table_arguments(parser: argparse.ArgumentParser, formats: str) -> None:
    """Add the arguments that ``hotrow dump`` and ``hotrow load`` share: the tiers, the table and the file."""
    parser.add_argument("ps", type=Path, metavar="PS_JSON", help="the tiers and models: a ps.json or a repository")
    parser.add_argument("table", metavar="MODEL.TABLE", help="the table's full name")
    parser.add_argument("file", type=Path, metavar="FILE", help=formats)


def dump(options: argparse.Namespace) -> int:
    """Write the file and print its number of rows. A HotrowError leaves the file unchanged."""
    with progress_bar() as progress:
        rows = dump_table(options.ps, options.table, options.file, progress)
    print(f"{options.file}: {rows:,} rows of {options.table}")
    return 0
