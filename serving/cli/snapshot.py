"""``hotrow snapshot``: write a table as a file that opens at once and that processes share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from kernels.host import RowDtype
from serving.cli.numbers import whole_number
from serving.config import read_repository
from serving.errors import ConfigError, ModelFileError
from serving.model.snapshot_model import is_snapshot, write_snapshot_file
from serving.model.sparse_file import KeyType, RowLayout, open_sparse
from serving.model.sparse_model import SparseModel
from serving.parameter_server.table_files import open_table_file
from serving.storage import SnapshotReader, open_snapshot
from serving.storage.row_codec import rounding_error

_BATCH_ROWS = 65536


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "snapshot",
        description="Write one table as a snapshot. A server maps the file and serves its rows.",
    )
    parser.add_argument(
        "table",
        type=Path,
        metavar="TABLE",
        help="a folder with key and emb_vector, a v3.0 file, or a configuration with --table",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the snapshot; an existing file is replaced")
    parser.add_argument(
        "--table",
        dest="name",
        default="",
        metavar="NAME",
        help="the table of this name, if TABLE is a configuration as for `hotrow check`",
    )
    parser.add_argument(
        "--row-dtype", choices=get_args(RowDtype), default="fp32", help="type of the stored rows (default: %(default)s)"
    )
    parser.add_argument(
        "--dim", type=whole_number(1, 2**31 - 1), metavar="D", help="floats per row, if the table's files do not say"
    )
    parser.add_argument(
        "--key-type", choices=get_args(KeyType), default="I64", help="key type of a v3.0 file (default: I64)"
    )
    parser.add_argument(
        "--row-layout",
        choices=get_args(RowLayout),
        default="distributed",
        help="row layout of a v3.0 file (default: %(default)s)",
    )
    parser.set_defaults(run=snapshot, error_code=1)


def snapshot(options: argparse.Namespace) -> int:
    """Write the file and print its rows and size."""
    model = _named_table(options) if options.name else _table(options)
    write_snapshot_file(options.file, model, options.row_dtype, model.digest())
    with open_snapshot(options.file) as written:
        print(*describe_snapshot(written), sep="\n")
        if written.row_dtype != "fp32":
            error = rounding_error("snapshot", "", written.row_dtype, model.batches(_BATCH_ROWS, warns=False))
            print(
                f"rows are off by {error.mean:.2g} on average and {error.largest:.2g} at most"
                f" (mean magnitude {error.magnitude:.2g})"
            )
    return 0


def describe_snapshot(reader: SnapshotReader) -> Sequence[str]:
    """Return lines about the rows and the size of a snapshot."""
    return [f"{reader.rows:,} rows of {reader.dim} floats as {reader.row_dtype}, {reader.file_bytes / 2**20:,.2f} MiB"]


def _named_table(options: argparse.Namespace) -> SparseModel:
    """Return the table that ``--table`` names, by its full name or by a name that only one model has."""
    models = read_repository(options.table).models
    tables = {config.hps_name(table): (config, table) for config in models for table in config.tables}
    matches = [full for full, (_, table) in tables.items() if options.name in (full, table.name)]
    if len(matches) != 1:
        names = ", ".join(matches or tables)
        problem = f"more than one table is called {options.name!r}" if matches else f"no table {options.name[:64]!r}"
        raise ConfigError(str(options.table), "", f"{problem}: expected one of {names}")
    return open_table_file(*tables[matches[0]])


def _table(options: argparse.Namespace) -> SparseModel:
    path: Path = options.table
    dim = options.dim if options.dim is not None else _dim_of(path)
    return open_sparse(path, dim, options.key_type, options.row_layout)


def _dim_of(path: Path) -> int:
    """Return floats per row, from the sizes of a folder's files or from a snapshot's header."""
    if is_snapshot(path):
        with open_snapshot(path) as snapshot:
            return snapshot.dim
    try:
        key_bytes, vector_bytes = ((path / name).stat().st_size for name in ("key", "emb_vector"))
    except OSError as err:
        reason = (
            f"expected a folder with key and emb_vector ({err.filename}: {err.strerror}); for a file, give --dim; "
            "for a ps.json, a repository or a model, give --table"
        )
        raise ModelFileError(path, reason) from err
    floats, rest = divmod(vector_bytes // 4, max(key_bytes // 8, 1))
    if rest or not floats:
        raise ModelFileError(path, f"{vector_bytes:,} bytes of vectors do not fit {key_bytes // 8:,} keys")
    return floats
