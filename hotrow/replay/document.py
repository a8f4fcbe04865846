"""All figures of a replay as one JSON document."""

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.replay.figures import describe, mean_of, quality
from hotrow.replay.tables import RequestRows, RowFiles, import_arrow, match
from hotrow.replay.version import logged_predictions, open_version, replay
from serving.errors import TraceError, did_you_mean
from serving.model.names import MODEL_VERSION, REQUEST_ID, REQUEST_TIME
from serving.request_log import named, probability_columns, requests_of

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
    found: Labels = {}
    if labels_file is not None:
        on = on or [REQUEST_ID]
        theirs = RowFiles(labels_file, texts=on)
        matches = match(rows, theirs, on)
        for name, values in _labels(theirs, labels).items():
            found[name] = np.full(rows.count, np.nan)
            found[name][matches.ours] = values[matches.theirs]
        samples = len(matches.ours)
        document["labels"] = {"path": str(labels_file), "samples": samples, "ambiguous": matches.ambiguous}
    elif labels:
        found = _labels(rows, labels)
    document["models"] = []
    for path in models:
        with open_version(path) as session:
            outputs = session.config.label_dim
            if logged.shape[1] != outputs:
                reason = f"has {logged.shape[1]} predictions per sample, but {named(session)} makes {outputs}"
                raise TraceError(source, reason)
            columns = probability_columns(session)
            if found and len(found) != len(columns):
                reason = f"expected {len(columns)} columns for {named(session)}, got {', '.join(found)}"
                raise TraceError("--label", reason)
            replayed = replay(session, rows, logged, document["log"]["requests"])
        document["models"].append(describe(replayed, rows, logged))
        if found:
            document["models"][-1]["quality"] = quality(found, replayed.predictions[:, columns])
            document["quality"] = quality(found, logged[:, columns])
    return document


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
                {str(one["values"]): one["counts"] for one in table[MODEL_VERSION].value_counts().to_pylist()}
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
        TraceError: a column is missing, or has other values than 0, 1 and null.
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
            raise TraceError(rows.source, f"{name}: expected 0 and 1, got {table[name].type}") from err
        wrong = np.flatnonzero(~np.isin(values, (0.0, 1.0)) & ~np.isnan(values))
        if wrong.size:
            reason = f"{name}: expected 0 or 1, got {values[wrong[0]]:g} in row {wrong[0]}"
            raise TraceError(rows.source, reason)
        found[name] = values
    return found
