"""``hotrow load``: a file's rows, into the tiers."""

import argparse
from typing import Any

from serving.cli.dump import add_table_arguments
from serving.cli.progress import progress_bar
from serving.dumps import load_table


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "load",
        help="bring the rows of a file into a table",
        description="Bring the rows of a file that `hotrow dump` or HPS wrote into Redis and RocksDB, whichever the "
        "ps.json names. They are inserted among those that are there, as HPS does it. The whole file is checked before "
        "a row is touched. Later starts keep the rows until the model's own files change; RAM of processes that run "
        "now does not see them.",
    )
    add_table_arguments(parser)
    parser.add_argument(
        "--replace", action="store_true", help="as one act: the table then has the rows of the file and no others"
    )
    parser.set_defaults(run=load, error_code=1)


def load(options: argparse.Namespace) -> int:
    """Load the file and say how many rows it has. Whatever is wrong is a HotrowError."""
    with progress_bar() as progress:
        rows = load_table(options.ps, options.table, options.file, options.replace, progress)
    how = "replaced by" if options.replace else "took in"
    print(f"{options.table} {how} {rows:,} rows of {options.file}")
    return 0
