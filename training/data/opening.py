"""Open a file of training data, whatever its format is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from numpy.typing import DTypeLike
from tqdm import tqdm

from serving.errors import ConfigError
from serving.model.data_files import list_data_files
from serving.model.records import numbered
from serving.model.strict_json import Fields, read_json
from training.data.checks import ColumnMap
from training.data.columns import (
    CSV_SUFFIXES,
    METADATA,
    PARQUET_SUFFIXES,
    files_of,
    has_csv,
    hugectr_columns,
    read_csv,
    read_hugectr_parquet,
    read_parquet,
)
from training.data.criteo_reader import CRITEO_COLUMNS, is_criteo, read_criteo_blocks
from training.data.file_list import read_file_list
from training.data.norm import is_norm, read_norm
from training.data.npz import read_npz
from training.data.raw import read_raw
from training.data.source import FileSource
from training.errors import DataError
from training.features import FeatureFile
from training.model.document import TrainingDocument
from training.model.losses import Loss
from training.model.sample_check import check_samples_fit
from training.samples import ContentSum, Samples


def open_data(
    path: Path,
    document: TrainingDocument,
    *,
    key_dtype: str = "int64",
    columns: Path | None = None,
    features: FeatureFile | None = None,
    weight: str | None = None,
    window_rows: int = 1_000_000,
    progress: bool = False,
) -> Samples | FileSource:
    """Read a file once and check every sample.

    Args:
        path: Norm files or a list of them, Raw files if the document says so, Parquet or CSV files or a folder of them,
            HugeCTR's Parquet data, Criteo's files, or ``.npz``.
        document: what reads the samples.
        key_dtype: of the keys of Norm files, uint32 or int64.
        columns: a JSON file with the columns of Parquet and CSV files, see ``read_column_map``; None: their names are
            those of ``default_columns``.
        features: reads raw features from Parquet and CSV files; None: the files have keys.
        weight: the column of the weights of the samples in Parquet and CSV files with keys; None: all count the same.
        window_rows: the samples are kept in memory if there are at most as many.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        the samples, or a source that reads the file again.

    Raises:
        DataError: the file is missing, damaged or empty, or a value is wrong.
        ConfigError: the samples do not fit the document, or ``columns`` cannot be used.
        MissingExtraError: the format needs a package that is not installed.
    """
    read = (
        _feature_reader(path, features, document.losses)
        if features
        else _reader(path, document, key_dtype, columns, weight)
    )
    rows, kept, content = 0, [], ContentSum()
    with tqdm(unit=" rows", desc=path.name, disable=None if progress else True) as bar:
        for part in read():
            check_samples_fit(document.graph, part, rows)
            rows += len(part)
            content.add(part)
            bar.update(len(part))
            if rows <= window_rows:
                kept.append(part)
            else:
                kept.clear()
    if not rows:
        raise DataError(path, "no samples")
    return Samples.joined(kept) if rows <= window_rows else FileSource(read, rows, str(content))


def read_hugectr(
    path: str | Path, document: TrainingDocument, key_dtype: DTypeLike, batch_size: int = 4096
) -> Iterator[Samples]:
    """Yield the samples of files in the document's format: Norm, Raw or Parquet.

    Args:
        path: the file, or the file list.
        document: its Data layer says what the files look like.
        key_dtype: of the keys of Norm files, uint32 or int64.
        batch_size: the samples of a batch. The last batch of a file may be smaller.

    Raises:
        DataError: a file is missing, cut short or damaged. The message names the file and the record.
    """
    graph, data, losses = document.graph, document.data, document.losses
    if data.format == "Norm":
        return read_norm(path, key_dtype, batch_size, losses)
    if data.format == "Parquet":
        return read_hugectr_parquet(path, slot_sizes=data.slot_sizes, losses=losses, batch_size=batch_size)
    return read_raw(
        path,
        graph.label_dim,
        graph.dense_dim,
        sum(entry.slots for entry in graph.sparse),
        slot_sizes=data.slot_sizes,
        losses=losses,
        has_floats=data.has_floats,
        batch_size=batch_size,
    )


def default_columns(document: TrainingDocument) -> ColumnMap:
    """Return the columns by the names in the graph.

    If it has none, they are those of the inputs: ``label`` if there is one, else ``label_0``, ``label_1``, ....
    """
    graph = document.graph
    labels = [numbered(label.name, len(label.weights)) for label in document.labels]
    return ColumnMap(sum(labels, ()), graph.dense_columns, graph.slot_columns)


def read_column_map(path: Path, document: TrainingDocument) -> ColumnMap:
    """Read a JSON object: for each input of the graph the names of its columns, in their order.

    Raises:
        ConfigError: an input is missing or unknown, or has another number of columns.
    """
    graph = document.graph
    labels = {label.name: len(label.weights) for label in document.labels}
    dense = {graph.dense_top: graph.dense_dim} if graph.dense_dim else {}
    slots = {entry.top: entry.slots for entry in graph.sparse}
    fields = Fields(read_json(path), str(path), "", (*labels, *dense, *slots))

    def columns(inputs: dict[str, int]) -> tuple[str, ...]:
        names: list[str] = []
        for name, count in inputs.items():
            found = fields.texts(name)
            if len(found) != count:
                raise ConfigError(str(path), name, f"expected {count} columns, got {len(found)}")
            names += found
        return tuple(names)

    return ColumnMap(columns(labels), columns(dense), columns(slots))


def _reader(
    path: Path, document: TrainingDocument, key_dtype: str, columns: Path | None, weight: str | None
) -> Callable[[], Iterator[Samples]]:
    """Return a function that reads the samples. A folder is listed once, so every epoch reads the same files."""
    _check_is_file(path)
    sizes, losses = document.data.slot_sizes, document.losses
    if weight is not None and columns is None and columns_of(path, document, None) != default_columns(document):
        raise DataError(path, f"expected a Parquet or CSV file, which has a column of weights {weight!r}")
    if path.suffix == ".npz":
        return partial(read_npz, path, document)
    if columns is None and _has_metadata(path):
        return partial(read_hugectr_parquet, path, slot_sizes=sizes, losses=losses)
    if columns is None and (document.data.format == "Raw" or is_norm(path)):
        return partial(read_hugectr, path, document, key_dtype)
    if columns is None and _is_criteo(path):
        return partial(read_criteo_blocks, path, sizes)
    column_map = default_columns(document) if columns is None else read_column_map(columns, document)
    column_map = replace(column_map, weight=weight)
    if path.suffix == ".parquet" or _has_parquet(path):
        return partial(read_parquet, files_of(path, PARQUET_SUFFIXES), column_map, slot_sizes=sizes, losses=losses)
    return partial(read_csv, files_of(path, CSV_SUFFIXES), column_map, slot_sizes=sizes, losses=losses)


def columns_of(path: Path, document: TrainingDocument, columns: Path | None) -> ColumnMap | None:
    """Return the columns of data that ``open_data`` has read; None if its format has no names."""
    if columns is not None:
        return read_column_map(columns, document)
    if _has_metadata(path):
        return hugectr_columns(path)
    if path.suffix == ".npz" or document.data.format == "Raw" or is_norm(path):
        return None
    return CRITEO_COLUMNS if _is_criteo(path) else default_columns(document)


def _is_criteo(path: Path) -> bool:
    """Return whether a file has Criteo's columns."""
    is_other = path.suffix == ".parquet" or _has_parquet(path) or path.is_dir()
    return not is_other and (".csv" not in path.suffixes or is_criteo(path))


def _feature_reader(path: Path, features: FeatureFile, losses: Sequence[Loss]) -> Callable[[], Iterator[Samples]]:
    """Return a function that reads samples of raw features."""
    _check_is_file(path)
    read, suffixes = (read_csv, CSV_SUFFIXES) if has_csv(path) else (read_parquet, PARQUET_SUFFIXES)
    return partial(read, files_of(path, suffixes), features, losses=losses)


def _check_is_file(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe would block
        raise DataError(path, "not a regular file or a folder; training reads its data more than once")


def _has_parquet(folder: Path) -> bool:
    try:
        return folder.is_dir() and bool(list_data_files(folder, PARQUET_SUFFIXES).files)
    except OSError:
        return False  # its reader says why


def _has_metadata(path: Path) -> bool:
    """Return whether these are HugeCTR's Parquet files: a file list, or one of its files."""
    if not path.is_file() or path.suffix not in (".txt", ".parquet"):
        return False
    files = read_file_list(path) if path.suffix == ".txt" and is_norm(path) else [path]
    return bool(files) and files[0].suffix == ".parquet" and (files[0].parent / METADATA).exists()
