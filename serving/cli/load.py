"""``hotrow load``: load the rows of a file into the tiers."""

import argparse
from typing import Any

from serving.cli.dump import add_table_arguments
from serving.cli.progress import progress_bar
from serving.dumps import load_table

_FORMATS = "a file that ends in .bin (HPS) or .sst (RocksDB), or any SOURCE of `hotrow import --table`"


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "load",
        description="Insert the rows of a dump by `hotrow dump` or HPS, or of a table of another system, into the "
        "Redis and RocksDB of a ps.json. Other rows of the table stay, as in HPS. The whole file is checked before any "
        "row changes. The new rows stay until the model's own files change. Running processes do not see them in their "
        "RAM.",
    )
    add_table_arguments(parser, _FORMATS)
    parser.add_argument("--replace", action="store_true", help="replace the whole table at once")
    parser.set_defaults(run=load, error_code=1)


def load(options: argparse.Namespace) -> int:
    """Load the file and print how many rows it has."""
    with progress_bar() as progress:
        rows = load_table(options.ps, options.table, options.file, options.replace, progress)
    how = "replaced by" if options.replace else "inserted"
    print(f"{options.table}: {how} {rows:,} rows of {options.file}")
    return 0
