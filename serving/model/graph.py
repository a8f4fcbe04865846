"""The layer graph: HugeCTR's JSON, read once, checked completely, and turned into records.

The input is a hand-written v3.0 configuration, for training or inference, or a graph that v3.1 to v24.06 exports. A
training graph becomes its inference graph: a loss becomes the activation that turns logits into answers.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from serving.errors import ModelFileError
from serving.model.graph_reader import ACTIVATION_OF_LOSS, GraphReader
from serving.model.layer_types import cross_weights
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
    "name_inputs",
    "parse_graph",
    "read_graph",
    "read_model_graph",
    "with_projection",
]

_CLAUSES = ("layers", "inference", "solver", "optimizer", "model_name")
_NETWORK_SUFFIX = ".onnx"


def read_graph(path: str | Path) -> Graph:
    """Read a graph file. See ``parse_graph``."""
    return parse_graph(read_json(path), str(path))


def is_network_file(dense_file: str | Path) -> bool:
    """Return whether a model's dense file is a whole ONNX network, not only the weights of the layers."""
    return Path(dense_file).suffix == _NETWORK_SUFFIX


def read_model_graph(graph_file: str | Path, dense_file: str | Path) -> Graph:
    """Read a model's graph, with the layers that fit its weights, or only the inputs of its ONNX network.

    Raises:
        ConfigError: see ``parse_graph``.
        ModelFileError: see ``with_projection``.
    """
    if is_network_file(dense_file):
        return parse_graph(read_json(graph_file), str(graph_file), inputs_only=True)
    return with_projection(read_graph(graph_file), dense_file)


def parse_graph(document: Any, source: str, inputs_only: bool = False) -> Graph:
    """Turn a JSON document into a graph. With ``inputs_only`` an ONNX file is the network, so no layers follow.

    The clauses ``inference``, ``solver``, ``optimizer`` and the ``model_name`` of an exported graph are ignored.

    Raises:
        ConfigError: the document has an unknown key, a wrong type or value, an unsupported layer, a bottom that no
            earlier layer makes, a top made twice, or shapes that do not fit. Or it has no network, or two. The message
            names the JSON path.
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
    """Return the inference form of a training document: each loss becomes its activation.

    The labels stay. ``solver``, ``optimizer`` and the paths of training data are removed. An inference document is
    copied. ``parse_graph`` makes the same records of both forms, and raises the same errors.
    """
    graph = parse_graph(document, "")
    result = copy.deepcopy({key: value for key, value in document.items() if key not in ("solver", "optimizer")})
    layers = result["layers"]
    for key in ("source", "eval_source"):
        layers[0].pop(key, None)
    losses = {f"layers[{index}]" for index, layer in enumerate(layers) if layer["type"] in ACTIVATION_OF_LOSS}
    result["layers"] = [layer for layer in layers if layer["type"] not in ACTIVATION_OF_LOSS] + [
        {
            "name": layer.name,
            "type": layer.type,
            "bottom": layer.bottoms[0],
            "top": layer.tops[0],
            **{key: list(values) for key, values in layer.params.items()},
        }
        for layer in graph.layers
        if layer.path in losses
    ]
    return result


def name_inputs(
    document: dict[str, Any], slots: Sequence[str], dense: Sequence[str], labels: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a graph's document whose inputs have names, so that requests may have keys and numbers by name.

    Args:
        document: the graph.
        slots: of all sparse inputs, in order. Slots with the same name have the same keys.
        dense: F names.
        labels: L names; empty: the labels keep those that they have.
    """
    data, *layers = document["layers"]
    left = iter(slots)
    data = {
        **data,
        "dense": {**data["dense"], "names": list(dense)},
        "sparse": [{**entry, "names": list(islice(left, entry["slot_num"]))} for entry in data["sparse"]],
        **({"label": {**data.get("label", {"label_dim": 1}), "names": list(labels)}} if labels else {}),
    }
    return {**document, "layers": [data, *layers]}


def _quoted_name(fields: Fields) -> str:
    """Return the text after a layer's place in messages: its name, or its first top if it has no name."""
    top = fields.value("top", "")
    for name in (fields.value("name", ""), top[0] if isinstance(top, list) and top else top):
        if isinstance(name, str) and name:
            return f" {describe(name)}"
    return ""


def with_projection(graph: Graph, dense_file: str | Path) -> Graph:
    """Return the graph that fits the size of the dense file: ``graph``, or one with MultiCross version 2.

    HugeCTR's exporter omits ``projection_dim`` up to v24.06, so a cross network of version 2 (matrices) looks like one
    of version 1 (vectors). A file that fits neither is left to ``read_dense``.

    Raises:
        ModelFileError: the file is too large for version 1, and several layers could be of version 2.
    """
    silent = [layer for layer in graph.layers if _is_silent_cross(layer)]
    path = Path(dense_file)
    if not silent or not path.is_file():
        return graph
    more_bytes = path.stat().st_size - 4 * sum(math.prod(spec.shape) for spec in graph.weights)
    if more_bytes <= 0:
        return graph
    if len(silent) > 1:
        places = ", ".join(f"{layer.path} ({layer.name})" for layer in silent)
        reason = f"{more_bytes:,} bytes too many for a graph without projection_dim; add it to mc_param of {places}"
        raise ModelFileError(path, reason)
    return _with_rank(graph, silent[0], more_bytes)


def _is_silent_cross(layer: Layer) -> bool:
    return layer.type == "MultiCross" and layer.params["projection_dim"] is None


def _with_rank(graph: Graph, layer: Layer, more_bytes: int) -> Graph:
    """Return ``graph`` with the ``projection_dim`` of ``layer`` that needs ``more_bytes``, if there is one."""
    depth = layer.params["num_layers"]
    columns = next(spec.shape[0] for spec in graph.weights if spec.layer == layer.name)
    # a level has two matrices of 2 * columns * rank floats instead of a vector of columns floats
    ratio, rest = divmod(more_bytes, 4 * depth * columns)
    if rest or ratio % 2 == 0:
        return graph
    rank = (ratio + 1) // 2
    wide = dataclasses.replace(layer, params={**layer.params, "projection_dim": rank})
    before = [spec.layer for spec in graph.weights].index(layer.name)
    own = [WeightSpec(layer.name, name, shape) for name, shape in cross_weights(columns, depth, rank)]
    weights = [*graph.weights[:before], *own, *graph.weights[before + 2 * depth :]]
    layers = tuple(wide if other is layer else other for other in graph.layers)
    return dataclasses.replace(graph, layers=layers, weights=tuple(weights))
