"""The figures of replayed answers: differences, times, unknown values and, with labels, the quality of the answers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.replay.tables import RequestRows, drawn_rows
from hotrow.replay.version import Replayed
from serving.model.names import REQUEST_ID, REQUEST_SAMPLE
from serving.model.records import Output, OutputKind, default_outputs
from training.model.losses import Loss

_LARGEST = 10  # differences that are listed
_BINS = 50
_MOST_GROUPS = 50  # of a float feature; with more values, the groups are its quarters
_LEAST_SAMPLES, _LEAST_SHARE = 20, 0.01  # of a group that is large enough to report
_GROUPS_OF_FEATURE = 3

Floats = NDArray[np.floating[Any]]


def differences(replayed: Replayed, log: RequestRows, logged: Floats) -> dict[str, Any]:
    """Describe how the answers of a version differ from those in the log, [N, L]."""
    predictions, features = replayed.predictions, replayed.columns
    changes = predictions.astype(np.float64) - logged
    is_answer = np.isfinite(changes)
    answered = np.asarray(is_answer.any(axis=1))
    found = changes[is_answer]
    sizes = np.abs(found)
    if not found.size:
        return {"samples": 0}
    limit = max(float(sizes.max()), 1e-6)
    means = np.where(is_answer, changes, 0).sum(axis=1) / np.maximum(is_answer.sum(axis=1), 1)
    drawn = drawn_rows(log.count)
    in_units = np.abs((changes / np.array(replayed.units))[is_answer])
    counts, edges = np.histogram(found, bins=_BINS, range=(-limit, limit))
    return {
        "samples": int(answered.sum()),
        "mean": float(found.mean()),
        "mean_absolute": float(sizes.mean()),
        "largest_absolute": float(sizes.max()),
        "quantiles_absolute": {str(part): float(np.quantile(sizes, part)) for part in (0.5, 0.9, 0.99)},
        "share_above": {str(size): float((in_units > size).mean()) for size in (0.001, 0.01, 0.1)},
        "units": list(replayed.units),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "largest": list(_largest(log, logged, predictions, np.where(is_answer, np.abs(changes), 0))),
        "by_feature": list(_by_feature(log.take(drawn, features), means[drawn], answered[drawn], features)),
    }


def _largest(log: RequestRows, logged: Floats, predictions: Floats, sizes: Floats) -> Iterator[dict[str, Any]]:
    of_rows = sizes.max(axis=1)
    rows = np.argsort(-of_rows, kind="stable")[:_LARGEST]
    rows = rows[of_rows[rows] > 0]
    names = log.take(rows, (REQUEST_ID, REQUEST_SAMPLE)).select([REQUEST_ID, REQUEST_SAMPLE]).to_pylist()
    for row, name in zip(rows, names, strict=True):
        yield {**name, "logged": _numbers(logged[row]), "predicted": _numbers(predictions[row])}


def _numbers(answer: Floats) -> list[float | None]:
    """Return the columns of an answer as JSON can have them; None: the request did not ask for the output."""
    return [None if math.isnan(value) else value for value in answer.tolist()]


def _by_feature(
    table: Any, changes: Floats, answered: NDArray[np.bool_], features: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the values of each feature whose samples differ most."""
    least = max(_LEAST_SAMPLES, _LEAST_SHARE * answered.sum())
    for name in features:
        codes, rows, values = _groups(table.column(name).combine_chunks())
        counts = np.bincount(codes, weights=answered[rows], minlength=len(values))
        means = np.bincount(codes, weights=changes[rows], minlength=len(values)) / np.maximum(counts, 1)
        order = np.argsort(-np.abs(np.where(counts >= least, means, 0)), kind="stable")[:_GROUPS_OF_FEATURE]
        for place in order.tolist():
            if counts[place] >= least and means[place]:
                shown = {"feature": name, "value": _plain(values[place]), "samples": int(counts[place])}
                yield {**shown, "mean_difference": float(means[place])}


def _groups(array: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Any]]:
    """Return the group of each value of a column, the row of each value, and the name of each group."""
    pa = import_module("pyarrow")
    types = pa.types
    rows = np.arange(len(array))
    if types.is_list(array.type) or types.is_large_list(array.type):
        pairs = pa.table([pa.compute.list_parent_indices(array), array.flatten()], names=["row", "value"])
        pairs = pairs.group_by(["row", "value"]).aggregate([])  # a value that a sample has twice counts once
        rows, array = pairs["row"].to_numpy(), pairs["value"].combine_chunks()
    if types.is_dictionary(array.type):  # categoricals of pandas
        array = array.dictionary_decode()
    if types.is_floating(array.type):
        array = pa.compute.if_else(pa.compute.is_nan(array), None, array)
    coded = array.dictionary_encode(null_encoding="encode")
    names = coded.dictionary.to_pylist()
    if not types.is_floating(array.type) or len(names) <= _MOST_GROUPS:
        return coded.indices.to_numpy().astype(np.int64), rows, names
    numbers = array.to_numpy(zero_copy_only=False).astype(np.float64)
    edges = np.unique(np.quantile(numbers[np.isfinite(numbers)], (0, 0.25, 0.5, 0.75, 1)))
    edges[[0, -1]] = np.nanmin(numbers), np.nanmax(numbers)  # they may be infinite
    codes = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
    quarters: list[Any] = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    return np.where(np.isnan(numbers), len(quarters), codes), rows, [*quarters, None]


def _plain(value: Any) -> Any:
    """Return a value as JSON can have it."""
    is_plain = isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def has_other_kind(kinds: Mapping[int, OutputKind], predictions: Floats, logged: Floats) -> bool:
    """Return whether the answers in a log, [N, L], are likely of another kind than those of a version.

    Args:
        kinds: of some columns of the version's answers.
        predictions: the version's answers, [N, L].
        logged: those in the log.
    """
    for column, kind in kinds.items():
        ours, theirs = (np.mean(np.abs(answers[:, column] - 0.5) > 0.5) for answers in (predictions, logged))
        if theirs > 0 if kind == "probability" else (theirs == 0 and ours > 0.5):
            return True
    return False


def mean_of(predictions: Floats) -> float | None:
    """Return the mean of all values except NaN; None if there are none."""
    found = predictions[~np.isnan(predictions)]
    return float(found.mean(dtype=np.float64)) if found.size else None


def of_outputs(outputs: Sequence[Output], predictions: Floats, logged: Floats) -> dict[str, Any]:
    """Return the figures of each of several outputs, because their numbers mean different things.

    Args:
        outputs: of the version, see ``InferenceSession.outputs``.
        predictions: the version's answers, [N, L].
        logged: those in the log.
    """
    stated = default_outputs(outputs)
    parts = stated if len(stated) > 1 else outputs[1:]  # the heads of OUTPUT0
    found: dict[str, Any] = {}
    for output in parts:
        ours, theirs = predictions[:, output.columns], logged[:, output.columns]
        changes = ours.astype(np.float64) - theirs
        means = {"logged": mean_of(theirs), "mean_prediction": mean_of(ours)}
        found[output.name] = {**means, "mean": mean_of(changes), "mean_absolute": mean_of(np.abs(changes))}
    return found


def quality(labels: Mapping[str, Floats], predictions: Floats, losses: Sequence[Loss]) -> dict[str, Any]:
    """Compare answers [N, L] with L labels [N], NaN where there is none, and return the figures of each label."""
    found: dict[str, Any] = {}
    for (name, of_label), answers, loss in zip(labels.items(), predictions.T, losses, strict=True):
        there = ~np.isnan(of_label) & ~np.isnan(answers)
        figures = loss.figures(of_label[there], loss.logits(answers[there])) if there.any() else {}
        defined = {
            figure: None if isinstance(value, float) and math.isnan(value) else value
            for figure, value in figures.items()
        }
        found[name] = {"samples": int(there.sum()), **defined}
    return found


def describe(replayed: Replayed, log: RequestRows, logged: Floats) -> dict[str, Any]:
    """Return the figures of one version.

    Args:
        replayed: its answers.
        log: the requests.
        logged: [N, L], the answers in the log.
    """
    times = np.percentile(1000 * np.array(replayed.seconds), (50, 99)) if replayed.seconds else ()
    return {
        "model": replayed.name,
        "mean_prediction": mean_of(replayed.predictions),
        "differences": differences(replayed, log, logged),
        "milliseconds": dict(zip(("p50", "p99"), map(float, times), strict=False)),
        "refused": {"requests": replayed.refused, "first": replayed.first_refusal},
        "keys": {"looked_up": replayed.keys, "defaulted": replayed.defaulted_keys},
        "unknown_values": dict(replayed.unknown),
        "absent_features": list(replayed.absent),
    }
