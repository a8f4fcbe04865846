"""The dense network on ONNX Runtime: builds the model from the layers and runs it.

onnxruntime, ndonnx, spox and onnx are imported only when a model is built or opened.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serving.dense.calibration import Quantization
from serving.dense.network import Floats, input_tensors, run_graph
from serving.dense.onnx_signature import flat_inputs
from serving.dense.runtime import import_runtime, one_line, open_session, refusals
from serving.errors import MissingExtraError, ModelFileError, RequestError
from serving.model.dense_file import Weights, check_weights, weight_key
from serving.model.records import Graph, Output
from serving.model.regular_file import MOST_ONNX_BYTES, read_regular

_log = logging.getLogger(__name__)

DIGEST_PROPERTY = "hotrow_digest"
_LAYERS_VERSION = 1  # raise it when a layer's result changes, so older files are not used
_IR_VERSION = 10  # of ONNX 1.16, the release of opset 21: older runtimes refuse newer versions


def network_digest(graph: Graph, weights: Weights) -> str:
    """Return the SHA-256 of everything that affects a dense network's answer, as hexadecimal text."""
    structure = {
        "layers_version": _LAYERS_VERSION,
        "inputs": [[graph.dense_top, graph.dense_dim], *([e.top, e.slots, e.dim] for e in graph.embeddings)],
        "layers": [[layer.type, layer.name, layer.bottoms, layer.tops, dict(layer.params)] for layer in graph.layers],
        "output": graph.output,
    }
    digest = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for spec in graph.stored:
        digest.update(np.ascontiguousarray(weights[weight_key(spec)], dtype="<f4").data)
    return digest.hexdigest()


def build_onnx(graph: Graph, weights: Weights) -> bytes:
    """Trace the layers once and return the ONNX model.

    The inputs are the dense tensor, float32[B, F], and each embedding's top, float32[B, S, D], with their names in the
    graph; inputs that no layer reads are left out. The output is ``graph.output``, float32[B, L]. B is free. The
    metadata property ``hotrow_digest`` is ``network_digest``.

    Raises:
        MissingExtraError: ndonnx or spox is not installed.
        ValueError: the weights are not the graph's.
    """
    check_weights(graph, weights)
    try:
        import ndonnx

        import serving.dense.tracing  # noqa: F401  ``primitives`` would import it while the graph is traced
    except ImportError as err:
        raise MissingExtraError((err.name or "ndonnx").partition(".")[0], "onnx", "building an ONNX model") from err
    read = {bottom for layer in graph.layers for bottom in layer.bottoms}
    inputs = {
        name: ndonnx.argument(shape=("B", *graph.shapes[name][1:]), dtype=ndonnx.float32)
        for name in (graph.dense_top, *dict(graph.masks), *(embedding.top for embedding in graph.embeddings))
        if name in read
    }
    # Weights stay NumPy arrays, so values computed from weights alone become constants of the model.
    output = run_graph(graph, weights, inputs)[graph.output]
    model = ndonnx.build(inputs, {graph.output: output})
    model.ir_version = _IR_VERSION
    model.metadata_props.add(key=DIGEST_PROPERTY, value=network_digest(graph, weights))
    content: bytes = model.SerializeToString()
    del inputs, output, model
    gc.collect()  # the traced objects refer to each other and to the weights
    return content


class OnnxNetwork:
    """One ONNX Runtime session. See ``DenseNetwork``.

    Attributes:
        inputs: names of the tensors that the model reads, as in the graph.
        parts: by the name of an output, the network that answers it alone, with fewer nodes.
    """

    engine = "onnx"
    quantization: Quantization | None = None

    def __init__(
        self,
        graph: Graph,
        model: bytes | Path,
        threads: int = 1,
        source: str = "the ONNX model",
    ) -> None:
        """Open a model that ``build_onnx`` made from ``graph``, or a model that a user made for the graph's inputs.

        Raises ModelFileError if ``model`` is not an ONNX model that this ONNX Runtime can run, or if its inputs or
        output do not match ``graph``.
        """
        self._graph = graph
        self.parts: Mapping[str, OnnxNetwork] = {}
        self._session = open_session(model, threads, source)
        self._refusals = refusals()
        try:
            is_flat = flat_inputs(self._session, graph, source)
            self._outputs = [output.name for output in self._session.get_outputs()]
        except UnicodeDecodeError as err:
            raise ModelFileError(source, f"the name of an input or output is not UTF-8: {err}") from err
        self.inputs = tuple(is_flat)
        self._flat = {
            embedding.top: embedding.slots * embedding.dim
            for embedding in graph.embeddings
            if is_flat.get(embedding.top)
        }

    @classmethod
    def from_file(cls, graph: Graph, weights: Weights, path: str | Path, threads: int = 1) -> "OnnxNetwork":
        """Open a file that ``build_onnx`` made from exactly this graph and these weights, or raise ModelFileError."""
        try:
            model = read_regular(path, MOST_ONNX_BYTES)
        except OSError as err:
            raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
        network = cls(graph, model, threads, str(path))
        found, expected = network.digest, network_digest(graph, weights)
        if found != expected:
            raise ModelFileError(path, f"{DIGEST_PROPERTY}: expected {expected}, found {found or 'none'}")
        return network

    @property
    def digest(self) -> str:
        """The ``network_digest`` in the model's metadata; empty if there is none."""
        return str(self._session.get_modelmeta().custom_metadata_map.get(DIGEST_PROPERTY, ""))

    def __call__(self, dense: Floats, embeddings: Sequence[Floats], wanted: Sequence[Output] | None = None) -> Floats:
        """See ``DenseNetwork.__call__``.

        Raises:
            RequestError: a user's model cannot run on these values, or does not answer once per sample.
        """
        shape = (dense.shape[0], self._graph.label_dim)
        if wanted and len(wanted) == 1 and wanted[0].name in self.parts:
            values = np.full(shape, np.nan, np.float32)
            values[:, wanted[0].columns] = self.parts[wanted[0].name](dense, embeddings)
            return values
        feeds = self.feeds(dense, embeddings)
        if not shape[0]:
            return np.empty(shape, np.float32)
        try:
            output: Floats = self._session.run(self._outputs, feeds)[0]
        except self._refusals as err:
            raise RequestError(f"the network cannot run on this batch: {one_line(err)}") from err
        if output.shape == shape:
            return output
        if output.shape == shape[:1] and shape[1] == 1:
            return output.reshape(shape)
        raise RequestError(f"the network answers with the shape {list(output.shape)}, expected {list(shape)}")

    def feeds(self, dense: Floats, embeddings: Sequence[Floats]) -> dict[str, Floats]:
        """Check the arguments of a call and return them as the model's inputs; see ``DenseNetwork.__call__``."""
        tensors = input_tensors(self._graph, dense, embeddings)
        for name, width in self._flat.items():
            tensors[name] = tensors[name].reshape(-1, width)
        return {name: tensors[name] for name in self.inputs}


def open_onnx(
    graph: Graph, weights: Weights, onnx_file: str | Path | None, threads: int
) -> tuple[OnnxNetwork, bytes | Path]:
    """Open ``onnx_file`` if it was made from this graph and these weights, otherwise build the model.

    Returns:
        the network, and its model: the file or the built model.
    """
    import_runtime()  # first, because building a model takes time
    if onnx_file is not None:
        try:
            return OnnxNetwork.from_file(graph, weights, onnx_file, threads), Path(onnx_file)
        except ModelFileError as err:
            _log.warning("%s; building the model again", err)
    model = build_onnx(graph, weights)
    return OnnxNetwork(graph, model, threads), model
