"""HugeCTR's dense model file: every dense weight, and nothing else.

Format (HugeCTR v3.0 to v24.06): little-endian float32 without header or padding; the weights of ``graph.weights``
one after the other, each row-major.

The running statistics of BatchNorm layers are in a side file (HugeCTR v3.1 to v24.06), ``<dense file>.ntp.json``:
``{"layers": [{"type": "BatchNorm", "mean": [...], "var": [...]}, ...]}``, one entry per BatchNorm in the order of the
graph. A graph without BatchNorm has no side file. HugeCTR writes six decimals (``std::to_string`` in
batch_norm_layer.cu), so a small variance loses digits.
"""

import json
import logging
import math
import os
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write
from serving.model.records import Graph, WeightSpec
from serving.model.regular_file import is_absent, open_regular
from serving.model.strict_json import Fields, read_json

Weights: TypeAlias = dict[str, NDArray[np.float32]]  # by "<layer>.<weight>", of WeightSpec.shape

_log = logging.getLogger(__name__)


def weight_key(spec: WeightSpec) -> str:
    """Return a weight's key in ``Weights``."""
    return f"{spec.layer}.{spec.name}"


def check_weights(graph: Graph, weights: Weights) -> None:
    """Raise ValueError unless ``weights`` are exactly the float32 weights and statistics of the graph."""
    expected = {weight_key(spec): spec.shape for spec in graph.stored}
    for key in weights.keys() - expected.keys():
        raise ValueError(f"{key}: the graph has no such weight")
    for key, shape in expected.items():
        if key not in weights:
            raise ValueError(f"{key}: missing")
        array = weights[key]
        if array.shape != shape or array.dtype != np.float32:
            raise ValueError(f"{key}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}")


def statistics_path(dense_file: str | Path) -> Path:
    """Return the path of a dense model file's side file."""
    return Path(f"{dense_file}.ntp.json")


def check_dense_size(path: str | Path, graph: Graph) -> None:
    """Check the size of a dense model file without reading it; see ``read_dense``."""
    _open(path, graph).close()


def read_dense(path: str | Path, graph: Graph) -> Weights:
    """Read all weights of ``graph``, and the statistics of its BatchNorm layers from the side file.

    A weight that is NaN or infinite is logged as a warning.

    Raises:
        ModelFileError: a file is missing, or its size or content does not fit the graph.
    """
    with _open(path, graph) as file:
        try:
            floats = np.fromfile(file, dtype="<f4").astype(np.float32, copy=False)
        except OSError as err:
            raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
    weights: Weights = {}
    begin = 0
    for spec in graph.weights:
        end = begin + math.prod(spec.shape)
        weights[weight_key(spec)] = floats[begin:end].reshape(spec.shape)
        if not np.isfinite(floats[begin:end]).all():
            _log.warning("%s: %s has weights that are NaN or infinite", path, weight_key(spec))
        begin = end
    return {**weights, **_read_statistics(path, graph)}


def _open(path: str | Path, graph: Graph) -> BufferedReader:
    """Open a dense model file, whose size is checked because it may be larger than memory."""
    expected_bytes = 4 * sum(math.prod(spec.shape) for spec in graph.weights)
    try:
        file = open_regular(path)
    except FileNotFoundError as err:
        raise ModelFileError(path, "no such file") from err
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
    found_bytes = os.fstat(file.fileno()).st_size
    if found_bytes != expected_bytes:
        file.close()
        reason = f"expected {expected_bytes:,} bytes ({_breakdown(graph)}), found {found_bytes:,} bytes"
        raise ModelFileError(path, reason)
    return file


def write_dense(path: str | Path, graph: Graph, weights: Weights) -> None:
    """Write all weights of ``graph`` and the side file, each replaced at once or not at all.

    Raises:
        ModelFileError: a weight is missing, unknown, or of another shape or dtype, or the disk refuses.
    """
    try:
        check_weights(graph, weights)
    except ValueError as err:
        raise ModelFileError(path, str(err)) from err
    try:
        _write_statistics(path, graph, weights)
        with atomic_write(path) as file:
            for spec in graph.weights:
                file.write(np.ascontiguousarray(weights[weight_key(spec)], dtype="<f4").tobytes())
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err


def _read_statistics(dense_file: str | Path, graph: Graph) -> Weights:
    """Read ``graph.statistics``. Raise ModelFileError if the side file is missing or does not fit the graph."""
    if not graph.statistics:
        return {}
    path = statistics_path(dense_file)
    names = list(dict.fromkeys(spec.layer for spec in graph.statistics))
    if is_absent(path):
        raise ModelFileError(path, f"no such file; it holds the mean and variance of {', '.join(names)}")
    try:
        layers = list(Fields(read_json(path), str(path), "", ("layers",)).objects("layers"))
        if len(layers) != len(names):
            reason = f"layers: expected {len(names)} entries, for {', '.join(names)}, found {len(layers)}"
            raise ModelFileError(path, reason)
        for fields in layers:
            fields.allow(("type", "mean", "var"))
            fields.choice("type", {"BatchNorm": "BatchNorm"})
        entries = dict(zip(names, layers, strict=True))
        return {weight_key(spec): _numbers(entries[spec.layer], spec) for spec in graph.statistics}
    except ConfigError as err:
        raise ModelFileError(path, ": ".join(part for part in (err.path, err.reason) if part)) from err


def _write_statistics(dense_file: str | Path, graph: Graph, weights: Weights) -> None:
    """Write ``graph.statistics``, if there are any. The caller has checked the weights."""
    if not graph.statistics:
        return
    layers: dict[str, dict[str, object]] = {}
    for spec in graph.statistics:
        entry = layers.setdefault(spec.layer, {"type": "BatchNorm"})
        entry[spec.name] = weights[weight_key(spec)].astype(float).tolist()
    with atomic_write(statistics_path(dense_file)) as file:
        file.write(json.dumps({"layers": list(layers.values())}, allow_nan=False).encode() + b"\n")


def _numbers(fields: Fields, spec: WeightSpec) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    items, (count,) = fields.items(spec.name), spec.shape
    if len(items) != count:
        reason = f"expected {count} numbers, the columns of {spec.layer}, got {len(items)}"
        raise fields.error(reason, spec.name)
    numbers = [fields.check_number(item, f"{spec.name}[{index}]") for index, item in enumerate(items)]
    for index, number in enumerate(numbers):
        if spec.name == "var" and number < 0:
            raise fields.error(f"expected a variance, at least 0, got {number}", f"{spec.name}[{index}]")
    return np.array(numbers, np.float32)


def _breakdown(graph: Graph) -> str:
    """Return the weights and their shapes, to check a size by hand."""
    return ", ".join(f"{weight_key(spec)} {'x'.join(map(str, spec.shape))}" for spec in graph.weights) or "no weights"
