"""All figures of a replay as one JSON document."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.replay.figures import describe, mean_of, quality
from hotrow.replay.rows import named
from hotrow.replay.tables import import_arrow, match, read_log, read_rows
from hotrow.replay.version import logged_predictions, open_version, replay, requests_of
from serving.errors import TraceError, did_you_mean
from serving.model.names import MODEL_VERSION, REQUEST_ID, REQUEST_TIME

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
    table, source = read_log(log), str(log)
    logged = logged_predictions(table)
    document: dict[str, Any] = {"log": _about(table, source, logged)}
    found: Labels = {}
    if labels_file is not None:
        on = on or [REQUEST_ID]
        theirs = read_rows(labels_file, texts=on)
        matches = match(table, theirs, on, (source, str(labels_file)))
        for name, values in _labels(theirs, labels, str(labels_file)).items():
            found[name] = np.full(table.num_rows, np.nan)
            found[name][matches.ours] = values[matches.theirs]
        samples = len(matches.ours)
        document["labels"] = {"path": str(labels_file), "samples": samples, "ambiguous": matches.ambiguous}
    elif labels:
        found = _labels(table, labels, source)
    document["models"] = []
    for path in models:
        with open_version(path) as session:
            outputs = session.config.label_dim
            if logged.shape[1] != outputs:
                reason = f"has {logged.shape[1]} predictions per sample, but {named(session)} makes {outputs}"
                raise TraceError(source, reason)
            if found and len(found) != outputs:
                raise TraceError("--label", f"expected {outputs} columns for {named(session)}, got {', '.join(found)}")
            replayed = replay(session, table, source)
        document["models"].append(describe(replayed, table, logged, found))
    if found:
        document["quality"] = quality(found, logged)
    return document


def _about(table: Any, source: str, logged: NDArray[np.float32]) -> dict[str, Any]:
    compute = import_module("pyarrow.compute")
    names = table.column_names
    times = compute.min_max(table[REQUEST_TIME]).as_py() if REQUEST_TIME in names else {"min": None, "max": None}
    versions = table[MODEL_VERSION].value_counts().to_pylist() if MODEL_VERSION in names else []
    return {
        "path": source,
        "requests": len(requests_of(table)) - 1,
        "samples": table.num_rows,
        "from": None if times["min"] is None else f"{times['min']:%Y-%m-%d %H:%M:%S %Z}",
        "to": None if times["max"] is None else f"{times['max']:%Y-%m-%d %H:%M:%S %Z}",
        "versions": {str(one["values"]): one["counts"] for one in versions},
        "mean_prediction": mean_of(logged),
    }


def _labels(table: Any, names: Sequence[str], source: str) -> Labels:
    """Return columns of labels, with NaN for null.

    Raises:
        TraceError: a column is missing, or has other values than 0, 1 and null.
    """
    pa = import_module("pyarrow")
    found = {}
    for name in names:
        if name not in table.column_names:
            raise TraceError(source, f"has no column {name!r}{did_you_mean(name, table.column_names)}")
        try:
            values = table[name].cast(pa.float64()).to_numpy()
        except pa.ArrowException as err:
            raise TraceError(source, f"{name}: expected 0 and 1, got {table[name].type}") from err
        wrong = np.flatnonzero(~np.isin(values, (0.0, 1.0)) & ~np.isnan(values))
        if wrong.size:
            raise TraceError(source, f"{name}: expected 0 or 1, got {values[wrong[0]]:g} in row {wrong[0]}")
        found[name] = values
    return found
