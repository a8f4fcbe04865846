"""The layer graph: what a model's JSON says, checked once and turned into records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from serving.model.sparse_rows import RowLayout

Combiner: TypeAlias = Literal["sum", "mean"]
Shape = tuple[int | None, ...]  # None stands for B, the number of samples


@dataclass(frozen=True, slots=True)
class SparseInput:
    """One sparse input of the Data layer: a top, its slots, and how many keys a sample may bring."""

    top: str
    slots: int
    max_keys_per_sample: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """One embedding layer; it owns one table.

    Attributes:
        table: the table's name inside the model: the layer's ``name``, or its top where layers have no names.
        bottom: the sparse input it reads.
        top: the tensor it makes, [B, S, D].
        slots: S.
        dim: D (``embedding_vec_size``).
        combiner: how the rows of one slot are pooled.
        row_layout: ``"localized"`` rows of a single-file table carry a slot id, ``"distributed"`` rows do not.
        default_value: every float of the vector of an unknown key.
    """

    table: str
    bottom: str
    top: str
    slots: int
    dim: int
    combiner: Combiner
    row_layout: RowLayout
    default_value: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One dense layer as the JSON names it; ``params`` holds its checked parameters by their JSON names."""

    type: str
    name: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    params: Mapping[str, Any]
    path: str  # where in the document: "layers[4]"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight tensor of the dense file, in file order: float32, row-major, shape ``shape``."""

    layer: str
    name: str  # "weight", "bias", ...
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole model's structure.

    Attributes:
        dense_top: name of the dense input tensor; F may be 0.
        dense_dim: F.
        label_dim: L.
        sparse: the sparse inputs, in document order.
        embeddings: the embedding layers, in document order: table t of a request is ``embeddings[t]``.
        layers: dense layers in an order in which they can run; a training loss is replaced by its inference
            activation (BinaryCrossEntropyLoss by Sigmoid).
        logits: name of the tensor that the last activation reads (what a training loss is computed on).
        output: name of the tensor with the probabilities, [B, L].
        shapes: shape of every tensor by name.
        weights: all weights in dense-file order.
        source: the file the graph was read from, for messages.
    """

    dense_top: str
    dense_dim: int
    label_dim: int
    sparse: tuple[SparseInput, ...]
    embeddings: tuple[Embedding, ...]
    layers: tuple[Layer, ...]
    logits: str
    output: str
    shapes: Mapping[str, Shape]
    weights: tuple[WeightSpec, ...]
    source: str
