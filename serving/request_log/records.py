"""The rows of the request log: from requests and their answers to Arrow's record batches.

==================  ============  ====================================================================================
``request_id``      string        the client's id, or the server's; the answer has it too
``request_sample``  int32         the number of the sample in its request, from 0
``request_time``    timestamp     when the request was answered, in UTC
``model_version``   string        the version that answered
``prediction``      float32       the answer; ``prediction_0``, ``prediction_1``, ... if it has several columns. Null in
                                  the columns of outputs that the request did not ask for
``defaulted_keys``  int64         the unknown keys of the whole request
==================  ============  ====================================================================================
"""

from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch, JoinedKeys, TableKeys, join_keys
from serving.features import array_of, arrow_type, slots_of
from serving.model.names import (
    DEFAULTED_KEYS,
    MODEL_VERSION,
    PREDICTION,
    REQUEST_ID,
    REQUEST_SAMPLE,
    REQUEST_TIME,
)
from serving.model.records import numbered
from serving.outputs import columns_of
from serving.routes import Prediction
from serving.session import InferenceSession

#: Suffix of the folder for requests with keys, if the model takes raw features. No model's name has a dot.
_OF_KEYS = ".keys"


class Entry(NamedTuple):
    """A request and its answer.

    Attributes:
        session: answered it.
        batch: its samples.
        prediction: the answer.
        request_id: its id.
        time_us: when it was answered, in microseconds since 1970.
    """

    session: InferenceSession
    batch: Batch
    prediction: Prediction
    request_id: str
    time_us: int

    @property
    def answers(self) -> NDArray[np.float32]:
        """The answer, float32[B, L]; NaN in the columns of outputs that the request did not ask for."""
        return columns_of(self.prediction.values, self.session.wanted(self.batch))

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        sent, keys = self.batch.sent, self.batch.joined
        columns = () if sent is None or isinstance(sent, JoinedKeys) else sent
        texts = sum(column[1].nbytes for column in columns if column[0] == "text")
        return int(texts + 2 * (keys.keys.nbytes + keys.row_ptrs.nbytes) + self.batch.dense.nbytes)


class RecordForm:
    """The columns of the requests of one model that have raw features, or of those that have keys.

    Attributes:
        folder: the name of the folder for their files.
        schema: Arrow's.
        columns: the columns that the model has, before some are left out.
    """

    def __init__(self, session: InferenceSession, has_keys: bool, without: Collection[str]) -> None:
        """Describe the columns, except those called ``without``."""
        pa = import_module("pyarrow")
        config, reader = session.config, session.features
        self._has_keys = has_keys
        self.folder = config.name + _OF_KEYS * (has_keys and takes_raw_features(session))
        about = [
            pa.field(REQUEST_ID, pa.string()),
            pa.field(REQUEST_SAMPLE, pa.int32()),
            pa.field(REQUEST_TIME, pa.timestamp("us", tz="UTC")),
            pa.field(MODEL_VERSION, pa.string()),
            *(pa.field(name, pa.float32()) for name in numbered(PREDICTION, config.label_dim)),
            pa.field(DEFAULTED_KEYS, pa.int64()),
        ]
        self._features = () if reader is None else reader.definition.columns
        if has_keys:
            keys = pa.list_(pa.int64())
            fields = [
                *(pa.field(name, pa.float32()) for name in session.graph.dense_columns),
                *(pa.field(name, keys) for name in key_columns(session)),
            ]
        else:
            fields = [pa.field(feature.name, arrow_type(feature)) for feature in self._features]
        self.columns = tuple(field.name for field in fields)
        features = _features_of_keys(session) if has_keys and takes_raw_features(session) else {}
        left_out = {*without, *(name for name, made_of in features.items() if not made_of.isdisjoint(without))}
        self._kept = [place for place, name in enumerate(self.columns) if name not in left_out]
        self.schema = pa.schema([*about, *(fields[place] for place in self._kept)])

    def record_batch(self, entries: Sequence[Entry]) -> Any:
        """Return the rows of requests of this form.

        Raises:
            pyarrow.ArrowInvalid: a string is not UTF-8.
        """
        pa = import_module("pyarrow")
        counts = [entry.batch.samples for entry in entries]
        of_sample = pa.array(np.repeat(np.arange(len(entries)), counts))
        values = np.concatenate([entry.answers for entry in entries])
        times = [entry.time_us for entry in entries]
        arrays = [
            pa.array([entry.request_id for entry in entries], pa.string()).take(of_sample),
            pa.array(np.concatenate([np.arange(count, dtype=np.int32) for count in counts])),
            pa.array(times, pa.timestamp("us", tz="UTC")).take(of_sample),
            pa.array([str(entry.session.config.version) for entry in entries], pa.string()).take(of_sample),
            *(pa.array(column, from_pandas=True) for column in np.ascontiguousarray(values.T)),  # NaN becomes null
            pa.array([entry.prediction.defaulted_keys for entry in entries], pa.int64()).take(of_sample),
        ]
        return pa.record_batch([*arrays, *self._arrays_of(entries)], schema=self.schema)

    def _arrays_of(self, entries: Sequence[Entry]) -> list[Any]:
        """Return the columns of requests, without those that are left out."""
        sent: list[Any] = [entry.batch.sent for entry in entries]
        if not self._has_keys:
            return [array_of(self._features[place], [columns[place] for columns in sent]) for place in self._kept]
        features = entries[0].session.config.dense_dim  # the masks of sequences follow
        dense = np.concatenate([entry.batch.dense[:, :features] for entry in entries])
        tables = [join_keys(parts) for parts in zip(*(keys.tables for keys in sent), strict=True)]
        arrays = _arrays_of_keys(dense, tables)
        return [arrays[place] for place in self._kept]


def folders_of(session: InferenceSession, log: Path) -> Sequence[Path]:
    """Return the folders that a log may have for a model: of requests with its raw features, and with keys."""
    name = session.config.name
    return [log / name, log / f"{name}{_OF_KEYS}"] if takes_raw_features(session) else [log / name]


def has_keys_of(source: str) -> bool:
    """Whether a folder of the log, or a file in it, has requests with keys to a model that takes raw features."""
    path = Path(source)
    return path.name.endswith(_OF_KEYS) or path.parent.name.endswith(_OF_KEYS)


def takes_raw_features(session: InferenceSession) -> bool:
    """Whether the features of a model are more than names of its keys."""
    return session.features is not None and not session.features.has_keys


def _features_of_keys(session: InferenceSession) -> dict[str, set[str]]:
    """Return the raw features that are in each column of keys or dense numbers."""
    assert session.features is not None
    definition = session.features.definition
    numbers = [feature.name for feature in definition.dense for _ in range(feature.width)]
    names = [*numbers, *session.features.of_slots]
    made_of = {feature.name: {feature.name, *(feature.of or ())} for feature in definition.features}
    columns = *session.graph.dense_columns, *key_columns(session)
    return {column: made_of[name] for column, name in zip(columns, names, strict=True)}


def key_columns(session: InferenceSession) -> Sequence[str]:
    """Return the columns of the slots, in the order of the tables: those of training data if each has its own."""
    graph = session.graph
    if [entry.top for entry in graph.sparse] == [embedding.bottom for embedding in graph.embeddings]:
        return graph.slot_columns
    return [slot.place for slot in slots_of(session.config)]


def _arrays_of_keys(dense: NDArray[np.float32], tables: Sequence[TableKeys]) -> list[Any]:
    """Return the dense features, and the keys of each slot as lists."""
    pa = import_module("pyarrow")
    arrays = [pa.array(column) for column in np.ascontiguousarray(dense.T)]
    for keys, row_ptrs in tables:
        bags = pa.ListArray.from_arrays(pa.array(row_ptrs), pa.array(keys))
        slots = len(bags) // len(dense)
        arrays += [bags.take(pa.array(np.arange(slot, len(bags), slots))) for slot in range(slots)]
    return arrays
