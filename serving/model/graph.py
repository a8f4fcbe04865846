"""The layer graph: HugeCTR's JSON read once, checked wholly, and turned into records.

Read are the hand-written v3.0 training and inference configurations and, for the same layers, the graphs that
v3.1 and later export. A training graph is read as the inference graph it becomes: its loss is the activation that
turns logits into probabilities.
"""

import copy
import difflib
from pathlib import Path
from typing import Any

from serving.model.inputs import EMBEDDING_TYPES, Data, read_data, read_embedding
from serving.model.json_fields import Fields
from serving.model.layer_types import LAYER_TYPES, Site, show
from serving.model.records import Embedding, Graph, Layer, Shape, SparseInput, WeightSpec
from serving.model.strict_json import read_json

__all__ = [
    "Embedding",
    "Graph",
    "Layer",
    "Shape",
    "SparseInput",
    "WeightSpec",
    "inference_document",
    "parse_graph",
    "read_graph",
]

_CLAUSES = ("layers", "inference", "solver", "optimizer")
_ACTIVATION_OF_LOSS = {"BinaryCrossEntropyLoss": "Sigmoid"}


def read_graph(path: str | Path) -> Graph:
    """Read a graph file; see ``parse_graph``."""
    return parse_graph(read_json(path), str(path))


def parse_graph(document: Any, source: str) -> Graph:
    """Turn a JSON document into a graph.

    The clauses ``inference``, ``solver`` and ``optimizer`` are not looked at.

    Args:
        document: the JSON as Python objects; it is not changed.
        source: the file it came from, for messages.

    Raises:
        ConfigError: the document has an unknown member, a wrong type or value, an unsupported layer, a bottom that
            no earlier layer makes, a top made twice, or shapes that do not fit; the message names the JSON path.
    """
    root = Fields(document, source, "", _CLAUSES)
    layers = list(root.objects("layers"))
    if layers[0].text("type") != "Data":
        raise layers[0].error(f"the first layer must be Data, got {layers[0].text('type')}", "type")
    reader = _GraphReader(read_data(layers[0]), layers[0])
    for fields in layers[1:-1]:
        reader.read_layer(fields)
    if len(layers) == 1:
        raise root.error("expected more layers after Data", "layers")
    logits, output = reader.read_last(layers[-1])
    return reader.finish(logits, output, source)


def inference_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return the inference form of a training document: the loss becomes its activation; the label stays.

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
    if layers[-1]["type"] in _ACTIVATION_OF_LOSS:
        last = graph.layers[-1]
        layers[-1] = {"name": last.name, "type": last.type, "bottom": graph.logits, "top": graph.output}
    return result


class _GraphReader:
    """The records made so far; layers come in document order."""

    def __init__(self, data: Data, fields: Fields) -> None:
        self._data = data
        self._sparse = {entry.top: entry for entry in data.sparse}
        self._embeddings: list[Embedding] = []
        self._layers: list[Layer] = []
        self._weights: list[WeightSpec] = []
        self._names: set[str] = {fields.text("name")} if "name" in fields else set()
        self._shapes: dict[str, Shape] = {}
        self._made: set[str] = set()
        for key, top in (
            ("label", data.label_top),
            ("dense", data.dense_top),
            *(("sparse", top) for top in self._sparse),
        ):
            if top is not None:
                self._claim(top, fields, f"{key}.top")
        if len(self._sparse) < len(data.sparse):
            raise fields.error("two sparse inputs have the same top", "sparse")
        self._shapes[data.dense_top] = (None, data.dense_dim)
        self._data_fields = fields

    def read_layer(self, fields: Fields) -> None:
        """Read one layer between Data and the last."""
        kind = fields.text("type")
        if kind in EMBEDDING_TYPES:
            self._read_embedding(fields)
        elif kind in _ACTIVATION_OF_LOSS:
            raise fields.error(f"{kind} must be the last layer", "type")
        else:
            self._read_dense(fields, kind)

    def read_last(self, fields: Fields) -> tuple[str, str]:
        """Read the layer that makes the probabilities; return the names of its bottom and its top."""
        kind = fields.text("type")
        if kind in _ACTIVATION_OF_LOSS:
            self._replace_loss(fields, kind)
        elif kind in _ACTIVATION_OF_LOSS.values():
            self._read_dense(fields, kind)
        else:
            self.read_layer(fields)  # an unknown type or member is the more useful message
            expected = [*_ACTIVATION_OF_LOSS.values(), *_ACTIVATION_OF_LOSS]
            raise fields.error(f"the last layer must be one of {', '.join(expected)}, got {kind}", "type")
        last = self._layers[-1]
        expected_shape: Shape = (None, self._data.label_dim)
        if self._shapes[last.tops[0]] != expected_shape:
            raise fields.error(
                f"expected shape {show(expected_shape)} from label_dim, got {show(self._shapes[last.tops[0]])}",
                "bottom",
            )
        return last.bottoms[0], last.tops[0]

    def finish(self, logits: str, output: str, source: str) -> Graph:
        """Check the whole and return it."""
        read = {embedding.bottom for embedding in self._embeddings}
        for index, entry in enumerate(self._data.sparse):
            if entry.top not in read:
                raise self._data_fields.error(f"no embedding reads {entry.top!r}", f"sparse[{index}].top")
        return Graph(
            dense_top=self._data.dense_top,
            dense_dim=self._data.dense_dim,
            label_dim=self._data.label_dim,
            sparse=self._data.sparse,
            embeddings=tuple(self._embeddings),
            layers=tuple(self._layers),
            logits=logits,
            output=output,
            shapes=self._shapes,
            weights=tuple(self._weights),
            source=source,
        )

    def _claim(self, top: str, fields: Fields, key: str = "top") -> None:
        if top in self._made:
            raise fields.error(f"the tensor {top!r} is made twice", key)
        self._made.add(top)

    def _claim_name(self, name: str, fields: Fields) -> None:
        if name in self._names:
            raise fields.error(f"two layers are called {name!r}", "name" if "name" in fields else "top")
        self._names.add(name)

    def _read_embedding(self, fields: Fields) -> None:
        embedding = read_embedding(fields, self._sparse)
        self._claim_name(embedding.table, fields)
        self._claim(embedding.top, fields)
        self._embeddings.append(embedding)
        self._shapes[embedding.top] = (None, embedding.slots, embedding.dim)

    def _read_dense(self, fields: Fields, kind: str) -> None:
        if kind not in LAYER_TYPES:
            known = [*LAYER_TYPES, *EMBEDDING_TYPES, *_ACTIVATION_OF_LOSS]
            close = difflib.get_close_matches(kind, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; supported are {', '.join(sorted(known))}"
            raise fields.error(f"layer type {kind} is not supported{hint}", "type")
        rule = LAYER_TYPES[kind]
        fields.allow(("name", "type", "bottom", "top", *rule.keys))
        bottoms, tops = fields.texts("bottom"), fields.texts("top")
        _check_count(fields, "bottom", len(bottoms), rule.bottoms)
        _check_count(fields, "top", len(tops), rule.tops)
        shapes = tuple(self._shape(name, fields) for name in bottoms)
        structure = rule.read(Site(fields, shapes, len(tops)))
        name = fields.text("name", tops[0])
        self._claim_name(name, fields)
        for top, shape in zip(tops, structure.tops, strict=True):
            self._claim(top, fields)
            self._shapes[top] = shape
        self._layers.append(Layer(kind, name, bottoms, tops, structure.params, fields.path))
        self._weights += [WeightSpec(name, weight, shape) for weight, shape in structure.weights]

    def _replace_loss(self, fields: Fields, kind: str) -> None:
        """Read a training loss, whose bottoms are the logits and the label, as its activation."""
        fields.allow(("name", "type", "bottom", "top", "regularizer", "lambda"))
        bottoms = fields.texts("bottom")
        _check_count(fields, "bottom", len(bottoms), (2, 2))
        if self._data.label_top is None:
            raise self._data_fields.error("missing; the loss needs it", "label.top")
        if bottoms[1] != self._data.label_top:
            raise fields.error(f"expected the label {self._data.label_top!r} second, got {bottoms[1]!r}", "bottom")
        shape = self._shape(bottoms[0], fields)
        self._claim(fields.text("top"), fields)
        name = "probabilities"
        while name in self._made | self._names:
            name += "_"
        self._layers.append(Layer(_ACTIVATION_OF_LOSS[kind], name, bottoms[:1], (name,), {}, fields.path))
        self._shapes[name] = shape

    def _shape(self, bottom: str, fields: Fields) -> Shape:
        if bottom in self._shapes:
            return self._shapes[bottom]
        if bottom in self._made:
            raise fields.error(f"{bottom!r} is an input that a {fields.text('type')} layer cannot read", "bottom")
        close = difflib.get_close_matches(bottom, self._shapes, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise fields.error(f"no layer above makes {bottom!r}{hint}", "bottom")


def _check_count(fields: Fields, key: str, count: int, allowed: tuple[int, int]) -> None:
    least, most = allowed
    if not least <= count <= most:
        expected = f"exactly {least}" if least == most else f"at least {least}"
        raise fields.error(f"expected {expected}, got {count}", key)
