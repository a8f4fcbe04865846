"""All figures of a replay as one JSON document."""

from collections import Counter
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.replay.figures import describe, has_other_kind, mean_of, of_outputs, quality
from hotrow.replay.tables import RequestRows, RowFiles, import_arrow, match
from hotrow.replay.version import logged_predictions, open_version, replay
from serving.errors import TraceError, did_you_mean
from serving.model.names import MODEL_VERSION, REQUEST_ID, REQUEST_TIME
from serving.model.records import OutputKind
from serving.request_log import labeled_columns, named, requests_of
from serving.session import InferenceSession
from training.model.losses import LOSS_OF_KIND, Loss

Labels = dict[str, NDArray[np.float64]]


def replay_document(
    log: Path,
    models: Sequence[Path],
    labels: Sequence[str] = (),
    *,
    labels_file: Path | None = None,
    on: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Answer the requests of a log with each version in turn, and return all figures.

    Args:
        log: the log's folder of one model, or one of its files.
        models: the folders of versions or of models.
        labels: the columns of labels.
        labels_file: the file with the labels; None: the log has them.
        on: the columns that the log and ``labels_file`` are joined on; None: the request's id.

    Raises:
        HotrowError: a file or a model cannot be used.
    """
    import_arrow("hotrow replay")
    if labels_file is None and on is not None:
        raise TraceError("--on", "needs --labels")
    if labels_file is not None and not labels:
        raise TraceError("--labels", "needs --label, the column of the label")
    rows, source = RequestRows(log), str(log)
    logged = logged_predictions(rows)
    document: dict[str, Any] = {"log": _about(rows, logged)}
    theirs = rows if labels_file is None else RowFiles(labels_file, texts=on or [REQUEST_ID])
    given = _labels(theirs, labels) if labels else {}
    found = given
    if labels_file is not None:
        matches = match(rows, theirs, on or [REQUEST_ID])
        found = {name: np.full(rows.count, np.nan) for name in given}
        for name, values in given.items():
            found[name][matches.ours] = values[matches.theirs]
        samples = len(matches.ours)
        document["labels"] = {"path": str(labels_file), "samples": samples, "ambiguous": matches.ambiguous}
    document["models"] = []
    losses = list[Loss]()
    for path in models:
        with open_version(path) as session:
            outputs, columns = session.outputs, session.config.label_dim
            if logged.shape[1] != columns:
                reason = f"has {logged.shape[1]} predictions per sample, but {named(session)} makes {columns}"
                raise TraceError(source, reason)
            kinds = labeled_columns(session)
            if given:
                losses = _losses(given, theirs.source, kinds.values(), losses, session)
            replayed = replay(session, rows, logged, document["log"]["requests"])
        document["models"].append(describe(replayed, rows, logged))
        document["models"][-1]["outputs"] = of_outputs(outputs, replayed.predictions, logged)
        document["models"][-1]["other_kind"] = has_other_kind(kinds, replayed.predictions, logged)
        if found:
            document["models"][-1]["quality"] = quality(found, replayed.predictions[:, list(kinds)], losses)
            document["quality"] = quality(found, logged[:, list(kinds)], losses)
    return document


def _losses(
    labels: Labels, source: str, kinds: Collection[OutputKind], others: Sequence[Loss], session: InferenceSession
) -> list[Loss]:
    """Return the losses that compare each label with a version's answers.

    Args:
        labels: the labels as a file has them.
        source: the file.
        kinds: the kinds of the version's columns that the labels are compared with.
        others: the losses of the versions before; empty for the first version.
        session: the version.

    Raises:
        TraceError: the version has other columns, or a label is not what an answer predicts.
    """
    if len(labels) != len(kinds):
        raise TraceError("--label", f"expected {len(kinds)} columns for {named(session)}, got {', '.join(labels)}")
    losses = [LOSS_OF_KIND[kind] for kind in kinds]
    if others and losses != others:
        answers = [" and ".join(loss.kind for loss in some) for some in (losses, others)]
        reason = f"{named(session)} answers with {answers[0]}, and the version before with {answers[1]}"
        raise TraceError("--label", f"{reason}; replay them one after the other")
    for (name, values), loss in zip(labels.items(), losses, strict=True):
        wrong = np.flatnonzero(loss.is_wrong(values) & ~np.isnan(values))
        if wrong.size:
            reason = f"{name}: expected {loss.expected}, got {values[wrong[0]]:g} in row {wrong[0]}"
            raise TraceError(source, reason)
    return losses


def _about(rows: RequestRows, logged: NDArray[np.float32]) -> dict[str, Any]:
    compute = import_module("pyarrow.compute")
    requests, times, versions = 0, list[Any](), Counter[str]()
    for table in rows.requests([REQUEST_TIME, MODEL_VERSION]):
        requests += len(requests_of(table)) - 1
        if REQUEST_TIME in table.column_names:
            times += filter(None, compute.min_max(table[REQUEST_TIME]).as_py().values())
            times = [min(times), max(times)] if times else []
        if MODEL_VERSION in table.column_names:
            versions.update(
                {str(entry["values"]): entry["counts"] for entry in table[MODEL_VERSION].value_counts().to_pylist()}
            )
    return {
        "path": rows.source,
        "requests": requests,
        "samples": rows.count,
        "from": f"{times[0]:%Y-%m-%d %H:%M:%S %Z}" if times else None,
        "to": f"{times[1]:%Y-%m-%d %H:%M:%S %Z}" if times else None,
        "versions": dict(versions),
        "mean_prediction": mean_of(logged),
    }


def _labels(rows: RowFiles, names: Sequence[str]) -> Labels:
    """Return columns of labels, with NaN for null.

    Raises:
        TraceError: a column is missing, or does not have numbers.
    """
    pa = import_module("pyarrow")
    for name in names:
        if name not in rows.names:
            raise TraceError(rows.source, f"has no column {name!r}{did_you_mean(name, rows.names)}")
    table, found = rows.read(names), {}
    for name in names:
        try:
            values = table[name].cast(pa.float64()).to_numpy()
        except pa.ArrowException as err:
            raise TraceError(rows.source, f"{name}: expected numbers, got {table[name].type}") from err
        found[name] = values
    return found
