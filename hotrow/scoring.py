"""``hotrow predict --data``: score a file offline with a local model."""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import OutputError, RequestError
from serving.model.atomic import atomic_write, remove_killed_writes
from serving.model.records import numbered
from serving.opening import load_model
from serving.session import InferenceSession
from training.data.checks import ColumnMap
from training.data.columns import (
    PARQUET_SUFFIXES,
    Columns,
    files_of,
    has_csv,
    import_pyarrow,
    parquet_rows,
    read_columns,
)
from training.data.raw_columns import RawColumns
from training.samples import Samples

_ROW_GROUP = 65_536
_MOST_SAMPLES = 4096  # of one call
_MARK = b"hotrow.predictions"  # in the metadata of files that this module wrote


def score(options: argparse.Namespace) -> int:
    """Write one prediction per row to a Parquet file, in order, and return the number of rows.

    Raises:
        HotrowError: the model, the data or the output cannot be used. The output is unchanged.
    """
    pa = import_pyarrow()
    _check_output(pa, options.output, options.data, may_overwrite=options.overwrite)
    remove_killed_writes(options.output.parent, re.escape(options.output.name))
    with load_model(options.model) as session:
        if not isinstance(session, InferenceSession):
            raise RequestError(f"model {options.model!r} has no dense network, so it makes no predictions")
        batch_size = min(session.config.max_batchsize, _MOST_SAMPLES)
        samples = read_columns(options.data, _columns(session), batch_size=batch_size)
        names = _names(session)
        schema = pa.schema([(name, pa.float32()) for name in names], {_MARK: session.config.summary.encode()})
        try:
            with atomic_write(options.output) as file, pa.parquet.ParquetWriter(file, schema) as writer:
                rows = 0
                for part in _parts(_predicted(session, samples, options.data)):
                    writer.write_table(pa.table(list(part.T), schema=schema))
                    rows += len(part)
        except OSError as err:
            raise OutputError(f"{options.output}: cannot be written: {(err.strerror or str(err)).lower()}") from err
    return rows


def _check_output(pa: Any, output: Path, data: Path, *, may_overwrite: bool) -> None:
    """Refuse an output that is part of the data or that another program wrote."""
    if output.suffix != ".parquet":
        raise OutputError(f"{output}: expected a file that ends in .parquet")
    if not output.parent.is_dir():
        raise OutputError(f"{output.parent}: no such folder")
    if output.resolve() == data.resolve() or output.resolve().parent == data.resolve():
        raise OutputError(f"{output}: is part of the data; name another file")
    if not output.exists():
        return
    try:
        is_ours = _MARK in (pa.parquet.read_schema(output).metadata or {})
    except (pa.ArrowException, OSError):
        is_ours = False
    if not is_ours and not may_overwrite:
        raise OutputError(f"{output}: exists, and `hotrow predict` did not write it; --overwrite replaces it")


def _columns(session: InferenceSession) -> Columns:
    """Return the columns that a model reads: raw features, or keys and numbers by the names of the graph's inputs."""
    if session.features is not None:
        return RawColumns(session.features)
    return ColumnMap((), session.graph.dense_columns, session.graph.slot_columns)


def _names(session: InferenceSession) -> Sequence[str]:
    """Return the columns of the output: ``prediction``, or ``prediction_<label>`` for each of several labels."""
    labels = session.graph.label_names
    if len(labels) > 1:
        return [f"prediction_{label}" for label in labels]
    return numbered("prediction", session.graph.label_dim)


def _predicted(session: InferenceSession, samples: Iterator[Samples], path: Path) -> Iterator[Any]:
    """Yield float32[B, L], with a progress bar on a terminal."""
    from tqdm import tqdm  # slow to import

    files: Sequence[Path] = () if has_csv(path) else files_of(path, PARQUET_SUFFIXES)
    total = sum(map(parquet_rows, files)) or None
    with tqdm(total=total, unit=" rows", desc=path.name, disable=None) as bar:
        for part in samples:
            keys, row_ptrs = part.bags.keys, part.bags.row_ptrs.astype(np.int32)
            yield session.predict(part.dense, keys, row_ptrs)
            bar.update(len(part))


def _parts(answers: Iterator[Any]) -> Iterator[Any]:
    """Join answers into parts of the size of a row group."""
    waiting: list[Any] = []
    rows = 0
    for answer in answers:
        waiting.append(answer)
        rows += len(answer)
        if rows >= _ROW_GROUP:
            yield np.concatenate(waiting)
            waiting, rows = [], 0
    if waiting:
        yield np.concatenate(waiting)
