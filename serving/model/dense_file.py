"""HugeCTR's dense model file: every dense weight, and nothing else.

Format (HugeCTR v3.0 to v24.06): little-endian float32 without header or padding; the weights of ``graph.weights``
one after the other, each row-major. What is not trained lies in a file beside it: ``serving.model.statistics_file``.
"""

import logging
import math
import os
from pathlib import Path

import numpy as np

from serving.errors import ModelFileError
from serving.model.atomic import atomic_write
from serving.model.dense_weights import Weights, check_weights, weight_key
from serving.model.records import Graph
from serving.model.statistics_file import read_statistics, write_statistics

__all__ = ["Weights", "check_weights", "read_dense", "weight_key", "write_dense"]

_log = logging.getLogger(__name__)


def read_dense(path: str | Path, graph: Graph) -> Weights:
    """Read all weights of ``graph``, and from the file beside it the statistics of its BatchNorm layers.

    A weight that is NaN or infinite is logged as a warning: the file is what it says it is, its model is broken.

    Raises:
        ModelFileError: the file is missing, or has not exactly the bytes that the graph's weights need; or the file
            beside it is not the graph's.
    """
    expected_bytes = 4 * sum(math.prod(spec.shape) for spec in graph.weights)
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a pipe would wait for ever
            raise ModelFileError(path, "not a regular file")
        with Path(path).open("rb") as file:
            found_bytes = os.fstat(file.fileno()).st_size
            if found_bytes != expected_bytes:  # before reading: another file may be larger than memory
                reason = f"expected {expected_bytes:,} bytes ({_breakdown(graph)}), found {found_bytes:,} bytes"
                raise ModelFileError(path, reason)
            floats = np.fromfile(file, dtype="<f4").astype(np.float32, copy=False)
    except FileNotFoundError as err:
        raise ModelFileError(path, "no such file") from err
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
    return {**weights, **read_statistics(path, graph)}


def write_dense(path: str | Path, graph: Graph, weights: Weights) -> None:
    """Write all weights of ``graph``, and its statistics beside them; a file is replaced at once or not at all.

    Raises:
        ModelFileError: a weight is missing, unknown, of another shape or of another dtype, or the disk refuses.
    """
    try:
        check_weights(graph, weights)
    except ValueError as err:
        raise ModelFileError(path, str(err)) from err
    try:
        write_statistics(path, graph, weights)
        with atomic_write(path) as file:
            for spec in graph.weights:
                file.write(np.ascontiguousarray(weights[weight_key(spec)], dtype="<f4").tobytes())
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err


def _breakdown(graph: Graph) -> str:
    """Return the weights and their shapes, the way a reader would check a size by hand."""
    return ", ".join(f"{weight_key(spec)} {'x'.join(map(str, spec.shape))}" for spec in graph.weights) or "no weights"
