"""Replays the requests of a log against one version."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hotrow.replay.tables import RequestRows, RowFiles
from serving.errors import RequestError, TraceError
from serving.metrics import Histogram
from serving.model.names import PREDICTION, REQUEST_ID
from serving.model.records import Output
from serving.opening import load_model
from serving.outputs import columns_of
from serving.parameter_server import ParameterServer
from serving.request_log import Rows, counting_from, named, parts_of, requests_of, rows_of
from serving.session import InferenceSession
from serving.storage import MemoryStore

Floats = NDArray[np.float32]


@dataclass
class Replayed:
    """The answers of one version to the requests of a log.

    Attributes:
        name: of the model and the version.
        predictions: float32[N, L]; NaN for the samples of a request that was refused.
        units: L numbers; see ``Graph.units``.
        seconds: of each request that was answered, for the transform, the lookup and the network.
        columns: the columns of the log that it has read.
        absent: the features of the model that the log does not have.
        refused: how many requests were refused.
        first_refusal: why the first of them was refused.
        keys: how many keys were looked up.
        defaulted_keys: how many of these keys got the default value.
        unknown: for each feature with a vocabulary, how many values it knows and does not know.
    """

    name: str
    predictions: Floats
    units: tuple[float, ...]
    seconds: list[float] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    refused: int = 0
    first_refusal: str = ""
    keys: int = 0
    defaulted_keys: int = 0
    unknown: Mapping[str, dict[str, int]] = field(default_factory=dict)


@contextmanager
def open_version(path: Path) -> Iterator[InferenceSession]:
    """Open a version with its rows in RAM, whatever the tiers of its server are.

    Raises:
        HotrowError: see ``serving.opening.load_model``.
        TraceError: the model has no dense network.
    """
    with ParameterServer([MemoryStore()]) as server, load_model(path, server) as session:
        if not isinstance(session, InferenceSession):
            raise TraceError(str(path), "the model has no dense network, so it makes no predictions")
        yield session


def logged_predictions(rows: RowFiles) -> Floats:
    """Return float32[N, L], the answers in a log; L is 0 without them."""
    several = takewhile(rows.names.__contains__, (f"{PREDICTION}_{label}" for label in count()))
    names = [PREDICTION] if PREDICTION in rows.names else list(several)
    table = rows.read(names)
    columns = [table.column(name).to_numpy().astype(np.float32) for name in names]
    return np.stack(columns, axis=1) if columns else np.empty((table.num_rows, 0), np.float32)


def replay(session: InferenceSession, log: RequestRows, logged: Floats, requests: int) -> Replayed:
    """Answer each request of a log, with the samples that it had.

    Args:
        session: the version.
        log: the requests.
        logged: float32[N, L], the answers in the log. A request asks for the outputs that it has answers of.
        requests: how many there are.

    Raises:
        TraceError: the log has no columns that the version reads.
        StoreError: a tier did not answer.
    """
    shape = log.count, session.config.label_dim
    found = Replayed(named(session), np.full(shape, np.nan, np.float32), session.graph.units)
    about = rows_of(session, log.empty, log.source)
    found.columns, found.absent = tuple(about.names), tuple(about.absent)
    first = 0
    with tqdm(desc=found.name, total=requests, unit=" requests", disable=None) as bar:
        for table in log.requests(about.names):
            rows = rows_of(session, table, log.source)
            for begin, end in pairwise(requests_of(table).tolist()):
                places = slice(first + begin, first + end)
                try:
                    wanted = _wanted(session, logged[places])
                    found.predictions[places] = _answer(session, rows, begin, end, wanted, found)
                except RequestError as err:
                    found.refused += 1
                    found.first_refusal = found.first_refusal or f"request {table[REQUEST_ID][begin]}: {err}"
                bar.update()
            first += table.num_rows
    found.unknown = _unknown(session)
    return found


def _answer(
    session: InferenceSession, rows: Rows, begin: int, end: int, wanted: tuple[Output, ...] | None, found: Replayed
) -> Floats:
    """Answer the rows of one request as a server does, and count its time and its keys."""
    answers, seconds, keys, defaulted_keys = list[Floats](), 0.0, 0, 0
    for first, samples in parts_of(session, begin, end):
        with counting_from(first - begin):
            read = rows.reader(first, samples, wanted)
            began = perf_counter()
            batch = read()
            answer = session.predict_batch(batch)
        seconds += perf_counter() - began
        answers.append(columns_of(answer.values, session.wanted(batch)))
        keys += batch.joined.keys.size
        defaulted_keys += answer.defaulted_keys
    found.seconds.append(seconds)
    found.keys += keys
    found.defaulted_keys += defaulted_keys
    return np.concatenate(answers)


def _wanted(session: InferenceSession, logged: Floats) -> tuple[Output, ...] | None:
    """Return the outputs that have answers in the log; None: all."""
    if np.isfinite(logged).all():
        return None
    return tuple(output for output in session.outputs if np.isfinite(logged[:, output.columns]).all())


def _unknown(session: InferenceSession) -> dict[str, dict[str, int]]:
    """Return how many values of each vocabulary were known and unknown."""
    counts: dict[str, dict[str, int]] = {}
    for sample in session.request_readings():
        labels = dict(sample.labels)
        if sample.name == "hotrow_vocabulary_values":
            assert not isinstance(sample.value, Histogram)
            counts.setdefault(labels["feature"], {})[labels["state"]] = int(sample.value)
    return counts
