"""Reads logs and other files as Arrow tables, and joins them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import MissingExtraError, TraceError, did_you_mean
from serving.model.data_files import list_data_files
from serving.model.names import REQUEST_ID, REQUEST_SAMPLE
from serving.request_log import requests_of, stream_batches

_STREAM, _PARQUET = ".arrow", ".parquet"
_CSV = (".csv", ".csv.gz")
_PART_ROWS = 65_536
_MOST_DRAWN = 200_000


def import_arrow(purpose: str) -> Any:
    """Return pyarrow with the modules that this package uses; MissingExtraError names ``purpose`` if it is absent."""
    try:
        for module in ("compute", "csv", "parquet"):
            import_module(f"pyarrow.{module}")
    except ImportError as err:
        raise MissingExtraError("pyarrow", "features", purpose) from err
    return import_module("pyarrow")


class _File(NamedTuple):
    """A file of rows.

    Attributes:
        path: of the file.
        rows: how many rows are read; None: all.
        schema: Arrow's.
    """

    path: Path
    rows: int | None
    schema: Any


class RowFiles:
    """The rows of files. Only the columns that a caller asks for are read, and a part of the rows at a time.

    Attributes:
        source: the path, for messages.
        names: the columns.
        empty: the columns without rows.
    """

    def __init__(self, path: Path, texts: Collection[str] = (), suffixes: Sequence[str] = (_PARQUET, *_CSV)) -> None:
        """List the files and their columns.

        Args:
            path: a file, or a folder of files, which are read in the order of their names.
            texts: the columns of CSV files that stay text.
            suffixes: of the files.

        Raises:
            TraceError: there is no such file, a file is damaged, or a column occurs twice or with different types.
        """
        self._pa = import_module("pyarrow")
        self.source = str(path)
        self._texts = frozenset(texts)
        self._files = [self._opened(file) for file in _files(path, suffixes)]
        try:
            schema = self._pa.unify_schemas([file.schema for file in self._files], promote_options="permissive")
            self.empty = schema.remove_metadata().empty_table()
            self.empty.select(schema.names)
        except (self._pa.ArrowException, KeyError) as err:
            raise TraceError(self.source, f"the columns make no table: {_first_line(err)}") from err
        self.names: Sequence[str] = schema.names

    def parts(self, columns: Collection[str]) -> Iterator[Any]:
        """Yield some columns as Arrow tables of some rows.

        Raises:
            TraceError: a file is damaged, or was changed or removed since it was listed.
        """
        names = [name for name in self.names if name in columns]
        empty = self.empty.select(names)
        for file in self._files:
            left = file.rows
            for table in self._tables(file.path, [name for name in names if name in file.schema.names]):
                whole = self._pa.concat_tables([empty, table], promote_options="permissive")
                whole = whole if left is None else whole.slice(0, left)
                left = None if left is None else left - whole.num_rows
                yield whole
            if left:
                raise TraceError(str(file.path), "has fewer rows than at the start")

    def read(self, columns: Collection[str]) -> Any:
        """Return all rows of some columns."""
        parts = [self.empty.select([name for name in self.names if name in columns]), *self.parts(columns)]
        return self._pa.concat_tables(parts, promote_options="permissive").combine_chunks()

    def take(self, rows: NDArray[np.int64], columns: Collection[str]) -> Any:
        """Return some columns of some different rows, in the order of ``rows``."""
        order = np.argsort(rows)
        ascending, first = rows[order], 0
        parts = [self.empty.select([name for name in self.names if name in columns])]
        for table in self.parts(columns):
            begin, end = np.searchsorted(ascending, (first, first + table.num_rows))
            parts.append(table.take(ascending[begin:end] - first))
            first += table.num_rows
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return self._pa.concat_tables(parts, promote_options="permissive").take(places).combine_chunks()

    def _opened(self, path: Path) -> _File:
        pa = self._pa
        with _readable(path):
            if path.suffix == _STREAM:
                with suppress(FileNotFoundError):
                    rows, schema = 0, pa.schema([])
                    for batch in stream_batches(path):
                        rows, schema = rows + batch.num_rows, batch.schema
                    return _File(path, rows, schema)
                path = path.with_suffix(_PARQUET)  # the server has made it since the folder was listed
            if path.suffix == _PARQUET:
                with pa.parquet.ParquetFile(path) as file:
                    return _File(path, file.metadata.num_rows, file.schema_arrow)
            with pa.csv.open_csv(path, parse_options=self._csv_lines()) as reader:
                types = [(name, pa.string() if name in self._texts else pa.null()) for name in reader.schema.names]
                return _File(path, None, pa.schema(types))

    def _csv_lines(self) -> Any:
        return self._pa.csv.ParseOptions(newlines_in_values=True)

    def _tables(self, path: Path, columns: Sequence[str]) -> Iterator[Any]:
        pa = self._pa
        with _readable(path):
            if path.suffix == _STREAM:
                with suppress(FileNotFoundError):
                    for batch in stream_batches(path):
                        yield pa.Table.from_batches([batch]).select(columns)
                    return
                path = path.with_suffix(_PARQUET)
            if path.suffix == _PARQUET:
                with pa.parquet.ParquetFile(path, pre_buffer=False) as file:  # which would keep the file in memory
                    for batch in file.iter_batches(_PART_ROWS, columns=columns):
                        yield pa.Table.from_batches([batch])
                return
            texts = dict.fromkeys(self._texts, pa.string())
            options = pa.csv.ConvertOptions(column_types=texts, include_columns=columns)
            if not self._texts.issuperset(columns):  # the type depends on all values
                yield pa.csv.read_csv(path, parse_options=self._csv_lines(), convert_options=options)
                return
            with pa.csv.open_csv(path, parse_options=self._csv_lines(), convert_options=options) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise TraceError for what Arrow raises."""
    try:
        yield
    except (import_module("pyarrow").ArrowException, OSError, UnicodeDecodeError) as err:
        raise TraceError(str(path), f"cannot be read: {getattr(err, 'strerror', None) or _first_line(err)}") from err


def _first_line(err: Exception) -> str:
    return str(err).strip().splitlines()[0]


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
        folders = [
            entry for entry in sorted(path.iterdir()) if entry.is_dir() and list_data_files(entry, suffixes).files
        ]
        close = f"; expected the folder of one model: {', '.join(map(str, folders))}" if folders else f": {found}"
        raise TraceError(str(path), f"the folder has no files *{suffixes[0]}{close}")
    for file in found.files:
        if file.suffix != _STREAM or file.with_suffix(_PARQUET) not in found.files:
            yield file


class RequestRows(RowFiles):
    """The rows of a request log, including rows that a server has just written.

    Attributes:
        count: how many rows there are.
    """

    def __init__(self, path: Path) -> None:
        """List the files of a log.

        Args:
            path: a file, or a folder with the files of one model.

        Raises:
            TraceError: there is no log, or see ``RowFiles``.
        """
        super().__init__(path, suffixes=(_PARQUET, _STREAM))
        for name in (REQUEST_ID, REQUEST_SAMPLE):
            if name not in self.names:
                has = ", ".join(self.names)
                raise TraceError(self.source, f"is not a request log: it has no column {name!r}, only {has}")
        self.count = sum(file.rows or 0 for file in self._files)
        if not self.count:
            raise TraceError(self.source, "the log has no rows")

    def requests(self, columns: Collection[str]) -> Iterator[Any]:
        """Yield some columns as tables of whole requests; see ``parts``."""
        rest = None
        for part in self.parts({REQUEST_ID, REQUEST_SAMPLE, *columns}):
            table = part if rest is None else self._pa.concat_tables([rest, part], promote_options="permissive")
            last = requests_of(table)[-2] if table.num_rows else 0
            if last:
                yield table.slice(0, last)
            rest = table.slice(last)
        if rest is not None and rest.num_rows:
            yield rest


def drawn_rows(count: int) -> NDArray[np.int64]:
    """Return the rows whose features are compared: all, or evenly drawn rows of a large table, ascending."""
    if count <= _MOST_DRAWN:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, _MOST_DRAWN, replace=False, shuffle=False))


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


def match(ours: RowFiles, theirs: RowFiles, on: Sequence[str]) -> Matches:
    """Find the rows of two sets of files with equal values in the columns ``on``, which are read as a whole.

    Raises:
        TraceError: a column is missing or cannot be compared, or no row has a match.
    """
    pa = import_module("pyarrow")
    for rows in (ours, theirs):
        for column in on:
            if column not in rows.names:
                reason = f"has no column {column!r} to join on{did_you_mean(column, rows.names)}"
                raise TraceError(rows.source, reason)
    keys = [rows.read(on).select(on) for rows in (ours, theirs)]
    try:
        keys = [_unique(pa, of_rows.cast(keys[0].schema)) for of_rows in keys]
        joined = keys[0].join(keys[1], list(on), join_type="inner", right_suffix=" of theirs")
    except pa.ArrowException as err:
        raise TraceError(theirs.source, f"cannot be joined on {', '.join(on)}: {str(err).splitlines()[0]}") from err
    single = pa.compute.and_(
        pa.compute.equal(joined["row_count"], 1), pa.compute.equal(joined["row_count of theirs"], 1)
    )
    matched = joined.filter(single).sort_by("row_min")
    several = joined.filter(pa.compute.invert(single))
    ambiguous = pa.compute.sum(several["row_count"]).as_py() or 0
    if not matched.num_rows:
        reason = f"no row of {ours.source} has a unique {' and '.join(on)} that also occurs here"
        if ambiguous:
            reason += f"; {ambiguous:,} rows share their key with another row, so add a column to --on"
        raise TraceError(theirs.source, reason)
    return Matches(matched["row_min"].to_numpy(), matched["row_min of theirs"].to_numpy(), ambiguous)


def _unique(pa: Any, keys: Any) -> Any:
    """Return the different keys, the first row of each, and the number of its rows."""
    rows = keys.append_column("row", pa.array(np.arange(keys.num_rows)))
    return rows.group_by(keys.column_names).aggregate([("row", "min"), ("row", "count")])
