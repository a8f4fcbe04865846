"""From a model's files to its dense network, whichever form they have."""

import dataclasses
import logging
from pathlib import Path

from kernels.device import Device
from serving.dense.calibration import Calibration
from serving.dense.device_arithmetic import Precision
from serving.dense.device_network import DeviceNetwork, open_device_network
from serving.dense.network import DenseNetwork, Engine, check_engine, open_network
from serving.errors import ConfigError, ModelFileError
from serving.model.dense_file import read_dense
from serving.model.graph import is_network_file, read_model_graph
from serving.model.records import Graph

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
        graph_file: the layer graph; of a network that is an ONNX file, its inputs.
        dense_file: the weights of the graph's layers, or the ONNX file.
        onnx_file: see ``open_network``; of no use to an ONNX file.
        engine: see ``open_network``; an ONNX file runs on ONNX Runtime only.
        threads: of one call in ONNX Runtime.
        calibration: what the engine int8 is measured on; it needs one.

    Raises:
        ConfigError: the graph cannot be accepted, or ``engine`` cannot run an ONNX file; or see ``open_int8``.
        ModelFileError: the weights or the ONNX file are missing, damaged, or not the graph's.
        MissingExtraError: see ``open_network``; also where ``dense_file`` is an ONNX file and ONNX Runtime missing.
        ValueError: there is no such ``engine``, or it lacks its calibration.
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

    network, mixes_samples = open_own_network(graph, dense_file, threads)
    graph = dataclasses.replace(graph, mixes_samples=mixes_samples)
    if engine != "int8":
        return graph, network
    from serving.dense.int8 import open_int8

    return graph, open_int8(graph, network, dense_file, calibration, threads, str(dense_file))


def open_device_dense(
    graph_file: Path, dense_file: Path, device: Device, precision: Precision = "fp32", use_graphs: bool = True
) -> tuple[Graph, DeviceNetwork]:
    """Open the dense network of a model on a device; see ``open_device_network``.

    Raises:
        ConfigError: the graph cannot be accepted, the network is an ONNX file, which ``open_dense`` runs, or a weight
            is too large for fp16.
        DeviceUnavailableError: cuBLAS is missing.
        ModelFileError: the weights are missing, damaged, or not the graph's.
        ValueError: there is no such precision.
    """
    if is_network_file(dense_file):
        reason = "an ONNX network runs on the CPU, where the rows of a GPU's cache are copied to; no GPU can run it"
        raise ConfigError(str(dense_file), "", reason)
    graph = read_model_graph(graph_file, dense_file)
    weights = read_dense(dense_file, graph)
    _warn_of_logits(graph, graph_file)
    return graph, open_device_network(graph, weights, device, precision, use_graphs)


def _warn_of_logits(graph: Graph, graph_file: Path) -> None:
    if graph.output == graph.logits:
        _log.warning("%s: ends without Sigmoid or Softmax: the answers are no probabilities", graph_file)


def read_onnx(graph_file: Path, dense_file: Path) -> bytes:
    """Return the dense network of a model as one ONNX model: built of its layers, or its ONNX file as it is.

    Inputs are called as in the graph, those that nobody reads left out; see ``build_onnx``.

    Raises:
        ConfigError: the graph cannot be accepted.
        ModelFileError: the weights or the ONNX file are missing, damaged, or not the graph's, or the weights of the
            ONNX file are in files beside it.
        MissingExtraError: a package of the extra ``onnx`` is not installed.
    """
    from serving.dense.onnx import build_onnx
    from serving.dense.onnx_file import has_files_beside
    from serving.dense.own_network import open_own_network

    graph = read_model_graph(graph_file, dense_file)
    if not is_network_file(dense_file):
        return build_onnx(graph, read_dense(dense_file, graph))
    open_own_network(graph, dense_file)
    if has_files_beside(dense_file):
        raise ModelFileError(dense_file, "has weights in files beside it: copy them all instead of exporting")
    return dense_file.read_bytes()
