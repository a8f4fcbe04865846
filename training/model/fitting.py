"""Built-in networks in other sizes: their inputs follow the features of the data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serving.errors import ConfigError
from training.model.document import TrainingDocument, open_document, parse_document

# The built-in networks that read Criteo's columns from one table, and the sizes in their files.
_FITTING = ("dcn", "dcn_v2", "deepfm", "dlrm", "wdl")
_SLOTS, _DENSE, _DIM = 26, 13, 16
_SIZED = {
    *("slot_num", "max_feature_num_per_sample", "dense_dim", "leading_dim", "ranges", "weight_dims", "out_dim"),
    *("embedding_vec_size", "num_output"),
}
_NEED_DENSE = ("WeightMultiply", "Interaction")


def is_fitting(document: TrainingDocument) -> bool:
    """Whether a network can have other sizes. In a graph of your own, an equal number may mean something else."""
    return document.name in _FITTING and document.document == open_document(document.name).document


def fitted(document: TrainingDocument, slots: int, dense: int, most_keys: int, dim: int = _DIM) -> TrainingDocument:
    """Return a network whose inputs have other sizes.

    Args:
        document: a network that ``is_fitting``.
        slots: S, at least 1.
        dense: F.
        most_keys: of a sample.
        dim: D.

    Raises:
        ConfigError: the network cannot have these sizes.
    """
    types = {layer["type"] for layer in document.document["layers"]}
    if not dense and types.intersection(_NEED_DENSE):
        reason = "the network needs a dense feature, and the data has none; take another, such as --model dcn"
        raise ConfigError(document.name, "layers", reason)
    sizes = {
        _SLOTS: slots,
        _DENSE: dense,
        _DIM: dim,
        _DIM + 1: dim + 1,
        _SLOTS * _DIM: slots * dim,
        _SLOTS * _DIM + _DENSE: slots * dim + dense,
        (_SLOTS + _DENSE) * _DIM: (slots + dense) * dim,
    }
    layers = [_sized(layer, sizes) for layer in document.document["layers"]]
    layers[0]["sparse"][0]["max_feature_num_per_sample"] = most_keys
    if not dense:
        layers = _without(document.graph.dense_top, layers)
    return replace(parse_document({**document.document, "layers": layers}, document.graph.source), name=document.name)


def _without(top: str, layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take an input out of the Concat layers. A layer of one input is left out, and the input takes its place."""
    kept, renamed = [], dict[str, str]()
    for layer in layers:
        if layer["type"] == "Concat":
            layer["bottom"] = [bottom for bottom in layer["bottom"] if bottom != top]
            if len(layer["bottom"]) == 1:
                renamed[layer["top"]] = layer["bottom"][0]
                continue
        if isinstance(layer.get("bottom"), str):
            layer["bottom"] = renamed.get(layer["bottom"], layer["bottom"])
        elif "bottom" in layer:
            layer["bottom"] = [renamed.get(bottom, bottom) for bottom in layer["bottom"]]
        kept.append(layer)
    return kept


def _sized(value: Any, sizes: Mapping[int, int], key: str = "") -> Any:
    """Return a copy of a part of the JSON with other sizes in it."""
    if isinstance(value, dict):
        return {name: _sized(member, sizes, name) for name, member in value.items()}
    if isinstance(value, list):
        return [_sized(item, sizes, key) for item in value]
    return sizes.get(value, value) if key in _SIZED and isinstance(value, int) else value
