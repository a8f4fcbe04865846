"""Reads logs and other files as Arrow tables, and joins them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import MissingExtraError, TraceError, did_you_mean
from serving.model.data_files import list_data_files
from serving.model.names import REQUEST_ID, REQUEST_SAMPLE
from serving.request_log import stream_batches

_STREAM, _PARQUET = ".arrow", ".parquet"
_CSV = (".csv", ".csv.gz")


def import_arrow(purpose: str) -> Any:
    """Return pyarrow with the modules that this package uses; MissingExtraError names ``purpose`` if it is absent."""
    try:
        for module in ("compute", "csv", "parquet"):
            import_module(f"pyarrow.{module}")
    except ImportError as err:
        raise MissingExtraError("pyarrow", "features", purpose) from err
    return import_module("pyarrow")


def read_log(path: Path) -> Any:
    """Return the rows of a log in order, including rows that a server has just written.

    Args:
        path: a file, or a folder with the files of one model.

    Raises:
        TraceError: there is no log, a file is damaged, or a column occurs twice or with different types.
    """
    table = read_rows(path, suffixes=(_PARQUET, _STREAM))
    for name in (REQUEST_ID, REQUEST_SAMPLE):
        if name not in table.column_names:
            has = ", ".join(table.column_names)
            raise TraceError(str(path), f"is not a request log: it has no column {name!r}, only {has}")
    if not table.num_rows:
        raise TraceError(str(path), "the log has no rows")
    return table


def read_rows(path: Path, texts: Collection[str] = (), suffixes: Sequence[str] = (_PARQUET, *_CSV)) -> Any:
    """Return the rows of files as one table.

    Args:
        path: a file, or a folder of files, which are read in the order of their names.
        texts: the columns of CSV files that stay text.
        suffixes: of the files.

    Raises:
        TraceError: there is no such file, a file is damaged, or a column occurs twice or with different types.
    """
    pa = import_module("pyarrow")
    tables = []
    for file in _files(path, suffixes):
        try:
            tables.append(_read(pa, file, texts))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
            reason = getattr(err, "strerror", None) or str(err).strip().splitlines()[0]
            raise TraceError(str(file), f"cannot be read: {reason}") from err
    try:
        return pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    except pa.ArrowException as err:
        raise TraceError(str(path), f"the columns make no table: {str(err).splitlines()[0]}") from err


def _files(path: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    if not path.exists():
        raise TraceError(str(path), "no such file or folder")
    if not path.is_dir():
        if not path.name.endswith(tuple(suffixes)):
            raise TraceError(str(path), f"expected a file that ends in {', '.join(suffixes)}, or a folder")
        yield path
        return
    found = list_data_files(path, suffixes)
    if not found.files:
        folders = [one for one in sorted(path.iterdir()) if one.is_dir() and list_data_files(one, suffixes).files]
        close = f"; expected the folder of one model: {', '.join(map(str, folders))}" if folders else f": {found}"
        raise TraceError(str(path), f"the folder has no files *{suffixes[0]}{close}")
    for file in found.files:
        if file.suffix != _STREAM or file.with_suffix(_PARQUET) not in found.files:
            yield file


def _read(pa: Any, file: Path, texts: Collection[str]) -> Any:
    if file.suffix == _STREAM:
        with suppress(FileNotFoundError):
            batches = list(stream_batches(file))
            return pa.Table.from_batches(batches) if batches else pa.table({})
        file = file.with_suffix(_PARQUET)  # the server has made it since the folder was listed
    if file.suffix == _PARQUET:
        return pa.parquet.read_table(file, partitioning=None)
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
    return pa.csv.read_csv(file, parse_options=pa.csv.ParseOptions(newlines_in_values=True), convert_options=convert)


class Matches(NamedTuple):
    """Rows of two tables that match.

    Attributes:
        ours: int64[M], rows of the first table.
        theirs: int64[M], the row of the second table that matches each.
        ambiguous: how many rows of the first table have a key that both tables have, and one has several times.
    """

    ours: NDArray[np.int64]
    theirs: NDArray[np.int64]
    ambiguous: int


def match(ours: Any, theirs: Any, on: Sequence[str], names: tuple[str, str]) -> Matches:
    """Find the rows of two tables with equal values in the columns ``on``.

    Args:
        ours: the first table.
        theirs: the second.
        on: the columns.
        names: of the two tables, for messages.

    Raises:
        TraceError: a column is missing or cannot be compared, or no row has a match.
    """
    pa = import_module("pyarrow")
    for table, name in zip((ours, theirs), names, strict=True):
        for column in on:
            if column not in table.column_names:
                reason = f"has no column {column!r} to join on{did_you_mean(column, table.column_names)}"
                raise TraceError(name, reason)
    try:
        types = [(column, ours.schema.field(column).type) for column in on]
        keys = [_unique(pa, table.select(on).cast(pa.schema(types))) for table in (ours, theirs)]
        joined = keys[0].join(keys[1], list(on), join_type="inner", right_suffix=" of theirs")
    except pa.ArrowException as err:
        raise TraceError(names[1], f"cannot be joined on {', '.join(on)}: {str(err).splitlines()[0]}") from err
    single = pa.compute.and_(
        pa.compute.equal(joined["row_count"], 1), pa.compute.equal(joined["row_count of theirs"], 1)
    )
    matched = joined.filter(single).sort_by("row_min")
    several = joined.filter(pa.compute.invert(single))
    ambiguous = pa.compute.sum(several["row_count"]).as_py() or 0
    if not matched.num_rows:
        reason = f"no row of {names[0]} has a unique {' and '.join(on)} that is also here"
        if ambiguous:
            reason += f"; {ambiguous:,} rows share their key with another row, so add a column to --on"
        raise TraceError(names[1], reason)
    return Matches(matched["row_min"].to_numpy(), matched["row_min of theirs"].to_numpy(), ambiguous)


def _unique(pa: Any, keys: Any) -> Any:
    """Return the different keys, the first row of each, and the number of its rows."""
    rows = keys.append_column("row", pa.array(np.arange(keys.num_rows)))
    return rows.group_by(keys.column_names).aggregate([("row", "min"), ("row", "count")])
