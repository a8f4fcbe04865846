"""Parquet and CSV files: one column per label, dense feature and slot. pyarrow reads them.

A slot's column has integers, or in Parquet also lists of integers. A null is an empty slot. HugeCTR's Parquet data is a
file list of such files, and ``_metadata.json`` in their folder names the columns (NVTabular writes it):

    {"file_stats": [{"file_name": "0.parquet", "num_rows": 1000}, ...],
     "labels": [{"col_name": "label", "index": 0}], "conts": [...], "cats": [...]}
"""

import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.errors import FeatureValueError, MissingExtraError, nearest
from serving.features import is_list_type
from serving.model.atomic import atomic_write
from serving.model.data_files import list_data_files
from serving.model.regular_file import check_regular, wrong_kind
from serving.model.strict_json import LARGEST_FLOAT32, Fields, read_json
from training.data.checks import ColumnMap, checked
from training.data.csv_faults import (
    NULL,
    NULLS,
    OPEN_QUOTE,
    EndedStream,
    conversion_advice,
    first_fault,
    header_of,
    separator_advice,
    with_line,
)
from training.data.file_list import read_file_list
from training.data.raw_columns import RawColumns
from training.data.streams import read_ahead
from training.errors import DataError
from training.model.losses import NO_LABEL, Loss
from training.samples import Bags, Samples

_READ_ROWS = 65_536  # pyarrow is slow with small batches
_READ_AHEAD = 2  # batches
_READ_BYTES = 4 << 20
_BUFFER_BYTES = 4096
_CACHED_ROWS = 2048
METADATA = "_metadata.json"
PARQUET_SUFFIXES = (".parquet",)
_PARQUET = b"PAR1"  # how Parquet files begin
CSV_SUFFIXES = (".csv", *(f".csv{packed}" for packed in (".gz", ".zst", ".bz2", ".lz4", ".br")))

_log = logging.getLogger(__name__)
Number = TypeVar("Number", np.int64, np.float32)
Part = TypeVar("Part", Samples, Any)
#: Which columns of a file are read: numbers and keys, or raw features.
Columns: TypeAlias = ColumnMap | RawColumns
#: ``checked`` with the sizes of the slots and the losses of the labels.
Check: TypeAlias = Callable[..., Samples]


def read_parquet(
    path: str | Path | Sequence[Path],
    columns: Columns,
    *,
    slot_sizes: Sequence[int] | None = None,
    losses: Sequence[Loss] | None = None,
    batch_size: int = 4096,
) -> Iterator[Samples]:
    """Yield the samples of a Parquet file, of several, or of all ``.parquet`` files of a folder.

    The files of a folder are read in the order of their names. Names that begin with ``.`` or ``_`` are left out. The
    log says how many files were left out and why. Memory does not grow with the files, but holds a row group.

    Args:
        path: the file, the files or the folder.
        columns: which columns to read; ``RawColumns`` reads raw values.
        slot_sizes: S numbers, how many keys each slot has: keys begin at 0 in each slot, and the sizes of the slots
            before are added. None: keys are used as they are.
        losses: a loss for each label, which says what the label may be; None: each is 0 or 1.
        batch_size: the samples of a batch. The last batch of a file may be smaller.

    Raises:
        DataError: a file is missing or damaged, has no such column, or a value is wrong. The message names the file,
            the column and the row, counted from 0.
        MissingExtraError: pyarrow is not installed.
    """
    check = partial(checked, slot_sizes=slot_sizes, losses=losses)
    for file in files_of(path, PARQUET_SUFFIXES):
        yield from _read_parquet_file(file, columns, check, batch_size)


def read_csv(
    path: str | Path | Sequence[Path],
    columns: Columns,
    *,
    slot_sizes: Sequence[int] | None = None,
    losses: Sequence[Loss] | None = None,
    batch_size: int = 4096,
) -> Iterator[Samples]:
    """Yield the samples of a CSV file with a header, of several, or of all ``.csv`` and ``.csv.gz`` files of a folder.

    A file whose name ends in ``.gz``, ``.zst``, ``.bz2``, ``.lz4`` or ``.br`` is decompressed. See ``read_parquet``.
    A message names the line, counted from 1, in place of the row.
    """
    import_pyarrow()
    check = partial(checked, slot_sizes=slot_sizes, losses=losses)
    for file in files_of(path, CSV_SUFFIXES):
        yield from _read_csv_file(file, columns, check, batch_size)


def read_columns(path: Path, columns: Columns, *, batch_size: int = 4096, first_row: int = 0) -> Iterator[Samples]:
    """Yield the samples of Parquet or CSV files, as ``read_parquet`` and ``read_csv`` do.

    Args:
        path: the file or the folder.
        columns: which columns to read.
        batch_size: the samples of a batch.
        first_row: how many rows to leave out. In Parquet, most of them are not decoded.

    Raises:
        DataError: see ``read_parquet``; or the file is of another format.
    """
    if has_csv(path):
        yield from _without(first_row, read_csv(files_of(path, CSV_SUFFIXES), columns, batch_size=batch_size))
        return
    for file in files_of(path, PARQUET_SUFFIXES):
        rows = parquet_rows(file) if first_row else 0
        if not first_row or first_row < rows:
            yield from _read_parquet_file(file, columns, checked, batch_size, first_row)
        first_row = max(first_row - rows, 0)


def _without(rows: int, parts: Iterator[Part]) -> Iterator[Part]:
    """Leave out the first rows of a stream of samples or of pyarrow's record batches."""
    for part in parts:
        if rows < len(part):
            yield part[rows:] if rows else part
        rows = max(rows - len(part), 0)


def read_hugectr_parquet(
    path: str | Path,
    *,
    slot_sizes: Sequence[int] | None = None,
    losses: Sequence[Loss] | None = None,
    batch_size: int = 4096,
) -> Iterator[Samples]:
    """Yield the samples of HugeCTR's Parquet data. See ``read_parquet``.

    Args:
        path: a file list, or one of its files. ``_metadata.json`` is in the folder of the files.
        slot_sizes: as for ``read_parquet``.
        losses: as for ``read_parquet``.
        batch_size: as for ``read_parquet``.

    Raises:
        ConfigError: ``_metadata.json`` is missing or wrong.
        DataError: as for ``read_parquet``; or a file has another number of rows than ``_metadata.json`` says.
    """
    for file in read_file_list(Path(path)):
        columns, rows = _read_metadata(file.parent / METADATA)
        found = parquet_rows(file)
        if found != rows.get(file.name, found):
            raise DataError(file, f"{found:,} rows, but {METADATA} says {rows[file.name]:,}")
        check = partial(checked, slot_sizes=slot_sizes, losses=losses)
        yield from _read_parquet_file(file, columns, check, batch_size)


def hugectr_columns(path: str | Path) -> ColumnMap:
    """Return the columns of HugeCTR's Parquet data. Raise ConfigError as ``read_hugectr_parquet`` does."""
    columns, _ = _read_metadata(read_file_list(Path(path))[0].parent / METADATA)
    return columns


def column_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield pyarrow's record batches of Parquet or CSV files. The columns of CSV are texts.

    Args:
        path: the file or the folder.
        columns: which columns to read; None: all.

    Raises:
        DataError: a file is missing or damaged, is of another format, or has no such column.
        MissingExtraError: pyarrow is not installed.
    """
    pa = import_pyarrow()
    has_texts = has_csv(path)
    for file in files_of(path, CSV_SUFFIXES if has_texts else PARQUET_SUFFIXES):
        names = _header(pa, file) if has_texts else _opened_parquet(file).schema_arrow.names
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(file, "occurs twice", column=twice[0])
        if absent := [name for name in columns or () if name not in names]:
            raise DataError(file, missing_from(names, absent[0]), column=absent[0])
        columns = chosen = names if columns is None else list(columns)  # the first file decides for all
        yield from _text_batches(pa, file, names, chosen) if has_texts else _parquet_batches(pa, file, chosen)


def _header(pa: Any, path: Path) -> list[str]:
    """Return the columns of a CSV file."""
    _check_regular(path)
    try:
        names: list[str] = header_of(pa, path)
    except (pa.ArrowException, OSError) as err:
        raise _damaged(path, err) from err
    _check_separator(path, names)
    return names


def _text_batches(pa: Any, path: Path, names: Sequence[str], columns: Sequence[str]) -> Iterator[Any]:
    """Yield record batches of some columns of a CSV file, as texts."""
    texts = dict.fromkeys(names, pa.string())
    damaged = partial(_damaged_csv, pa, texts)
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    convert = pa.csv.ConvertOptions(column_types=texts)
    form = pa.dataset.CsvFileFormat(parse_options=parse, convert_options=convert)
    try:
        batches = pa.dataset.dataset(str(path), format=form).to_batches(columns=columns, batch_size=_READ_ROWS)
    except (pa.ArrowException, OSError) as err:
        raise damaged(path, err) from err
    yield from _checked(pa, path, iter(batches), damaged)


def has_csv(path: Path) -> bool:
    """Return whether the files are CSV, not Parquet. Raise DataError for other files."""
    if path.is_dir():
        found = list_data_files(path, (*PARQUET_SUFFIXES, *CSV_SUFFIXES))
        if not found.files:
            raise DataError(
                path, f"the folder has no Parquet or CSV files, and files in its subfolders are not read; {found}"
            )
        return not list_data_files(path, PARQUET_SUFFIXES).files
    if path.suffix in PARQUET_SUFFIXES:
        return False
    if not path.name.endswith(CSV_SUFFIXES):
        raise DataError(path, f"expected a Parquet or CSV file, or a folder of them{conversion_advice(path)}")
    return True


def parquet_rows(path: Path) -> int:
    """Return the number of rows of a file. Raise DataError if it is missing or damaged."""
    with _opened_parquet(path) as file:
        return int(file.metadata.num_rows)


def write_parquet_files(folder: Path, parts: Iterable[Samples]) -> list[Path]:
    """Write a Parquet file per part, and ``_metadata.json``. Return the files.

    The columns are ``label0``, ..., ``I1``, ... and ``C1``, .... A slot with one key in every sample of a part is a
    column of int64, every other slot one of lists.

    Args:
        folder: must exist.
        parts: at least one.

    Raises:
        OSError: the disk refuses.
        MissingExtraError: pyarrow is not installed.
    """
    pa = import_pyarrow()
    rows, columns = {}, ColumnMap((), (), ())
    for number, samples in enumerate(parts):
        columns = ColumnMap(
            tuple(f"label{index}" for index in range(samples.labels.shape[1])),
            tuple(f"I{index + 1}" for index in range(samples.dense.shape[1])),
            tuple(f"C{index + 1}" for index in range(samples.bags.slots)),
        )
        arrays = [pa.array(column) for column in (*samples.labels.T, *samples.dense.T)]
        for bags in samples.bags.split([1] * samples.bags.slots):
            has_one = (bags.sizes == 1).all()
            offsets = bags.row_ptrs.astype(np.int32)
            arrays.append(pa.array(bags.keys) if has_one else pa.ListArray.from_arrays(offsets, bags.keys))
        with atomic_write(folder / f"{number}.parquet") as output:
            pa.parquet.write_table(pa.table(arrays, names=columns.names), output)
        rows[f"{number}.parquet"] = len(samples)
    _write_metadata(folder / METADATA, columns, rows)
    return [folder / name for name in rows]


def import_pyarrow() -> Any:
    """Return the module, or raise MissingExtraError if it is not installed."""
    try:
        for module in ("compute", "csv", "dataset", "parquet"):
            import_module(f"pyarrow.{module}")
    except ImportError as err:
        raise MissingExtraError("pyarrow", "parquet", "reading Parquet and CSV files") from err
    return import_module("pyarrow")


def files_of(path: str | Path | Sequence[Path], suffixes: Sequence[str]) -> Sequence[Path]:
    """Return the data files that ``path`` means, and log which files of a folder are left out.

    Raises:
        DataError: a folder cannot be read, or has no data file.
    """
    if not isinstance(path, str | Path):
        return path
    path = Path(path)
    if not path.is_dir():
        return [path]
    try:
        found = list_data_files(path, suffixes)
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err
    if not found.files:
        raise DataError(path, f"the folder has no files *{suffixes[0]}; {found}")
    if found.left_out:
        _log.warning("%s: %s", path, found)
    return found.files


def _read_metadata(path: Path) -> tuple[ColumnMap, dict[str, int]]:
    """Return the columns, and the number of rows of each file."""
    fields = Fields(read_json(path), str(path), "")
    kinds = [kind for kind in ("labels", "conts", "cats") if kind != "conts" or fields.value(kind, [])]
    names = {kind: tuple(entry.text("col_name") for entry in fields.objects(kind)) for kind in kinds}
    rows = {entry.text("file_name"): entry.count("num_rows") for entry in fields.objects("file_stats")}
    return ColumnMap(names["labels"], names.get("conts", ()), names["cats"]), rows


def _write_metadata(path: Path, columns: ColumnMap, rows: dict[str, int]) -> None:
    kinds = {"labels": columns.labels, "conts": columns.dense, "cats": columns.slots}
    index = {name: number for number, name in enumerate(columns.names)}
    document: dict[str, Any] = {
        kind: [{"col_name": name, "index": index[name]} for name in names] for kind, names in kinds.items()
    }
    document["file_stats"] = [{"file_name": name, "num_rows": number} for name, number in rows.items()]
    with atomic_write(path) as output:
        output.write(json.dumps(document, indent=2).encode() + b"\n")


def _check_regular(path: Path) -> None:
    try:
        check_regular(path)
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err


def _opened_parquet(path: Path) -> Any:
    pa = import_pyarrow()
    _check_regular(path)
    try:
        return pa.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as err:
        raise _damaged_parquet(path, err) from err


def _read_parquet_file(
    path: Path, columns: Columns, check: Check, batch_size: int, first_row: int = 0
) -> Iterator[Samples]:
    pa = import_pyarrow()
    with _opened_parquet(path) as file:
        _check_names(path, columns, file.schema_arrow.names)
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    first_group, left_out = 0, first_row
    while left_out and left_out >= rows[first_group]:
        left_out -= rows[first_group]
        first_group += 1
    batches = _parquet_batches(pa, path, _distinct(columns), first_group)
    convert = _Converter(pa, path, columns, check, first_row)
    yield from _cut(map(convert, _without(left_out, batches)), batch_size)


def _parquet_batches(pa: Any, path: Path, columns: Sequence[str], first_group: int = 0) -> Iterator[Any]:
    """Yield record batches, and decode the next ones in threads.

    Each scan is one of few row groups, because a scan decodes up to a gigabyte ahead.
    """
    options = pa.dataset.ParquetFragmentScanOptions(
        pre_buffer=False,  # it would keep the content of the file in memory
        page_checksum_verification=True,  # where pages have checksums
    )
    form = pa.dataset.ParquetFileFormat(default_fragment_scan_options=options)
    fragment = next(pa.dataset.dataset(str(path), format=form).get_fragments())

    def scans() -> Iterator[Sequence[int]]:
        some, rows = [], 0
        for group in fragment.row_groups[first_group:]:
            some.append(group.id)
            rows += group.num_rows
            if rows >= _READ_ROWS:
                yield some
                some, rows = [], 0
        yield some

    views = {
        pa.string_view(): pa.large_string(),
        pa.binary_view(): pa.large_binary(),
    }  # Arrow computes little for views

    def batches() -> Iterator[Any]:
        for groups in scans():
            part = fragment.subset(row_group_ids=groups)
            for batch in part.to_batches(columns=columns, batch_size=_READ_ROWS, batch_readahead=_READ_AHEAD):
                fields = [field.with_type(views.get(field.type, field.type)) for field in batch.schema]
                yield batch.cast(pa.schema(fields)) if pa.schema(fields) != batch.schema else batch

    return _checked(pa, path, read_ahead(batches()), _damaged_parquet)


def _read_csv_file(path: Path, columns: Columns, check: Check, batch_size: int) -> Iterator[Samples]:
    pa = import_pyarrow()
    types = dict.fromkeys(columns.names, pa.string())  # labels may be true or false
    if isinstance(columns, ColumnMap):
        types |= dict.fromkeys(columns.dense, pa.float32()) | dict.fromkeys(columns.slots, pa.int64())
    read = pa.csv.ReadOptions(block_size=_READ_BYTES)
    parse = pa.csv.ParseOptions(newlines_in_values=True)  # otherwise pyarrow may cut a field at the end of a block
    options = pa.csv.ConvertOptions(column_types=types, null_values=NULLS, include_columns=_distinct(columns))
    mark = secrets.randbits(62)

    damaged = partial(_damaged_csv, pa, types)
    try:
        names = _header(pa, path)
        _check_names(path, columns, names)
        last_line = ",".join(str(mark) if name in types else "" for name in names)
        with pa.input_stream(str(path), compression="detect") as stream:
            convert, is_whole = _Converter(pa, path, columns, check), False
            with closing(_csv_batches(pa, stream, f"\n{last_line}\n".encode(), read, parse, options)) as batches:
                for batch in _checked(pa, path, batches, damaged):
                    rows = batch.num_rows
                    is_whole = bool(rows) and str(batch.column(columns.names[-1])[rows - 1].as_py()) == str(mark)
                    yield from _cut(iter([convert(batch.slice(0, rows - is_whole))]), batch_size)
        if not is_whole:
            raise first_fault(pa, path, types) or DataError(path, OPEN_QUOTE)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise damaged(path, err) from err
    except DataError as err:
        raise (err if err.line or not err.column else with_line(pa, err)) from err.__cause__


def _csv_batches(pa: Any, stream: Any, last_line: bytes, *options: Any) -> Generator[Any, None, None]:
    """Yield the record batches of a stream and of one more line. At the end, no thread of pyarrow has the stream."""
    content = EndedStream(stream, last_line)
    buffered = reader = None
    released, faults = content.released, content.faults
    try:
        # The buffered stream copies what it reads. Threads of pyarrow would hold Python's bytes even longer.
        buffered = pa.BufferedInputStream(pa.PythonFile(content, "r"), _BUFFER_BYTES)
        reader = pa.csv.open_csv(buffered, *options)
        yield from reader
    except pa.ArrowException:
        if not faults:
            raise
    finally:
        del content, buffered, reader
        released.wait()
    if faults:
        raise faults[0]


def _distinct(columns: Columns) -> list[str]:
    return list(dict.fromkeys(columns.names))


def _damaged(path: Path, err: Exception) -> DataError:
    if isinstance(err, OSError) and err.errno:
        return DataError(path, os.strerror(err.errno).lower())
    return DataError(path, str(err).strip().splitlines()[0])


def _damaged_csv(pa: Any, types: Mapping[str, Any], path: Path, err: Exception) -> DataError:
    try:
        return first_fault(pa, path, types) or _damaged(path, err)
    except OSError:  # such as a compressed file that is cut short
        return _damaged(path, err)


def _damaged_parquet(path: Path, err: Exception) -> DataError:
    if isinstance(err, NotImplementedError) or (isinstance(err, OSError) and err.errno):  # a codec, or no file
        return _damaged(path, err)
    return DataError(path, wrong_kind(path, "a Parquet file", (_PARQUET,)))


def _check_names(path: Path, columns: Columns, found: list[str]) -> None:
    counts = Counter(found)
    for name in columns.names:
        if counts[name] != 1:
            hint = ""
            if isinstance(columns, ColumnMap) and name in columns.labels:
                hint = ". To train on raw columns, name the label: --label COLUMN"
            elif isinstance(columns, RawColumns) and columns.has_without:
                hint = f". If no output depends on it: hotrow predict --without {name}"
            reason = "occurs twice" if counts[name] else f"{missing_from(found, name)}{hint}"
            raise DataError(path, reason, column=name)


def missing_from(found: Sequence[str], name: str) -> str:
    """Say that the column ``name`` is missing from those of a file."""
    close = nearest(name, found)
    advice = f"; did you mean {close[0]}?" if close else ""
    if all(one.replace(".", "", 1).isdecimal() for one in found):
        advice += ". If these are values, write the names of the columns above them"
    return f"missing; the file has {', '.join(found)}{advice}"


def _check_separator(path: Path, names: Sequence[str]) -> None:
    """Refuse the names of a header without a comma and with another separator."""
    if len(names) == 1 and (advice := separator_advice(path)):
        raise DataError(path, f"expected columns that are separated by commas, found one column{advice}")


def _checked(
    pa: Any, path: Path, batches: Iterator[Any], fault: Callable[[Path, Exception], DataError]
) -> Iterator[Any]:
    """Yield record batches, and raise DataError for what pyarrow raises."""
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as err:
            raise fault(path, err) from err
        if batch is None:
            return
        yield batch


def _cut(parts: Iterator[Samples], batch_size: int) -> Iterator[Samples]:
    """Cut samples into batches."""
    for samples in parts:
        for first in range(0, len(samples), batch_size):
            yield samples[first : first + batch_size]


class _Converter:
    """Makes samples of a file's record batches, one after another."""

    def __init__(self, pa: Any, path: Path, columns: Columns, check: Check, first_row: int = 0) -> None:
        self._pa = pa
        self._path = path
        self._columns = columns
        self._check = check
        self._first_row = first_row

    def __call__(self, batch: Any) -> Samples:
        labels = self._numbers(batch, self._columns.labels)
        if isinstance(self._columns, ColumnMap):
            samples = Samples(labels, self._numbers(batch, self._columns.dense), self._bags(batch))
        else:
            samples = self._raw(self._columns, labels, batch)
        if self._columns.weight is not None:
            samples = replace(samples, weights=self._numbers(batch, [self._columns.weight])[:, 0])
        first, self._first_row = self._first_row, self._first_row + len(samples)
        names = self._columns if isinstance(self._columns, ColumnMap) else self._columns.columns
        return self._check(samples, self._path, first, columns=names)

    def _raw(self, features: RawColumns, labels: NDArray[np.float32], batch: Any) -> Samples:
        try:
            return features.samples(labels, {name: batch.column(name) for name in features.features})
        except FeatureValueError as err:
            record = None if err.sample is None else self._first_row + err.sample
            raise DataError(self._path, err.reason, column=err.feature, record=record) from err

    def _column(self, batch: Any, name: str) -> Any:
        """Return a column in its plain type: values that are written once, in a dictionary, are put in their rows.

        A column without any value has no type in its file. Its nulls get the type int64.
        """
        column = batch.column(name)
        is_list = is_list_type(self._pa, column.type)
        stored = column.type.value_type if is_list else column.type
        plain = self._pa.int64() if self._pa.types.is_null(stored) else stored
        if self._pa.types.is_dictionary(stored):
            plain = stored.value_type
        if plain == stored:
            return column
        return column.cast(self._pa.large_list(plain) if is_list else plain)

    def _numbers(self, batch: Any, names: Sequence[str]) -> NDArray[np.float32]:
        types = self._pa.types
        columns = []
        for name in names:
            values = self._column(batch, name)
            if types.is_string(values.type) or types.is_large_string(values.type):
                values = self._numbers_of_texts(name, values)
            elif types.is_decimal(values.type):
                values = values.cast(self._pa.float64())
            if not (types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)):
                raise DataError(self._path, f"expected numbers, found {values.type}", column=name)
            if values.null_count:
                row = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
                advice = f"; {NO_LABEL}" if name in self._columns.labels else ""
                reason = f"expected a number, found {NULL}{advice}"
                raise DataError(self._path, reason, column=name, record=self._first_row + row)
            columns.append(values.to_numpy(zero_copy_only=False))
        with np.errstate(over="ignore"):
            numbers = _side_by_side(columns, batch.num_rows, np.float32)
        for name, values, of_float32 in zip(names, columns, numbers.T, strict=True):
            if (is_larger := np.isinf(of_float32) & np.isfinite(values)).any():
                row = int(np.argmax(is_larger))
                reason = f"expected a number of at most {LARGEST_FLOAT32:.2g}, found {values[row]:g}"
                raise DataError(self._path, reason, column=name, record=self._first_row + row)
        return numbers

    def _numbers_of_texts(self, name: str, values: Any) -> Any:
        """Return the numbers or booleans that texts stand for."""
        pa, compute = self._pa, self._pa.compute
        is_null = compute.is_in(values, value_set=pa.array(NULLS, values.type))
        texts = compute.utf8_lower(compute.utf8_trim_whitespace(compute.if_else(is_null, None, values)))
        for word, digit in (("true", "1"), ("false", "0")):
            texts = compute.if_else(compute.equal(texts, word), digit, texts)
        try:
            found = texts.cast(pa.float32())
            is_finite = compute.all(compute.is_finite(found)).as_py()
            return found if is_finite is not False else texts.cast(pa.float64())  # a number may be too large
        except pa.ArrowInvalid:
            pass
        for row, text in enumerate(texts.to_pylist()):
            try:
                pa.scalar(text).cast(pa.float32())
            except pa.ArrowInvalid:
                reason = f"expected a number, found {values[row].as_py()!r}"
                raise DataError(self._path, reason, column=name, record=self._first_row + row) from None
        raise AssertionError("a cast fails if the cast of a value fails")

    def _bags(self, batch: Any) -> Bags:
        columns = [self._column(batch, name) for name in self._columns.slots]
        if all(self._pa.types.is_integer(column.type) and not column.null_count for column in columns):
            of_slots = [self._keys(slot, column) for slot, column in enumerate(columns)]
            return Bags.one_key_each(_side_by_side(of_slots, batch.num_rows, np.int64))
        return Bags.side_by_side([self._slot(slot, column) for slot, column in enumerate(columns)])

    def _slot(self, slot: int, column: Any) -> Bags:
        pa = self._pa
        if is_list_type(pa, column.type):
            sizes = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            values = column.flatten()
        else:
            sizes = column.is_valid().to_numpy(zero_copy_only=False)
            values = column.drop_null()
        row_ptrs = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        return Bags(self._keys(slot, values, row_ptrs), row_ptrs, 1)

    def _keys(self, slot: int, values: Any, row_ptrs: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        pa, name = self._pa, self._columns.slots[slot]
        if not pa.types.is_integer(values.type):
            raise DataError(self._path, f"expected integers, found {values.type}", column=name)
        try:
            if not values.null_count:
                keys: NDArray[np.int64] = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
                return keys
        except pa.ArrowInvalid:  # a uint64 of 2^63 or more
            pass
        found = values.to_pylist()
        at = next(at for at, key in enumerate(found) if key is None or key >= 2**63)
        row = at if row_ptrs is None else int(np.searchsorted(row_ptrs, at, "right")) - 1
        shown = "null" if found[at] is None else found[at]
        reason = f"expected an integer of 64 bits, found {shown}"
        raise DataError(self._path, reason, column=name, record=self._first_row + row)


def _side_by_side(columns: Sequence[NDArray[Any]], rows: int, dtype: type[Number]) -> NDArray[Number]:
    """Return columns [B] as numbers [B, C]. Some rows at a time, because whole columns would not stay in the caches."""
    numbers = np.empty((rows, len(columns)), dtype)
    for first in range(0, rows, _CACHED_ROWS):
        some = slice(first, first + _CACHED_ROWS)
        for number, column in enumerate(columns):
            numbers[some, number] = column[some]
    return numbers
