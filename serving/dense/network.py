"""The dense network: a graph and its weights, from dense features and pooled embeddings to probabilities."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from serving.dense.calibration import Calibration, Quantization
from serving.dense.layers import LAYERS, LayerOverride
from serving.dense.primitives import Arithmetic, Array
from serving.errors import MissingExtraError
from serving.model.dense_file import Weights, check_weights
from serving.model.records import Graph, Output
from serving.option_values import Engine

Floats = NDArray[np.float32]

_FLOAT32 = np.dtype(np.float32)  # faster to compare than the type

_log = logging.getLogger(__name__)


class DenseNetwork(Protocol):
    """A graph with weights, ready to run. Several threads may call it at the same time.

    Attributes:
        engine: ``"numpy"``, ``"onnx"`` or ``"int8"``.
        quantization: the error of its 8-bit products; None if it has no 8-bit products.
    """

    engine: str
    quantization: Quantization | None

    def __call__(self, dense: Floats, embeddings: Sequence[Floats], wanted: Sequence[Output] | None = None) -> Floats:
        """Return the answer.

        Args:
            dense: float32[B, F]; B and F may be 0. The masks of sequences follow, in the order of ``Graph.masks``.
            embeddings: float32[B, S, D] per embedding layer, in graph order.
            wanted: the outputs that are needed; the columns of others may be NaN. None: all.

        Returns:
            float32[B, L], C-contiguous, in memory of its own.

        Raises:
            ValueError: an argument has another shape or dtype than the graph says, or B is too small for the graph.
        """


def run_graph(
    graph: Graph,
    weights: Mapping[str, Array],
    tensors: Mapping[str, Array],
    overrides: Mapping[str, LayerOverride] | None = None,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Array]:
    """Run every dense layer once, in order.

    Args:
        graph: the structure. B must be at least 1, and ``graph.least_samples``.
        weights: ``"<layer>.<weight>"`` to array, from the same library as ``tensors``.
        tensors: the dense input and every embedding's top, by name.
        overrides: by layer type, a function that replaces the function in ``serving.dense.layers``.
        arithmetic: multiplies matrices and holds constants; None: the array library does.

    Returns:
        every tensor by name, with the given tensors, ``graph.logits`` and ``graph.output``. Tensors may share memory
        with each other.
    """
    overrides = overrides or {}
    own: dict[str, dict[str, Array]] = {layer.name: {} for layer in graph.layers}
    for spec in graph.stored:
        own[spec.layer][spec.name] = weights[f"{spec.layer}.{spec.name}"]
    made = dict(tensors)
    for layer in graph.layers:
        given = layer.params, [made[name] for name in layer.bottoms], own[layer.name]
        override = overrides.get(layer.type)
        tops = LAYERS[layer.type](*given, arithmetic) if override is None else override(*given)
        made.update(zip(layer.tops, tops, strict=True))
    return made


def input_tensors(graph: Graph, dense: Floats, embeddings: Sequence[Floats]) -> dict[str, Floats]:
    """Check a network's arguments and return them by tensor name; see ``DenseNetwork.__call__``."""
    if len(embeddings) != len(graph.embeddings):
        raise ValueError(f"expected {len(graph.embeddings)} embedding tensors, got {len(embeddings)}")
    tensors = {graph.dense_top: dense[:, : graph.dense_dim] if graph.masks else dense}
    begin = graph.dense_dim
    for mask, columns in graph.masks:
        tensors[mask] = dense[:, begin : begin + columns]
        begin += columns
    tensors.update(zip((embedding.top for embedding in graph.embeddings), embeddings, strict=True))
    samples = dense.shape[0] if dense.ndim else 0
    if too_few := graph.too_few(samples):
        raise ValueError(too_few)
    for name, array in tensors.items():
        expected = (samples, *graph.shapes[name][1:])
        if array.shape != expected or array.dtype != _FLOAT32:
            raise ValueError(f"{name}: expected float32 {list(expected)}, got {array.dtype} {list(array.shape)}")
    return tensors


class NumpyNetwork:
    """The reference: NumPy and its BLAS, which chooses its own number of threads. See ``DenseNetwork``."""

    engine = "numpy"
    quantization: Quantization | None = None

    def __init__(self, graph: Graph, weights: Weights) -> None:
        """Keep the graph and its weights, and do not change the arrays later; wrong weights are a ValueError."""
        check_weights(graph, weights)
        self._graph = graph
        self._weights = weights

    def __call__(self, dense: Floats, embeddings: Sequence[Floats], wanted: Sequence[Output] | None = None) -> Floats:
        """See ``DenseNetwork.__call__``."""
        tensors = input_tensors(self._graph, dense, embeddings)
        if not dense.shape[0]:
            return np.empty((0, self._graph.label_dim), np.float32)
        with np.errstate(all="ignore"):  # an overflow shows in the answer, as in ONNX Runtime
            output = run_graph(self._graph, self._weights, tensors)[self._graph.output]
        return np.ascontiguousarray(output, dtype=np.float32)


def check_engine(engine: str) -> None:
    """Raise ValueError if there is no such engine."""
    if engine not in get_args(Engine):
        raise ValueError(f"expected engine auto, numpy, onnx or int8, got {engine!r}")


def open_network(
    graph: Graph,
    weights: Weights,
    engine: Engine = "auto",
    onnx_file: str | Path | None = None,
    threads: int = 1,
    calibration: Calibration | None = None,
) -> DenseNetwork:
    """Return the network that runs ``graph``.

    Args:
        graph: the structure.
        weights: its weights.
        engine: ``"numpy"``; ``"onnx"`` for ONNX Runtime; ``"int8"`` for ONNX Runtime with 8-bit products, see
            ``open_int8``; ``"auto"`` for ONNX Runtime if it is installed and has a model to run, otherwise NumPy.
        onnx_file: the model that ``build_onnx`` made. A model of another graph or of other weights is not used. Then
            the model is built again, which needs ndonnx. None: always build.
        threads: how many threads work on one call in ONNX Runtime.
        calibration: the samples on which the engine int8 is measured; required by that engine.

    Raises:
        MissingExtraError: ``engine`` is ``"onnx"`` or ``"int8"``, and ONNX Runtime or a package that builds the model
            is missing.
        ConfigError: see ``open_int8``.
        ValueError: the weights are not the graph's, there is no such ``engine``, or its calibration is missing.
    """
    check_engine(engine)
    check_weights(graph, weights)
    if engine == "numpy":
        return NumpyNetwork(graph, weights)
    from serving.dense.onnx import open_onnx  # here, because it imports this module

    try:
        network, model = open_onnx(graph, weights, onnx_file, threads)
    except MissingExtraError as err:
        if engine != "auto":
            raise
        _log.info("%s; the dense network runs on NumPy", err)
        return NumpyNetwork(graph, weights)
    if engine != "int8":
        return network
    from serving.dense.int8 import open_int8

    return open_int8(graph, network, model, calibration, threads, graph.source)
