"""Read the layers of a graph in order, and track the tensors that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.errors import ConfigError, nearest
from serving.model.inputs import EMBEDDING_TYPES, read_data, read_embedding
from serving.model.layer_types import LAYER_TYPES, REFUSED, Site, Structure, inner, show
from serving.model.records import B, Embedding, Graph, Head, Layer, Shape, WeightSpec
from serving.model.slot_sizes import read_slot_sizes
from serving.model.strict_json import Fields
from serving.model.wiring import explain_missing

ACTIVATION_OF_LOSS = {
    "BinaryCrossEntropyLoss": "Sigmoid",
    "CrossEntropyLoss": "Softmax",
    "MultiCrossEntropyLoss": "Sigmoid",
    "MeanSquaredErrorLoss": "Denormalize",  # Hotrow's own
}
#: The layers that make answers, and what tops of them without a name are called.
_ACTIVATIONS = {"Sigmoid": "probabilities", "Softmax": "probabilities", "Denormalize": "scores"}
_NO_NETWORK = (
    "no layer follows the embeddings; add the layers of the dense network, or replace the .model file of an inference "
    "configuration with an .onnx file of the network"
)
_TWO_NETWORKS = (
    "describes a network, but the dense file is an ONNX network too; remove every layer except Data and the "
    "embeddings, or replace the .onnx file with a .model file of these layers' weights"
)
_LOSS_KEYS = ("name", "type", "bottom", "top", "regularizer", "lambda", "target_weight")
_OWN_LOSS_KEYS: Mapping[str, tuple[str, ...]] = {"MeanSquaredErrorLoss": ("mean", "std")}


@dataclass(frozen=True, slots=True)
class _Loss:
    """A training loss, which becomes an activation of its first bottom."""

    fields: Fields
    activation: str
    bottom: str
    params: Mapping[str, Any]


class GraphReader:
    """The records made so far. Layers come in document order."""

    def __init__(self, layers: Sequence[Fields]) -> None:
        """Read Data, the first of ``layers``."""
        fields = layers[0]
        self._document = layers
        self._data = data = read_data(fields)
        self._sparse = {entry.top: entry for entry in data.sparse}
        self._embeddings: list[Embedding] = []
        self._layers: list[Layer] = []
        self._structures: list[Structure] = []
        self._losses: list[_Loss] = []
        self._judged: set[str] = set()  # labels that a loss reads
        self._loss_tops: set[str] = set()
        self._labels = {label.top: label for label in data.labels}
        self._names: set[str] = {fields.text("name")} if "name" in fields else set()
        self._shapes: dict[str, Shape] = {}
        self._made: dict[str, str] = {}  # tensor to the place of the layer that makes it
        labels = [label.top for label in data.labels if label.top is not None]
        for key, top in (*(("label", top) for top in labels), ("dense", data.dense_top)):
            self._claim(top, fields, f"{key}.top")
        if len(self._sparse) < len(data.sparse):
            raise fields.error("two sparse inputs have the same top", "sparse")
        for top in self._sparse:
            self._claim(top, fields, "sparse.top")
        self._shapes[data.dense_top] = (B, data.dense_dim)
        for entry in data.sparse:
            if entry.sequences is not None and entry.sequences.mask:
                self._claim(entry.sequences.mask, fields, "sparse.sequence.mask")
                self._shapes[entry.sequences.mask] = (B, entry.positions)

    def read(self, source: str) -> Graph:
        """Read the layers after Data, and return the graph. Raise ConfigError as ``parse_graph`` does."""
        if any(entry.paddings for entry in self._data.sparse):  # training would not know them
            raise self._document[0].error("padding_keys need a network in an ONNX file", "sparse")
        for fields in self._document[1:]:
            self._read_layer(fields)
        if not self._layers and not self._losses:
            raise ConfigError(source, "layers", _NO_NETWORK)
        self._check_last(self._document[-1])
        self._check_inputs()
        outputs = self._outputs()
        heads = [head for layer in outputs for head in self._heads(layer)]
        logits, output = self._join_outputs(outputs)
        return self._graph(source, len(heads), logits, output, heads)

    def read_inputs(self, source: str) -> Graph:
        """Read the layers after Data, which must all be embeddings, and return a graph without a network."""
        for fields in self._document[1:]:
            kind = fields.text("type")
            if kind not in EMBEDDING_TYPES:
                raise fields.error(f"{kind} {_TWO_NETWORKS}", "type")
            self._read_embedding(fields)
        self._check_inputs()
        return self._graph(source, sum(label.dim for label in self._data.labels), logits="", output="")

    def _graph(self, source: str, label_dim: int, logits: str, output: str, heads: Sequence[Head] = ()) -> Graph:
        columns = sum(output.width for output in self._data.outputs)
        if columns not in (0, label_dim):
            reason = f"expected widths that add up to the {label_dim} columns of the answer, got {columns}"
            raise self._document[0].error(reason, "outputs")
        return Graph(
            dense_top=self._data.dense_top,
            dense_dim=self._data.dense_dim,
            label_dim=label_dim,
            sparse=self._data.sparse,
            embeddings=tuple(self._embeddings),
            layers=tuple(self._layers),
            logits=logits,
            output=output,
            shapes=self._shapes,
            weights=self._specs("weights"),
            statistics=self._specs("statistics"),
            least_samples=max((structure.least_samples for structure in self._structures), default=1),
            mixes_samples=any(structure.mixes_samples for structure in self._structures),
            source=source,
            slot_sizes=self._slot_sizes(),
            dense_names=self._data.dense_names,
            label_names=self._data.label_names,
            stated_outputs=self._data.outputs,
            heads=tuple(heads),
        )

    def _slot_sizes(self) -> tuple[int, ...] | None:
        try:
            return read_slot_sizes(self._document[0], sum(entry.slots for entry in self._data.sparse))
        except ConfigError:  # only training reads them; HugeCTR exports what it was given
            return None

    def _read_layer(self, fields: Fields) -> None:
        kind = fields.text("type")
        if kind in EMBEDDING_TYPES:
            self._read_embedding(fields)
        elif kind in ACTIVATION_OF_LOSS:
            self._read_loss(fields, kind)
        else:
            self._read_dense(fields, kind)

    def _read_embedding(self, fields: Fields) -> None:
        embedding = read_embedding(fields, self._sparse)
        if embedding.table in self._names:
            raise fields.error(f"two layers are called {embedding.table!r}", "name" if "name" in fields else "top")
        is_read = any(other.bottom == embedding.bottom for other in self._embeddings)
        if is_read and self._sparse[embedding.bottom].sequences is not None:
            reason = f"two layers read the sequences of {embedding.bottom!r}; expected a sparse input for each"
            raise fields.error(reason, "bottom")
        self._names.add(embedding.table)
        self._claim(embedding.top, fields)
        self._embeddings.append(embedding)
        self._shapes[embedding.top] = (B, embedding.slots, embedding.dim)

    def _read_dense(self, fields: Fields, kind: str) -> None:
        if kind in REFUSED:
            raise fields.error(f"layer type {kind} is not supported: {REFUSED[kind]}", "type")
        if kind not in LAYER_TYPES:
            known = [*LAYER_TYPES, *EMBEDDING_TYPES, *ACTIVATION_OF_LOSS]
            close = nearest(kind, known)
            hint = f"; did you mean {close[0]}?" if close else f"; supported are {', '.join(sorted(known))}"
            raise fields.error(f"layer type {kind} is not supported{hint}", "type")
        rule = LAYER_TYPES[kind]
        fields.allow(("name", "type", "bottom", "top", *rule.keys))
        bottoms, tops = fields.texts("bottom"), fields.texts("top")
        _check_count(fields, "bottom", len(bottoms), rule.bottoms)
        _check_count(fields, "top", len(tops), rule.tops)
        shapes = tuple(self._shape(name, fields) for name in bottoms)
        structure = rule.read(Site(fields, shapes, len(tops)))
        for top, shape in zip(tops, structure.tops, strict=True):
            self._claim(top, fields)
            self._shapes[top] = shape
        # HugeCTR ignores the names of dense layers, and genuine files repeat them
        name = fields.text("name", tops[0])
        self._add(Layer(kind, self._fresh(tops[0], name), bottoms, tops, structure.params, fields.path), structure)

    def _read_loss(self, fields: Fields, kind: str) -> None:
        """Read a training loss, whose bottoms are the logits and a label."""
        fields.allow((*_LOSS_KEYS, *_OWN_LOSS_KEYS.get(kind, ())))
        bottoms = fields.texts("bottom")
        _check_count(fields, "bottom", len(bottoms), (2, 2))
        if None in self._labels:
            raise self._document[0].error("missing; the loss needs it", "label.top")
        if bottoms[1] not in self._labels:
            names = ", ".join(repr(name) for name in self._labels)
            raise fields.error(f"expected the label {names} second, got {bottoms[1]!r}", "bottom")
        if bottoms[1] in self._judged:
            raise fields.error(f"two losses read the label {bottoms[1]!r}", "bottom")
        label, shape = self._labels[bottoms[1]], self._shape(bottoms[0], fields)
        expected: Shape = (B, label.dim)
        # the label of a CrossEntropyLoss may be a class number
        if shape != expected and not (kind == "CrossEntropyLoss" and label.dim == 1 and _is_output(shape)):
            raise fields.error(f"expected shape {show(expected)} from label_dim, got {show(shape)}", "bottom")
        self._claim(fields.text("top"), fields)
        activation = ACTIVATION_OF_LOSS[kind]
        params = LAYER_TYPES[activation].read(Site(fields, (shape,), 1)).params if kind in _OWN_LOSS_KEYS else {}
        self._losses.append(_Loss(fields, activation, bottoms[0], params))
        self._judged.add(bottoms[1])
        self._loss_tops.add(fields.text("top"))

    def _check_last(self, fields: Fields) -> None:
        kind = fields.text("type")
        if self._losses and kind not in _ACTIVATIONS and kind not in ACTIVATION_OF_LOSS:
            expected = ", ".join((*_ACTIVATIONS, *ACTIVATION_OF_LOSS))
            raise fields.error(f"the last layer must be one of {expected}, got {kind}", "type")
        if kind in EMBEDDING_TYPES:
            raise fields.error(f"the last layer must be one of the network, got {kind}", "type")
        if kind in LAYER_TYPES and len(self._layers[-1].tops) > 1:
            raise fields.error(f"the last layer must have one top, got {len(self._layers[-1].tops)}", "top")

    def _check_inputs(self) -> None:
        """Check that some layer reads each input of Data."""
        read = {embedding.bottom for embedding in self._embeddings}
        for index, entry in enumerate(self._data.sparse):
            if entry.top not in read:
                raise self._document[0].error(f"no embedding reads {entry.top!r}", f"sparse[{index}].top")
        for label in self._data.labels:
            if self._losses and label.top not in self._judged:
                raise self._document[0].error(f"no loss reads {label.top!r}", "label.top")

    def _outputs(self) -> list[Layer]:
        """Return the layers that make the answer.

        These are the losses' activations, else the activations that no layer reads. If the last layer is not an
        activation, it is the answer, as in HugeCTR.
        """
        if not self._losses and self._layers[-1].type not in _ACTIVATIONS:
            self._check_output_columns(self._layers[-1:])
            return self._layers[-1:]
        if not self._losses:
            read = {bottom for layer in self._layers for bottom in layer.bottoms}
            outputs = [x for x in self._layers if x.type in _ACTIVATIONS and x.tops[0] not in read]
            self._check_output_columns(outputs)
            return outputs
        for number, loss in enumerate(self._losses, start=1):
            made = _ACTIVATIONS[loss.activation]
            name = self._fresh(made if len(self._losses) == 1 else f"{made}{number}")
            self._shapes[name] = self._shapes[loss.bottom]
            self._add(Layer(loss.activation, name, (loss.bottom,), (name,), loss.params, loss.fields.path))
        return self._layers[-len(self._losses) :]

    def _check_output_columns(self, outputs: Sequence[Layer]) -> None:
        """Check the outputs of an inference graph against the labels."""
        last = self._document[-1]
        for layer in outputs:
            if not _is_output(self._shapes[layer.tops[0]]):
                raise last.error(f"expected shape [B, L], got {show(self._shapes[layer.tops[0]])}", "bottom")
        expected = sum(label.dim for label in self._data.labels)
        columns = [self._columns(layer.tops[0]) for layer in outputs]
        classes = [1 if layer.type == "Softmax" else self._columns(layer.tops[0]) for layer in outputs]
        if expected not in (sum(columns), sum(classes)):
            got = " and ".join(show(self._shapes[layer.tops[0]]) for layer in outputs)
            raise last.error(f"expected shape [B, {expected}] from label_dim, got {got}", "bottom")

    def _join_outputs(self, outputs: Sequence[Layer]) -> tuple[str, str]:
        """Return the names of the logits and of the answer. Several outputs are concatenated."""
        if len(outputs) == 1 and outputs[0].type not in _ACTIVATIONS:
            return outputs[0].tops[0], outputs[0].tops[0]
        if len(outputs) == 1:
            return outputs[0].bottoms[0], outputs[0].tops[0]
        joined = []
        for wanted, parts in (
            ("logits", tuple(layer.bottoms[0] for layer in outputs)),
            (_ACTIVATIONS[outputs[0].type], tuple(layer.tops[0] for layer in outputs)),
        ):
            name = self._fresh(wanted)
            self._shapes[name] = (B, sum(self._columns(part) for part in parts))
            self._add(Layer("Concat", name, parts, (name,), {"axis": 1}, path=""))
            joined.append(name)
        return joined[0], joined[1]

    def _heads(self, layer: Layer) -> Sequence[Head]:
        """Return how the columns of an output are made."""
        if layer.type != "Denormalize":
            return [Head()] * self._columns(layer.tops[0])
        return [Head("score", *numbers) for numbers in zip(layer.params["mean"], layer.params["std"], strict=True)]

    def _columns(self, tensor: str) -> int:
        return inner(self._shapes[tensor])[0]

    def _add(self, layer: Layer, structure: Structure | None = None) -> None:
        self._names.add(layer.name)
        self._layers.append(layer)
        self._structures.append(structure or Structure(()))

    def _specs(self, attribute: str) -> tuple[WeightSpec, ...]:
        return tuple(
            WeightSpec(layer.name, name, shape)
            for layer, structure in zip(self._layers, self._structures, strict=True)
            for name, shape in getattr(structure, attribute)
        )

    def _claim(self, top: str, fields: Fields, key: str = "top") -> None:
        if top in self._made:
            raise fields.error(f"the tensor {top!r} is made twice, first by {self._made[top]}", key)
        self._made[top] = fields.shown

    def _fresh(self, name: str, wanted: str | None = None) -> str:
        """Return ``wanted`` if no layer has this name, else an unused name that starts with ``name``."""
        if wanted is not None and wanted not in self._names:
            return wanted
        # an inference graph has no losses, so their names are free
        while name in self._names or (wanted is None and name in self._made and name not in self._loss_tops):
            name += "_"
        return name

    def _shape(self, bottom: str, fields: Fields) -> Shape:
        if bottom in self._shapes:
            return self._shapes[bottom]
        if bottom in self._made:
            raise fields.error(f"{bottom!r} is an input that a {fields.text('type')} layer cannot read", "bottom")
        raise fields.error(explain_missing(bottom, fields, self._document, self._shapes), "bottom")


def _is_output(shape: Shape) -> bool:
    return len(shape) == 2 and shape[0] == B


def _check_count(fields: Fields, key: str, count: int, allowed: tuple[int, int]) -> None:
    least, largest = allowed
    if not least <= count <= largest:
        bound = (
            f"exactly {least}" if least == largest else f"at least {least}" if count < least else f"at most {largest}"
        )
        raise fields.error(f"expected {bound}, got {count}", key)
