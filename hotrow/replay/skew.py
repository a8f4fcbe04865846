"""``hotrow check --skew``: compare served features with training features."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.replay.report import share, text_table
from hotrow.replay.tables import RequestRows, RowFiles, drawn_rows, import_arrow, match
from hotrow.replay.version import open_version
from serving.errors import FeatureValueError, RequestError, TraceError
from serving.features import FeatureConfig, array_of
from serving.model.names import REQUEST_ID, REQUEST_SAMPLE
from serving.request_log import RawRows, counting_from, has_keys_of, named
from serving.session import InferenceSession
from training.model.losses import figure_text

_LONGEST = 60


class _Side(NamedTuple):
    """One of the two tables.

    Attributes:
        source: its path.
        rows: its rows that have a match.
        numbers: int64[M], where they are in its files.
        arrays: for each feature, its values of the feature's type, null where the value is missing.
        unknown: the share of unknown values of each vocabulary.
    """

    source: str
    rows: RawRows
    numbers: NDArray[np.int64]
    arrays: dict[str, Any]
    unknown: dict[str, float]

    def located(self, error: RequestError) -> TraceError:
        """Return an error about a value with the row of the files."""
        return _located(self.source, self.numbers, error)


def _located(source: str, numbers: NDArray[np.int64], error: RequestError) -> TraceError:
    if not isinstance(error, FeatureValueError) or error.sample is None:
        return TraceError(source, str(error))
    return TraceError(source, f"row {numbers[error.sample]}: {error.feature}: {error.reason}")


def skew(model: Path, log: Path, data: Path, on: Sequence[str]) -> Iterator[str]:
    """Yield lines about the differences between logged and training rows.

    Args:
        model: the folder of a version or of a model.
        log: the log's folder of one model, or one of its files.
        data: Parquet or CSV files with the features and the columns ``on``.
        on: the columns to join on.

    Raises:
        HotrowError: the model or a file cannot be used, or no rows match.
    """
    import_arrow("hotrow check --skew")
    with open_version(model) as session:
        if session.features is None or session.features.has_keys:
            raise TraceError(str(model), "has no features.json, and --skew compares raw features")
        for source in (log, data):
            if has_keys_of(str(source)):
                raise TraceError(str(source), "has requests with keys, and --skew compares raw features")
        names = session.features.names
        served, trained = RequestRows(log), RowFiles(data, texts=[*on, *names])
        found = match(served, trained, on)
        yield f"{len(found.ours):,} of {served.count:,} samples of {log} are in {data}"
        if found.ambiguous:
            yield f"{found.ambiguous:,} others have a {' and '.join(on)} that occurs several times"
        drawn = drawn_rows(len(found.ours))
        if len(drawn) < len(found.ours):
            yield f"the figures are from {len(drawn):,} evenly drawn samples"
        ours = served.take(found.ours[drawn], [REQUEST_ID, REQUEST_SAMPLE, *names])
        sides = (
            _side(session, ours, served.source, found.ours[drawn]),
            _side(session, trained.take(found.theirs[drawn], names), trained.source, found.theirs[drawn]),
        )
        for side in sides:
            if side.rows.absent:
                yield f"{side.source} has no {', '.join(side.rows.absent)}, so the feature is missing there"
        yield ""
        yield from _features(session, sides, ours)
        yield ""
        yield _predictions(session, sides, len(drawn))


def _side(session: InferenceSession, table: Any, source: str, numbers: NDArray[np.int64]) -> _Side:
    assert session.features is not None
    rows, count = RawRows(session, table), table.num_rows
    try:
        columns = rows.columns(0, count)
    except RequestError as err:
        raise _located(source, numbers, err) from err
    features = session.features.definition.columns
    arrays = {one.name: _present(one, array_of(one, [column])) for one, column in zip(features, columns, strict=True)}
    return _Side(source, rows, numbers, arrays, _unknown(session, features, columns, count))


def _present(feature: FeatureConfig, array: Any) -> Any:
    """Return values with null in place of all other missing values. A list has no missing values, as for the model."""
    pa = import_module("pyarrow")
    compute, kind = pa.compute, array.type
    if pa.types.is_list(kind):
        values, offsets = _present(feature, array.values), array.offsets.to_numpy()
        is_valid = values.is_valid()
        places = np.concatenate([[0], np.cumsum(is_valid.to_numpy(zero_copy_only=False))])[offsets]
        is_missing = np.diff(places) == 0
        if feature.missing is None:
            values, offsets = values.filter(is_valid), places
        else:  # which stands for each of several missing values
            is_missing &= np.diff(offsets) <= 1
        array = pa.ListArray.from_arrays(offsets.astype(np.int32), values)
        return compute.if_else(is_missing, pa.scalar(None, kind), array)
    if pa.types.is_string(kind):
        return compute.if_else(compute.equal(array, ""), pa.scalar(None, kind), array)
    if pa.types.is_floating(kind):
        return compute.if_else(compute.is_nan(array), pa.scalar(None, kind), array)
    return array


def _unknown(
    session: InferenceSession, features: Sequence[FeatureConfig], columns: Sequence[Any], count: int
) -> dict[str, float]:
    """Return the share of unknown values of each vocabulary; empty if a value cannot be transformed."""
    assert session.features is not None
    try:
        found = session.features.transform(columns, count)
    except RequestError:  # reported with the predictions
        return {}
    names = [feature.name for feature in features if feature.kind == "vocabulary"]
    return {name: found.unknown[name] / max(found.known[name] + found.unknown[name], 1) for name in names}


def _features(session: InferenceSession, sides: tuple[_Side, _Side], served: Any) -> Iterator[str]:
    """Yield a table of all features, and an example of each that differs."""
    titles = "feature", "different", "missing: served", "trained", "unknown: served", "trained"
    rows: list[Sequence[str]] = [titles]
    examples = []
    for name in sides[0].arrays:
        ours, theirs = (side.arrays[name] for side in sides)
        different = _different(ours, theirs)
        missing = [share(array.null_count / len(array)) for array in (ours, theirs)]
        unknown = [share(side.unknown.get(name)) for side in sides]
        rows.append((name, share(float(different.mean())), *missing, *unknown))
        if different.any():
            at = int(np.argmax(different))
            where = f"request {served[REQUEST_ID][at]} sample {served[REQUEST_SAMPLE][at]}"
            examples.append(f"{name} of {where}: {_shown(ours[at])} served, {_shown(theirs[at])} trained")
    yield from text_table(rows)
    if examples:
        yield ""
        yield from examples


def _different(ours: Any, theirs: Any) -> NDArray[np.bool_]:
    compute = import_module("pyarrow.compute")
    if import_module("pyarrow").types.is_list(ours.type):  # Arrow does not compare lists
        pairs = zip(ours.to_pylist(), theirs.to_pylist(), strict=True)
        return np.array([one != other for one, other in pairs])
    differs = compute.fill_null(compute.not_equal(ours, theirs), False)
    one_is_missing = compute.xor(ours.is_null(), theirs.is_null())
    found: NDArray[np.bool_] = compute.or_(differs, one_is_missing).to_numpy(zero_copy_only=False)
    return found


def _shown(value: Any) -> str:
    shown = "missing" if value.as_py() is None else repr(value.as_py())
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _predictions_of(session: InferenceSession, rows: RawRows, count: int) -> Any:
    """Return float32[N, L], the answers to all rows."""
    answers, most = [], session.config.max_batchsize
    for first in range(0, count, most):
        with counting_from(first):
            batch = rows.reader(first, min(most, count - first))()
        answers.append(session.predict_batch(batch).values)
    return np.concatenate(answers)


def _predictions(session: InferenceSession, sides: tuple[_Side, _Side], count: int) -> str:
    answers = []
    for side in sides:
        try:
            answers.append(_predictions_of(session, side.rows, count))
        except RequestError as err:
            return f"predictions were not compared: {side.located(err)}"
    sizes = np.abs(answers[0].astype(np.float64) - answers[1])
    units = np.array(session.graph.units)
    unit = " standard deviations of the label" if (units != 1).any() else ""
    mean, largest = figure_text(float(sizes.mean())), figure_text(float(sizes.max()))
    return (
        f"predictions of {named(session)} for both differ by {mean} on average and by {largest} "
        f"at most; {share(float((sizes / units > 0.01).mean()))} by more than 0.01{unit}"
    )
