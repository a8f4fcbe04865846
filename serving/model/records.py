"""The layer graph: what a model's JSON says, checked once and turned into records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from serving.model.sparse_rows import RowLayout

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]


@dataclass(frozen=True, slots=True)
class Samples:
    """A dimension that counts samples: ``times`` rows for each, so B rows, or 10B where a layer made ten of one."""

    times: int = 1

    def __mul__(self, factor: int) -> "Samples":
        """Return the dimension with ``factor`` rows in place of each."""
        return Samples(self.times * factor)

    def __str__(self) -> str:
        """Return it as messages write it: ``B``, ``10B``."""
        return f"{self.times if self.times > 1 else ''}B"


B = Samples()
Size: TypeAlias = int | Samples
Shape: TypeAlias = tuple[Size, ...]  # at least two dimensions, of which only the first may count samples


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
    """One dense layer as the JSON names it.

    Attributes:
        type: its type, as the JSON spells it.
        name: its name; the first top's where it has none, or one that an earlier layer has too.
        bottoms: the tensors it reads.
        tops: the tensors it makes.
        params: its checked parameters, by their JSON names where they have one there.
        path: where it is in the document, ``"layers[4]"``; empty of a layer that is not there.
    """

    type: str
    name: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    params: Mapping[str, Any]
    path: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight tensor of a layer: float32, row-major, shape ``shape``."""

    layer: str
    name: str  # "weight", "bias", ...
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole model's structure; of a model whose network is an ONNX file, its inputs.

    Attributes:
        dense_top: name of the dense input tensor; F may be 0.
        dense_dim: F.
        label_dim: L, the columns of ``output``.
        sparse: the sparse inputs, in document order.
        embeddings: the embedding layers, in document order: table t of a request is ``embeddings[t]``.
        layers: dense layers in an order in which they can run; a training loss is replaced by its inference
            activation (BinaryCrossEntropyLoss by Sigmoid). None of them where the network is an ONNX file; ``logits``
            and ``output`` are then empty too.
        logits: name of the tensor that the last activation reads (what a training loss is computed on); of several
            outputs the tensors side by side, [B, L].
        output: name of the tensor with the answer, [B, L]: probabilities, or the values of a last layer that is no
            activation, which is ``logits`` too; several outputs stand in it side by side, in document order.
        shapes: shape of every tensor by name.
        weights: all weights in dense-file order.
        statistics: the running means and variances of BatchNorm layers, which lie beside the dense file and are not
            trained by gradients.
        least_samples: the smallest B that every layer can work on; more than 1 where one picks rows by number.
        mixes_samples: an answer depends on the other samples of its batch, so requests must not be merged.
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
    statistics: tuple[WeightSpec, ...]
    least_samples: int
    mixes_samples: bool
    source: str

    @property
    def stored(self) -> tuple[WeightSpec, ...]:
        """Everything a dense network needs beside the graph: the weights, then the statistics."""
        return self.weights + self.statistics

    def too_few(self, samples: int) -> str:
        """Return why so many samples are too few to predict at once; empty where they are not. None at all are fine."""
        if 0 < samples < self.least_samples:
            return f"expected at least {self.least_samples} samples, whose rows the graph picks, got {samples}"
        return ""
