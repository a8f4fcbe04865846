"""The rows of a table as a model reads them: raw features by name, or the keys of each slot and the dense features.

The table is one of the log, or of any file with the same columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.errors import FeatureValueError, TraceError
from serving.features import columns_of_arrays
from serving.model.names import REQUEST_ID, REQUEST_SAMPLE
from serving.model.records import Output, OutputKind, default_outputs
from serving.reading import read_batch, read_columns
from serving.request_log.records import has_keys_of, key_columns, takes_raw_features
from serving.session import InferenceSession

#: The outputs that a request asks for; see ``Batch.wanted``.
Wanted = tuple[Output, ...] | None


class Rows(ABC):
    """The rows of a table for one model.

    Attributes:
        names: the columns that the model reads and the table has.
        absent: the columns that the model reads and the table does not have.
    """

    names: Sequence[str]
    absent: Sequence[str]

    @abstractmethod
    def reader(self, first: int, count: int, wanted: Wanted = None) -> Callable[[], Batch]:
        """Return a function that reads some rows as one request, as a server does.

        Args:
            first: the first row.
            count: how many rows.
            wanted: see ``Batch.wanted``.

        Raises:
            RequestError: a value cannot be used.
        """


class RawRows(Rows):
    """Rows of raw features. A feature without a column is missing."""

    def __init__(self, session: InferenceSession, table: Any) -> None:
        """Take the columns of the model's features."""
        assert session.features is not None
        self._session, self._features = session, session.features
        self.names = [name for name in session.features.names if name in table.column_names]
        self._arrays = {name: table.column(name).combine_chunks() for name in self.names}
        self.absent = [name for name in session.features.names if name not in table.column_names]

    def columns(self, first: int, count: int) -> list[Any]:
        """Return the columns of some rows; see ``FeatureReader.columns``."""
        arrays = {name: array.slice(first, count) for name, array in self._arrays.items()}
        return columns_of_arrays(self._features, arrays, count)

    def reader(self, first: int, count: int, wanted: Wanted = None) -> Callable[[], Batch]:
        """See ``Rows.reader``."""
        columns, features = self.columns(first, count), self._session.features_of(wanted)
        assert features is not None
        return lambda: replace(read_columns(self._session.config, features, columns, count), wanted=wanted)


class KeyRows(Rows):
    """Rows of keys and dense features."""

    absent = ()

    def __init__(self, session: InferenceSession, table: Any, source: str) -> None:
        """Take the columns of the model's inputs.

        Raises:
            TraceError: a column is missing or is not of numbers or of lists of keys.
        """
        pa = import_module("pyarrow")
        self._config = session.config
        slots, dense = key_columns(session), session.graph.dense_columns
        self.names = [*dense, *slots]
        missing = [name for name in self.names if name not in table.column_names]
        if missing:
            reason = f"has no column {missing[0]!r}, which {named(session)} reads"
            raise TraceError(source, f"{reason}; it has {', '.join(table.column_names)}")
        try:
            keys = [table.column(name).cast(pa.list_(pa.int64())).combine_chunks() for name in slots]
            numbers = [table.column(name).cast(pa.float32()).to_numpy() for name in dense]
        except pa.ArrowException as err:
            raise TraceError(source, f"expected numbers and lists of keys: {str(err).splitlines()[0]}") from err
        self._slots = len(slots)
        self._dense = np.stack(numbers, axis=1) if numbers else np.empty((table.num_rows, 0), np.float32)
        by_sample = np.arange(self._slots * table.num_rows).reshape(self._slots, -1).T.reshape(-1)
        bags = pa.concat_arrays(keys).take(pa.array(by_sample))
        sizes = pa.compute.fill_null(pa.compute.list_value_length(bags), 0).to_numpy()
        self._row_ptrs = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._keys = bags.flatten().to_numpy()

    def reader(self, first: int, count: int, wanted: Wanted = None) -> Callable[[], Batch]:
        """See ``Rows.reader``."""
        row_ptrs = self._row_ptrs[first * self._slots : (first + count) * self._slots + 1]
        keys, dense = self._keys[row_ptrs[0] : row_ptrs[-1]], self._dense[first : first + count]
        return lambda: replace(read_batch(self._config, dense, keys, row_ptrs - row_ptrs[0]), wanted=wanted)


def named(session: InferenceSession) -> str:
    """Return a version's name for reports."""
    return f"{session.config.name} version {session.config.version}"


def rows_of(session: InferenceSession, table: Any, source: str) -> Rows:
    """Return the rows of a table for a model: raw features if the table has one of the model's, otherwise keys.

    Columns of keys may have the names of features, and the log has them in a folder of their own.

    Raises:
        TraceError: the table has neither.
    """
    if not takes_raw_features(session) or has_keys_of(source):
        return KeyRows(session, table, source)
    rows = RawRows(session, table)
    if rows.names:
        return rows
    try:
        return KeyRows(session, table, source)
    except TraceError:
        reason = f"has no feature of {named(session)}: {', '.join(rows.absent)}"
        raise TraceError(source, f"{reason}; it has {', '.join(table.column_names)}") from None


def labeled_columns(session: InferenceSession) -> dict[int, OutputKind]:
    """Return the columns of a model's answers that labels can be compared with, and their kinds.

    These are the columns of its labels. Of stated outputs, they are the probabilities, or the scores if there are none.
    """
    columns, config = range(session.config.label_dim), session.config
    if config.label_kinds and not config.stated_outputs:
        return dict(enumerate(config.label_kinds))
    outputs = default_outputs(session.outputs)
    kind: OutputKind = "probability" if any(output.kind == "probability" for output in outputs) else "score"
    found = [column for output in outputs if output.kind == kind for column in columns[output.columns]]
    return dict.fromkeys(found, kind)


@contextmanager
def counting_from(first: int) -> Iterator[None]:
    """Let an error about a value count the samples from ``first`` on."""
    try:
        yield
    except FeatureValueError as err:
        sample = None if err.sample is None else first + err.sample
        raise FeatureValueError(err.feature, sample, err.reason) from err


def requests_of(table: Any) -> NDArray[np.int64]:
    """Return where the rows of each request begin, and the number of rows. A client may use an id several times."""
    ids = table.column(REQUEST_ID).combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    samples = table.column(REQUEST_SAMPLE).to_numpy()
    begins = np.flatnonzero((ids[1:] != ids[:-1]) | (samples[1:] <= samples[:-1])) + 1
    return np.concatenate([[0], begins, [table.num_rows]])


def parts_of(session: InferenceSession, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts in which a server answers the rows of one request: the first row, and the number of rows.

    The log does not say which requests had candidates, and only those may have more than ``max_batchsize`` samples.
    """
    most = end - begin if session.graph.mixes_samples else session.config.max_batchsize
    for first in range(begin, end, most):
        yield first, min(most, end - first)
