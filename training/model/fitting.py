"""Built-in networks in other sizes: their inputs follow the features of the data."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from serving.errors import ConfigError
from training.model.document import TrainingDocument, open_document, parse_document
from training.model.sequences import Sequences, fitted_sequences

_DIM = 16
#: The sizes in the files of the networks that read Criteo's columns from one table.
_SLOTS, _DENSE = 26, 13
_SIZED = ("slot_num", "dense_dim", "leading_dim", "ranges", "weight_dims", "out_dim", "embedding_vec_size")
_NEED_DENSE = ("WeightMultiply", "Interaction")
#: The first layers of the blocks of each deep network whose widths ``--hidden`` replaces.
_HIDDEN = {
    "bst": ("fc1", "fc2"),
    "dcn": ("fc1", "fc2"),
    "dcn_v2": ("fc1", "fc2"),
    "deepfm": ("fc1", "fc2"),
    "din": ("fc1", "fc2"),
    "dlrm": ("fc3", "fc4"),
    "mmoe": ("tower1_fc1",),
    "ncf": ("fc1", "fc2", "fc3"),
    "wdl": ("fc1", "fc2"),
}
_FIRST_TASK = re.compile("(gate|mixture|tower|experts)1")  # in the names of MMoE's layers

Layers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a network.

    Attributes:
        slots: S, at least 1.
        dense: F.
        most_keys: of a sample, without those of sequences.
        labels: the columns of the labels.
        dim: D; None: 16.
        hidden: the widths of the deep network; empty: the network's own.
        sequences: the features of DIN and BST; None for other networks.
    """

    slots: int
    dense: int
    most_keys: int
    labels: tuple[str, ...]
    dim: int | None = None
    hidden: tuple[int, ...] = ()
    sequences: Sequences | None = None


def is_fitting(document: TrainingDocument) -> bool:
    """Whether a network can have other sizes. In a graph of your own, an equal number may mean something else."""
    return document.name in _HIDDEN and document.document == open_document(document.name).document


def fitted(document: TrainingDocument, sizes: Sizes) -> TrainingDocument:
    """Return a network whose inputs have other sizes. Except in NCF, DIN and BST, one table has all slots.

    Args:
        document: a network that ``is_fitting``.
        sizes: of the features and the labels.

    Raises:
        ConfigError: the network cannot have these sizes.
    """
    if document.name != "mmoe" and len(sizes.labels) != 1:
        reason = f"expected one label, got {', '.join(sizes.labels)}; --model mmoe learns several"
        raise ConfigError(document.name, "layers[0].label", reason)
    layers: Layers = deepcopy(document.document["layers"])
    if sizes.hidden:
        layers = _with_hidden(layers, _HIDDEN[document.name], sizes.hidden)
    dim = sizes.dim or _DIM
    if sizes.sequences is not None:
        layers = fitted_sequences(layers, document.name, sizes.sequences, sizes.most_keys, sizes.dense, dim)
    elif document.name == "ncf":
        layers = _fitted_ncf(layers, sizes, dim)
    elif document.name == "mmoe":
        layers = _fitted_mmoe(layers, sizes, dim)
    else:
        layers = _fitted_wide(layers, sizes, dim, document.name)
    return replace(parse_document({**document.document, "layers": layers}, document.graph.source), name=document.name)


def _fitted_wide(layers: Layers, sizes: Sizes, dim: int, name: str) -> Layers:
    if not sizes.dense and any(layer["type"] in _NEED_DENSE for layer in layers):
        reason = "the network needs a dense feature, and the data has none; take another, such as --model dcn"
        raise ConfigError(name, "layers", reason)
    slots, dense = sizes.slots, sizes.dense
    numbers = {
        _SLOTS: slots,
        _DENSE: dense,
        _DIM: dim,
        _DIM + 1: dim + 1,
        _SLOTS * _DIM: slots * dim,
        _SLOTS * _DIM + _DENSE: slots * dim + dense,
        (_SLOTS + _DENSE) * _DIM: (slots + dense) * dim,
    }
    layers = [_sized(layer, numbers) for layer in layers]
    for layer in layers:  # DLRM makes one more vector of the dense features
        if layer["type"] == "InnerProduct" and layer["name"] == "fc2" and name == "dlrm":
            layer["fc_param"]["num_output"] = dim
    layers[0]["sparse"][0]["max_feature_num_per_sample"] = sizes.most_keys
    return layers if dense else _without(layers[0]["dense"]["top"], layers)


def _fitted_ncf(layers: Layers, sizes: Sizes, dim: int) -> Layers:
    if sizes.slots != 2 or sizes.dense:
        reason = f"the data has {sizes.slots} features with keys and {sizes.dense} dense"
        expected = "expected two features with keys, a user and an item, and no dense feature"
        raise ConfigError("ncf", "layers[0].sparse", f"{expected}; {reason}; take another network, such as --model dcn")
    product = max(dim // 2, 1)
    layers = [_sized(layer, {8: product, 16: dim, 24: product + dim}) for layer in layers]
    for entry in layers[0]["sparse"]:
        entry["max_feature_num_per_sample"] = sizes.most_keys
    return layers


def _fitted_mmoe(layers: Layers, sizes: Sizes, dim: int) -> Layers:
    """Put all slots into one table, and copy the second task for each label after it."""
    history = ("sparse_embedding_history", "reshape_history")
    layers = _without("reshape_history", [layer for layer in layers if layer["name"] not in history])
    width = sizes.slots * dim + sizes.dense
    numbers = {2: sizes.dense, 3: sizes.slots, 16: dim, 48: sizes.slots * dim, 66: width}
    data, *rest = [_sized(layer, numbers) for layer in layers]
    del data["sparse"][1]
    data["sparse"][0]["max_feature_num_per_sample"] = sizes.most_keys
    if not sizes.dense:
        rest = _without(data["dense"]["top"], rest)
    taken = {name for layer in rest if "Loss" not in layer["type"] for name in _names(layer["top"])} | {
        "dense",
        "profile",
    }
    labels = [f"label_{label}" if label in taken else label for label in sizes.labels]
    data["label"] = {"top": labels, "label_dim": [1] * len(labels)}
    first_task = [layer for layer in rest if _is_of_task(layer, "1")]
    of_tasks = ("1", "2")
    shared = [
        layer
        for layer in rest
        if not any(_is_of_task(layer, task) for task in of_tasks) and not layer["type"].endswith("Loss")
    ]
    for layer in shared:
        if layer["type"] == "Slice":
            prefix = "experts" if layer["name"] == "slice_experts" else "to_gate"
            kept = [top for top in layer["top"] if top == "to_experts"]
            layer["top"] = [*kept, *(f"{prefix}{task}" for task in range(1, len(labels) + 1))]
            layer["ranges"] = [layer["ranges"][0]] * len(layer["top"])
    tasks, losses = Layers(), Layers()
    for task, label in enumerate(labels, 1):
        tasks += [_of_task(layer, task) for layer in first_task]
        losses.append(
            {
                "name": f"loss{task}",
                "type": "BinaryCrossEntropyLoss",
                "bottom": [f"tower{task}_fc2", label],
                "top": f"loss{task}",
            }
        )
    return [data, *shared, *tasks, *losses]


def _is_of_task(layer: Mapping[str, Any], task: str) -> bool:
    return any(layer["name"].startswith(f"{part}{task}") for part in ("gate", "mixture", "reshape_mixture", "tower"))


def _of_task(layer: dict[str, Any], task: int) -> dict[str, Any]:
    """Return a copy of a layer of the first task for another task."""
    return _renamed(layer, lambda name: _FIRST_TASK.sub(rf"\g<1>{task}", name))


def _with_hidden(layers: Layers, blocks: Sequence[str], widths: Sequence[int]) -> Layers:
    """Replace the blocks of a deep network by copies of the first block of these widths.

    Args:
        layers: of the network.
        blocks: the names of the first layers of the blocks, one after another.
        widths: of the new blocks, at least one.
    """
    names = [layer["name"] for layer in layers]
    places = [names.index(block) for block in blocks]
    begin, last = places[0], places[-1]
    end = next(at for at in range(last + 1, len(layers)) if layers[at]["type"] in ("InnerProduct", "Concat"))
    block = layers[begin : places[1] if len(places) > 1 else end]
    source, made, before = block[0]["bottom"], block[-1]["top"], layers[end - 1]["top"]
    inner = {name for layer in block for name in (layer["name"], *_names(layer["top"]))}
    new = Layers()
    for number, width in enumerate(widths, 1):
        given = source if number == 1 else f"{made}_{number - 1}"

        def of_block(name: str, number: int = number, given: str = given) -> str:
            return f"{name}_{number}" if name in inner else given if name == source else name

        for layer in block:
            copied = _renamed(layer, of_block)
            if "fc_param" in copied:
                copied["fc_param"]["num_output"] = width
            if "ranges" in copied:
                copied["ranges"] = [[0, width]] * len(copied["ranges"])
            new.append(copied)
    after = [
        _renamed(layer, lambda name: f"{made}_{len(widths)}" if name == before else name) for layer in layers[end:]
    ]
    return [*layers[:begin], *new, *after]


def _renamed(layer: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a layer whose name and tensors have other names."""
    copied = deepcopy(layer)
    for key in ("name", "bottom", "top"):
        if isinstance(layer.get(key), str):
            copied[key] = rename(layer[key])
        elif key in layer:
            copied[key] = [rename(name) for name in layer[key]]
    return copied


def _names(tensors: str | list[str]) -> list[str]:
    return [tensors] if isinstance(tensors, str) else tensors


def _without(top: str, layers: Layers) -> Layers:
    """Take an input out of the Concat layers. A layer of one input is left out, and the input takes its place."""
    kept, renamed = Layers(), dict[str, str]()
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
