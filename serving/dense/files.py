"""Opens the dense network of a model from its files: layers with weights, or an ONNX file."""

import logging
from pathlib import Path

from kernels.device import Device
from serving.dense.calibration import Calibration
from serving.dense.device_arithmetic import Precision
from serving.dense.device_network import DeviceNetwork, open_device_network
from serving.dense.network import DenseNetwork, check_engine, open_network
from serving.errors import ConfigError, ModelFileError
from serving.model.dense_file import read_dense
from serving.model.graph import is_network_file, read_model_graph
from serving.model.records import Graph
from serving.model.regular_file import MOST_ONNX_BYTES, read_regular
from serving.option_values import Engine

_log = logging.getLogger(__name__)


def open_dense(
    graph_file: Path,
    dense_file: Path,
    onnx_file: Path | None,
    engine: Engine = "auto",
    threads: int = 1,
    calibration: Calibration | None = None,
) -> tuple[Graph, DenseNetwork]:
    """Open the dense network of a model.

    Args:
        graph_file: the layer graph; only the inputs if the network is an ONNX file.
        dense_file: the weights of the graph's layers, or the ONNX file.
        onnx_file: see ``open_network``; no effect if ``dense_file`` is an ONNX file.
        engine: see ``open_network``; an ONNX file needs ONNX Runtime.
        threads: how many threads work on one call in ONNX Runtime.
        calibration: the samples on which the engine int8 is measured; required by that engine.

    Raises:
        ConfigError: the graph is invalid, or ``engine`` cannot run an ONNX file; see also ``open_int8``.
        ModelFileError: the weights or the ONNX file are missing, damaged, or not the graph's.
        MissingExtraError: see ``open_network``; or ``dense_file`` is an ONNX file and ONNX Runtime is missing.
        ValueError: there is no such ``engine``, or its calibration is missing.
    """
    check_engine(engine)
    graph = read_model_graph(graph_file, dense_file)
    if not is_network_file(dense_file):
        weights = read_dense(dense_file, graph)
        _warn_of_logits(graph, graph_file)
        return graph, open_network(graph, weights, engine, onnx_file, threads, calibration)
    if engine == "numpy":
        reason = "an ONNX network runs on ONNX Runtime: engine auto, onnx or int8; the engine numpy cannot run it"
        raise ConfigError(str(dense_file), "", reason)
    from serving.dense.own_network import open_own_network

    network, graph = open_own_network(graph, dense_file, threads)
    if engine != "int8":
        return graph, network
    from serving.dense.int8 import open_int8

    return graph, open_int8(graph, network, dense_file, calibration, threads, str(dense_file))


def open_device_dense(
    graph_file: Path, dense_file: Path, device: Device, precision: Precision = "fp32", use_graphs: bool = True
) -> tuple[Graph, DeviceNetwork]:
    """Open the dense network of a model on a device; see ``open_device_network``. ONNX files are refused."""
    if is_network_file(dense_file):
        reason = "an ONNX network runs on the CPU only; rows of a GPU cache are copied there"
        raise ConfigError(str(dense_file), "", reason)
    graph = read_model_graph(graph_file, dense_file)
    weights = read_dense(dense_file, graph)
    _warn_of_logits(graph, graph_file)
    return graph, open_device_network(graph, weights, device, precision, use_graphs)


def _warn_of_logits(graph: Graph, graph_file: Path) -> None:
    if graph.output == graph.logits and any(output.kind == "probability" for output in graph.outputs):
        _log.warning("%s: ends without Sigmoid or Softmax: the answers are not probabilities", graph_file)


def read_onnx(graph_file: Path, dense_file: Path) -> bytes:
    """Return the dense network of a model as one ONNX model: built from its layers, or its ONNX file unchanged.

    An ONNX file is refused if its weights are in other files. See ``build_onnx`` for the inputs of a built model.
    """
    from serving.dense.onnx import build_onnx
    from serving.dense.onnx_file import has_files_beside
    from serving.dense.own_network import open_own_network

    graph = read_model_graph(graph_file, dense_file)
    if not is_network_file(dense_file):
        return build_onnx(graph, read_dense(dense_file, graph))
    open_own_network(graph, dense_file)
    if has_files_beside(dense_file):
        raise ModelFileError(dense_file, "has weights in files next to it: copy all these files instead of exporting")
    return read_regular(dense_file, MOST_ONNX_BYTES)
