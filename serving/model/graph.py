"""The layer graph: HugeCTR's JSON read once, checked wholly, and turned into records.

Read are the hand-written v3.0 training and inference configurations and the graphs that v3.1 to v24.06 export. A
training graph is read as the inference graph it becomes: a loss is the activation that turns logits into
probabilities.
"""

import copy
from pathlib import Path
from typing import Any

from serving.model.graph_reader import ACTIVATION_OF_LOSS, GraphReader
from serving.model.projection import with_projection
from serving.model.records import B, Embedding, Graph, Layer, Samples, Shape, SparseInput, WeightSpec
from serving.model.strict_json import Fields, describe, read_json

__all__ = [
    "B",
    "Embedding",
    "Graph",
    "Layer",
    "Samples",
    "Shape",
    "SparseInput",
    "WeightSpec",
    "inference_document",
    "is_network_file",
    "parse_graph",
    "read_graph",
    "read_model_graph",
]

_CLAUSES = ("layers", "inference", "solver", "optimizer", "model_name")
_NETWORK_SUFFIX = ".onnx"


def read_graph(path: str | Path) -> Graph:
    """Read a graph file; see ``parse_graph``."""
    return parse_graph(read_json(path), str(path))


def is_network_file(dense_file: str | Path) -> bool:
    """Whether a model's dense file is a whole network, an ONNX file, and not only the weights of the graph's layers."""
    return Path(dense_file).suffix == _NETWORK_SUFFIX


def read_model_graph(graph_file: str | Path, dense_file: str | Path) -> Graph:
    """Read the graph of a model: with the layers that fit its weights, or the inputs of its ONNX network.

    Raises:
        ConfigError: see ``parse_graph``.
        ModelFileError: see ``with_projection``.
    """
    if is_network_file(dense_file):
        return parse_graph(read_json(graph_file), str(graph_file), inputs_only=True)
    return with_projection(read_graph(graph_file), dense_file)


def parse_graph(document: Any, source: str, inputs_only: bool = False) -> Graph:
    """Turn a JSON document into a graph.

    The clauses ``inference``, ``solver`` and ``optimizer`` are not looked at, nor is the ``model_name`` of an exported
    graph.

    Args:
        document: the JSON as Python objects; it is not changed.
        source: the file it came from, for messages.
        inputs_only: the network is an ONNX file, and the document has Data and the embedding layers alone.

    Raises:
        ConfigError: the document has an unknown member, a wrong type or value, an unsupported layer, a bottom that
            no earlier layer makes, a top made twice, or shapes that do not fit, or it describes a network where there
            is one already or none where there must be one; the message names the JSON path.
    """
    root = Fields(document, source, "", _CLAUSES)
    layers = list(root.objects("layers"))
    for fields in layers:
        fields.shown += _quoted_name(fields)
    if layers[0].text("type") != "Data":
        raise layers[0].error(f"the first layer must be Data, got {layers[0].text('type')}", "type")
    reader = GraphReader(layers)
    if len(layers) == 1:
        raise root.error("expected more layers after Data", "layers")
    return reader.read_inputs(source) if inputs_only else reader.read(source)


def inference_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return the inference form of a training document: each loss becomes its activation; the labels stay.

    ``solver``, ``optimizer`` and the paths of training data are left out. An inference document comes back as a copy.
    ``parse_graph`` makes the same records of both forms.

    Raises:
        ConfigError: ``parse_graph`` does not accept the document.
    """
    graph = parse_graph(document, "")
    result = copy.deepcopy({key: value for key, value in document.items() if key not in ("solver", "optimizer")})
    layers = result["layers"]
    for key in ("source", "eval_source"):
        layers[0].pop(key, None)
    losses = {f"layers[{index}]" for index, layer in enumerate(layers) if layer["type"] in ACTIVATION_OF_LOSS}
    result["layers"] = [layer for layer in layers if layer["type"] not in ACTIVATION_OF_LOSS] + [
        {"name": layer.name, "type": layer.type, "bottom": layer.bottoms[0], "top": layer.tops[0]}
        for layer in graph.layers
        if layer.path in losses
    ]
    return result


def _quoted_name(fields: Fields) -> str:
    """Return what follows a layer's place in messages: its name or, without one, its first top."""
    top = fields.value("top", "")
    for name in (fields.value("name", ""), top[0] if isinstance(top, list) and top else top):
        if isinstance(name, str) and name:
            return f" {describe(name)}"
    return ""
