"""``hotrow predict --data``: score files offline with a local model, or compute vectors.

A pool of threads predicts while the main thread reads the data and writes the predictions. The predictions wait in a
``PartialOutput``. When all rows are predicted, they become the output, next to the columns that the user keeps.
"""

import argparse
import json
import logging
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.partial_output import COLUMNS, MARK, PartialOutput, open_partial_output
from kernels.system_cores import usable_cores
from serving.errors import ConfigError, OutputError, RequestError, did_you_mean
from serving.model.atomic import atomic_write, remove_killed_writes
from serving.model.names import ANSWER
from serving.model.records import Output, default_outputs, numbered
from serving.opening import load_model
from serving.outputs import named_outputs
from serving.reading import read_batch
from serving.session import InferenceSession
from training.data.checks import ColumnMap
from training.data.columns import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    Columns,
    column_batches,
    files_of,
    has_csv,
    import_pyarrow,
    parquet_rows,
    read_columns,
)
from training.data.raw_columns import RawColumns
from training.errors import DataError
from training.samples import Samples

_log = logging.getLogger("hotrow.predict")
_ROWS_AT_ONCE = 65_536  # are read, and are appended to the partial output
_MOST_SAMPLES = 4096  # of one call


def score(options: argparse.Namespace) -> int:
    """Write the predictions of each row to a Parquet file, in order, and return the number of rows.

    Raises:
        HotrowError: the model, the data or the output cannot be used. The output is unchanged.
    """
    pa = import_pyarrow()
    output, data, keep = options.output, options.data, options.keep
    partial_path = output.with_name(f"{output.name}.partial")
    _check_output(pa, output, data, may_overwrite=options.overwrite)
    remove_killed_writes(output.parent, f"{re.escape(output.name)}(\\.partial)?")
    with load_model(options.model) as session:
        if not isinstance(session, InferenceSession):
            raise RequestError(f"model {options.model!r} has no dense network, so it makes no predictions")
        wanted = named_outputs(session.outputs, options.outputs or ()) or default_outputs(session.outputs)
        columns = _columns(session, wanted, options.without)
        schema = pa.schema([field for output in wanted for field in _fields(pa, session, output)])
        kept = _KeptColumns(pa, data, keep, schema.names)
        files = files_of(data, CSV_SUFFIXES if has_csv(data) else PARQUET_SUFFIXES)
        origin = {
            "the model": f"{session.config.summary} {session.config.digest}",
            "the data": _stamp(files),
            "the options": f"{schema} {sorted(options.without)}",
        }
        try:
            with open_partial_output(partial_path, schema, origin) as partial:
                answers = _answers(session, _samples(data, columns, partial.rows), tuple(wanted), partial.rows)
                _append(partial, answers, data, files)
                with atomic_write(output) as file:
                    _write(pa, file, partial, kept, schema, session.config.summary)
                    if _stamp(files) != origin["the data"]:
                        raise DataError(data, f"changed while it was read; delete {partial_path} to begin again")
                return partial.rows
        except OSError as err:
            raise OutputError(f"{output}: cannot be written: {(err.strerror or str(err)).lower()}") from err


def _check_output(pa: Any, output: Path, data: Path, *, may_overwrite: bool) -> None:
    """Refuse an output that is part of the data or that another program wrote."""
    if output.suffix != ".parquet":
        raise OutputError(f"{output}: expected a file that ends in .parquet")
    if not output.parent.is_dir():
        raise OutputError(f"{output.parent}: no such folder")
    if output.resolve() == data.resolve() or output.resolve().parent == data.resolve():
        raise OutputError(f"{output}: is part of the data; name another file")
    if output.is_dir():
        raise OutputError(f"{output}: is a folder; name a file")
    if not output.exists():
        return
    try:
        schema = pa.parquet.read_schema(output)
        known = schema.metadata or {}
        columns = json.dumps(schema.names).encode()  # to which other programs may have added some
        is_ours = MARK in known and known.get(COLUMNS, columns) == columns
    except (pa.ArrowException, OSError):
        is_ours = False
    if not is_ours and not may_overwrite:
        raise OutputError(f"{output}: exists, and `hotrow predict` did not write it; --overwrite replaces it")


def _columns(session: InferenceSession, wanted: Sequence[Output], without: Sequence[str]) -> Columns:
    """Return the columns that a model reads: raw features, or keys and numbers by the names of the graph's inputs.

    Raises:
        ConfigError: the model has no input of a name in ``without``, or the outputs depend on it.
    """
    features = session.features_of(wanted)
    known = () if features is None else features.names
    if unknown := [name for name in without if name not in known]:
        reason = f"the model has no feature or named input {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        raise ConfigError("--without", "", reason)
    if features is not None:
        required = session.required_keys.names(wanted)
        for feature in features.definition.features:
            is_required = feature.weighs is None if feature.kind == "dense" else feature.name in required
            if is_required and feature.name in without and feature.missing is None:
                outputs = ", ".join(repr(output.name) for output in wanted)
                reason = f"{feature.name!r} cannot be left out, because {outputs} depends on it"
                raise ConfigError("--without", "", f"{reason}; choose others with --outputs")
        return RawColumns(features, without=without)
    return ColumnMap((), session.graph.dense_columns, session.graph.slot_columns)


def _fields(pa: Any, session: InferenceSession, output: Output) -> list[Any]:
    """Return the Arrow fields of an output: one list of a vector, or a number for each column.

    The numbers are called ``prediction``, or ``prediction_<label>`` for each of several labels.
    """
    if output.kind == "vector":
        return [pa.field(output.name, pa.list_(pa.float32(), output.width))]
    labels = session.graph.label_names
    if output.name != ANSWER:
        names = numbered(f"prediction_{output.name}", output.width)
    elif len(labels) > 1:
        names = tuple(f"prediction_{label}" for label in labels)
    else:
        names = numbered("prediction", output.width)
    return [pa.field(name, pa.float32()) for name in names]


def _stamp(files: Sequence[Path]) -> str:
    """Return the names, sizes and times of files, which tell whether a file has changed."""
    try:
        found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as err:
        raise DataError(err.filename, (err.strerror or str(err)).lower()) from err
    return json.dumps(found)


def _samples(data: Path, columns: Columns, first_row: int) -> Iterator[Samples]:
    return read_columns(data, columns, batch_size=_ROWS_AT_ONCE, first_row=first_row)


def _append(partial: PartialOutput, answers: Iterator[Any], data: Path, files: Sequence[Path]) -> None:
    """Append answers, with a progress bar on a terminal."""
    from tqdm import tqdm  # slow to import

    if partial.rows:
        _log.warning("%s has %s predictions; only the others are computed", partial.path, f"{partial.rows:,}")
    total = None if has_csv(data) else sum(map(parquet_rows, files))
    waiting: list[Any] = []
    with tqdm(total=total, initial=partial.rows, unit=" rows", desc=data.name, disable=None) as bar:
        for answer in answers:
            waiting.append(answer)
            bar.update(len(answer))
            if sum(map(len, waiting)) >= _ROWS_AT_ONCE:
                partial.append(np.concatenate(waiting))
                waiting = []
        if waiting:
            partial.append(np.concatenate(waiting))


def _answers(
    session: InferenceSession, parts: Iterator[Samples], wanted: tuple[Output, ...], first_row: int
) -> Iterator[Any]:
    """Yield the columns of the wanted outputs, float32[B, L] of a few samples at a time, in order.

    Threads predict while the next samples are read.
    """
    size = min(session.config.max_batchsize, _MOST_SAMPLES)
    threads = usable_cores()
    most_waiting = max(2 * threads, _ROWS_AT_ONCE // size)
    waiting: deque[Future[Any]] = deque()

    def predict(samples: Samples, row: int) -> Any:
        try:
            batch = read_batch(session.config, samples.dense, samples.bags.keys, samples.bags.row_ptrs)
            values = session.predict_batch(replace(batch, wanted=wanted)).values
        except RequestError as err:
            raise RequestError(f"rows {row:,} to {row + len(samples) - 1:,}: {err}") from err
        return np.concatenate([values[:, output.columns] for output in wanted], axis=1)

    pool = ThreadPoolExecutor(threads, "hotrow-predict")
    try:
        for part in parts:
            for begin in range(0, len(part), size):
                waiting.append(pool.submit(predict, part[begin : begin + size], first_row + begin))
                while len(waiting) > most_waiting or (waiting and waiting[0].done()):
                    yield waiting.popleft().result()
            first_row += len(part)
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _KeptColumns:
    """Columns of the data that the output has, too."""

    def __init__(self, pa: Any, data: Path, names: Sequence[str], others: Sequence[str]) -> None:
        """Read their types.

        Args:
            pa: pyarrow.
            data: the files.
            names: of the columns.
            others: the names of the other columns of the output.

        Raises:
            DataError: the data has no such column, or the name is that of another column of the output.
        """
        if twice := [name for name, count in Counter([*names, *others]).items() if count > 1]:
            raise DataError("--keep", f"the output would have two columns {twice[0]!r}")
        self._pa, self._data = pa, data
        self._batches = column_batches(data, names) if names else iter(())
        self._rest = next(self._batches, None)
        self.schema = pa.schema([]) if self._rest is None else self._rest.schema.remove_metadata()

    def take(self, rows: int) -> Sequence[Any]:
        """Return the next rows of each column.

        Raises:
            DataError: a file is damaged, or a column has different types in different files.
        """
        parts = []
        while self.schema.names and rows:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise DataError(self._data, "changed while it was read")
            parts.append(self._typed(batch.slice(0, rows)))
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            rows -= parts[-1].num_rows
        return list(self._pa.Table.from_batches(parts, self.schema).columns)

    def _typed(self, batch: Any) -> Any:
        try:
            arrays = [array.cast(field.type) for array, field in zip(batch.columns, self.schema, strict=True)]
        except self._pa.ArrowException as err:
            raise DataError(self._data, f"a column of --keep has different types: {str(err).splitlines()[0]}") from err
        return self._pa.record_batch(arrays, schema=self.schema)


def _write(pa: Any, file: Any, partial: PartialOutput, kept: _KeptColumns, schema: Any, made_by: str) -> None:
    """Write the kept columns and the predictions as one Parquet file."""
    fields = [*kept.schema, *schema]
    columns = json.dumps([field.name for field in fields])
    whole = pa.schema(fields, {MARK: made_by.encode(), COLUMNS: columns.encode()})
    with pa.parquet.ParquetWriter(file, whole, use_dictionary=kept.schema.names) as writer:
        for batch in partial.batches():
            writer.write_table(pa.table([*kept.take(batch.num_rows), *batch.columns], schema=whole))
