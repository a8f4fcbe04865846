"""The layer graph: a model's JSON, checked and turned into records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from serving.model.names import ANSWER, NAMES_OF_ANSWERS
from serving.model.sequences import SequenceSlots
from serving.model.sparse_rows import RowLayout

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]
OutputKind: TypeAlias = Literal["probability", "score", "vector"]


@dataclass(frozen=True, slots=True)
class Samples:
    """A dimension that counts samples: B rows, or 10B if a layer turns each row into ten."""

    times: int = 1

    def __mul__(self, factor: int) -> "Samples":
        """Return the dimension with ``factor`` rows for each row."""
        return Samples(self.times * factor)

    def __str__(self) -> str:
        """Return the dimension as messages show it: ``B``, ``10B``."""
        return f"{self.times if self.times > 1 else ''}B"


B = Samples()
Size: TypeAlias = int | Samples
Shape: TypeAlias = tuple[Size, ...]  # at least two dimensions; only the first may count samples


@dataclass(frozen=True, slots=True)
class SparseInput:
    """One sparse input of the Data layer.

    Attributes:
        top: its tensor.
        slots: S.
        max_keys_per_sample: over all slots.
        names: what requests call each slot. Slots with the same name have the same keys. Empty: slots have no names.
        sequences: which slots are sequences; None: all are pooled.
        one_key: each slot that is not a sequence has exactly one key.
        paddings: of each slot the key that stands for no key; None: it has none. Empty: no slot has one.
    """

    top: str
    slots: int
    max_keys_per_sample: int
    names: tuple[str, ...] = ()
    sequences: SequenceSlots | None = None
    one_key: bool = False
    paddings: tuple[int | None, ...] = ()

    @property
    def positions(self) -> int:
        """The rows that the network gets of a sample: one of each pooled slot, and L of a sequence."""
        return self.slots if self.sequences is None else self.sequences.positions


@dataclass(frozen=True, slots=True)
class Embedding:
    """One embedding layer, which owns one table.

    Attributes:
        table: the table's name inside the model: the layer's ``name``, or its top if layers have no names.
        bottom: the sparse input it reads.
        top: the tensor it makes, [B, S, D].
        slots: S, the rows of a sample: one of each pooled slot, and L of a sequence.
        dim: D (``embedding_vec_size``).
        combiner: how the rows of one slot are pooled.
        row_layout: ``"localized"`` rows of a single-file table have a slot id, ``"distributed"`` rows do not.
        default_value: every float of an unknown key's vector.
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
class Output:
    """Some columns of a model's answer, by the name that clients ask for.

    Attributes:
        name: its name.
        kind: ``"probability"`` is from 0 to 1, ``"score"`` is any finite number, ``"vector"`` is one vector.
        width: how many columns it has.
        begin: its first column.
    """

    name: str
    kind: OutputKind = "probability"
    width: int = 1
    begin: int = 0

    @property
    def columns(self) -> slice:
        """Its columns."""
        return slice(self.begin, self.begin + self.width)


class Needs(NamedTuple):
    """What an output depends on.

    Attributes:
        dense: the numbers of dense features.
        rows: the rows: the number of the table, and the row's position in a sample.
    """

    dense: frozenset[int]
    rows: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Head:
    """How one column of an answer is made.

    Attributes:
        kind: of the column.
        mean: is added to a score: the mean of the label of a regression.
        std: a score is a multiple of it: the standard deviation of the label.
    """

    kind: OutputKind = "probability"
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One dense layer.

    Attributes:
        type: its type, as the JSON spells it.
        name: its name, or its first top's name if it has none or an earlier layer has the same.
        bottoms: the tensors it reads.
        tops: the tensors it makes.
        params: its checked parameters, by JSON name.
        path: its place in the document, such as ``"layers[4]"``. Empty for a layer that is not in the document.
    """

    type: str
    name: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    params: Mapping[str, Any]
    path: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One float32 weight tensor of a layer, row-major."""

    layer: str
    name: str  # "weight", "bias", ...
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A model's structure, or only its inputs if an ONNX file is the network.

    Attributes:
        dense_top: name of the dense input tensor; F may be 0.
        dense_dim: F.
        label_dim: L, the columns of ``output``.
        sparse: the sparse inputs, in document order.
        embeddings: the embedding layers, in document order: table t of a request is ``embeddings[t]``.
        layers: dense layers in an order in which they can run. A training loss is replaced by its inference activation
            (BinaryCrossEntropyLoss by Sigmoid, MeanSquaredErrorLoss by Denormalize). If an ONNX file is the network,
            ``layers``, ``logits`` and ``output`` are empty.
        logits: name of the tensor that the last activation reads, and the training loss too. Several outputs are
            concatenated, [B, L].
        output: name of the tensor with the answer, [B, L]: probabilities, or the values of a last layer that is not an
            activation, which are ``logits`` too. Several outputs are concatenated in document order.
        shapes: shape of every tensor by name.
        weights: all weights in the order of the dense file.
        statistics: the running means and variances of BatchNorm layers, which are in the side file and are not trained
            by gradients.
        least_samples: the smallest B that every layer can work on. It is more than 1 if a layer picks rows by number.
        mixes_samples: an answer depends on the other samples of its batch, so requests must not be merged.
        source: the file the graph was read from, for messages.
        slot_sizes: how many keys each slot of ``sparse`` has, if the training data has keys that begin at 0 in each
            slot; else None.
        dense_names: what requests call each dense feature; empty: they have no names.
        label_names: L names; empty: the labels have no names.
        stated_outputs: what the document calls the columns of ``output``; empty: it says nothing of them.
        heads: how each column of ``output`` is made; empty if an ONNX file is the network.
        needs: what outputs depend on, by name. An output that is not in it may depend on all inputs.
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
    slot_sizes: tuple[int, ...] | None = None
    dense_names: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    stated_outputs: tuple[Output, ...] = ()
    heads: tuple[Head, ...] = ()
    needs: Mapping[str, Needs] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What clients can ask for; see ``outputs_of``."""
        return outputs_of(self.stated_outputs, self.label_dim, self.label_names, self.label_kinds)

    @property
    def label_kinds(self) -> tuple[OutputKind, ...]:
        """The kind of each column of ``output``; empty if an ONNX file is the network."""
        return tuple(head.kind for head in self.heads)

    @property
    def units(self) -> tuple[float, ...]:
        """The unit of differences in each column of ``output``: the deviation of a regression's label, or 1."""
        return tuple(head.std for head in self.heads) or (1.0,) * self.label_dim

    @property
    def stored(self) -> tuple[WeightSpec, ...]:
        """The weights, then the statistics."""
        return self.weights + self.statistics

    @cached_property
    def masks(self) -> tuple[tuple[str, int], ...]:
        """The masks of sequences and their columns, in the order of the tables."""
        inputs = {entry.top: entry.sequences for entry in self.sparse}
        found = (inputs[embedding.bottom] for embedding in self.embeddings)
        return tuple((of_input.mask, of_input.positions) for of_input in found if of_input and of_input.mask)

    @property
    def dense_width(self) -> int:
        """The columns of a network's argument ``dense``: F, and those of the masks."""
        return self.dense_dim + sum(positions for _, positions in self.masks)

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """The F columns of tables of samples that have the dense features."""
        return self.dense_names or numbered(self.dense_top, self.dense_dim)

    @property
    def slot_columns(self) -> tuple[str, ...]:
        """The columns of tables of samples that have the keys, one for each slot of ``sparse``."""
        names = tuple(name for entry in self.sparse for name in entry.names)
        if names and len(set(names)) == len(names):
            return names
        return tuple(name for entry in self.sparse for name in numbered(entry.top, entry.slots))

    def too_few(self, samples: int) -> str:
        """Return a message about too few samples, or an empty text. A batch without samples is allowed."""
        if 0 < samples < self.least_samples:
            return f"expected at least {self.least_samples} samples, because the graph picks rows, got {samples}"
        return ""


def outputs_of(
    stated: tuple[Output, ...], label_dim: int, label_names: Sequence[str], label_kinds: Sequence[OutputKind]
) -> tuple[Output, ...]:
    """Return what clients can ask for: the stated outputs, or all columns as ``OUTPUT0`` and each label by its name.

    ``label_kinds`` is empty if all are probabilities.
    """
    if stated:
        return stated
    kinds: list[OutputKind] = [*label_kinds] or ["probability"] * label_dim
    has_heads = len(set(label_names)) == label_dim > 1 and not NAMES_OF_ANSWERS.intersection(label_names)
    named = zip(label_names, kinds, strict=True) if has_heads else ()
    heads = [Output(name, kind, begin=column) for column, (name, kind) in enumerate(named)]
    return (Output(ANSWER, "score" if "score" in kinds else "probability", label_dim), *heads)


def default_outputs(outputs: Sequence[Output]) -> Sequence[Output]:
    """Return the outputs of an answer if the request names none: ``OUTPUT0``, or all if they are stated."""
    return outputs[:1] if outputs[0].name == ANSWER else outputs


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Return the names of the columns of an input: its own, or with a number behind each if there are several."""
    return (name,) if count == 1 else tuple(f"{name}_{index}" for index in range(count))
