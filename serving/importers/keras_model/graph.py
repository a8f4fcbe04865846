"""What a Keras model reads: its embeddings, where their keys come from, and its numbers. Other readers are refused."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from serving.errors import ConfigError
from serving.importers.outputs import Kind, check_kinds, kinds_of_answer, named_in_order
from serving.model.names import TABLE_NAME, is_taken, names_of_positions
from serving.model.sequences import Padding

PREPROCESSING = ("StringLookup", "IntegerLookup", "Hashing", "Discretization")
EMBEDDINGS = ("Embedding", "All2AllDenseEmbedding")
#: Comparisons of keys with 0 that make masks, and what they are where a key is not 0.
COMPARISONS: Mapping[str, bool] = {"NotEqual": True, "Greater": True, "Equal": False}

_AS_EMBEDDING = "Embedding(n, 1) and Flatten compute what a one-hot encoding and Dense(1) compute"
#: What to do with a subclass of ``keras.Model``.
OF_SUBCLASS = "for a subclass, keras.Model(inputs, model.call(inputs)) is a functional model of its layers"
# What to do instead of a layer that reads or makes keys.
_INSTEAD = {
    **dict.fromkeys(("CategoryEncoding", "OneHot", "MultiHot"), _AS_EMBEDDING),
    "HashedCrossing": "give the model an input with the joined texts, and read it with a Hashing layer",
    "TextVectorization": "split the text before, and read the words with a StringLookup with mask_token=''",
    "Cast": "give the input this dtype",
    **dict.fromkeys(COMPARISONS, "compare keys with 0 only, and set mask_zero in their Embedding"),
    "GetItem": "give each part an input of its own",
}


class Lookup(NamedTuple):
    """A call of an embedding layer.

    Attributes:
        layer: the layer.
        keys: the tensor of its keys.
        vectors: the tensor of its vectors.
        input: the name of the model's input.
        size: the keys of a sample.
        padding: the side at which the keys are padded with 0; None: they are no sequence, but each has a slot.
    """

    layer: Any
    keys: Any
    vectors: Any
    input: str
    size: int
    padding: Padding | None = None

    @property
    def names(self) -> list[str]:
        """What requests call its slots."""
        return [self.input] if self.padding else list(names_of_positions(self.input, self.size))


class KerasGraph:
    """The parts of a functional model without inner models.

    Attributes:
        source: names the model in messages.
        model: the model.
        outputs: its outputs, in the order of ``kinds``.
        kinds: of the outputs.
        lookups: the calls of embeddings.
        tables: the names of the embeddings.
        numbers: the inputs that are dense features.
        cuts: what the network reads of each: the numbers, or those of the Normalization that only reads this input.
        widths: how many numbers each has.
    """

    def __init__(self, keras: Any, model: Any, kinds: Mapping[str, Kind] | None) -> None:
        """Find the parts, except on which side sequences are padded; see ``find_padding``.

        Raises:
            ConfigError: the model has parts that cannot be imported. The message names the layer.
        """
        self._keras, self.model, self.source = keras, model, str(model.name)
        self._read_outputs(kinds)
        graph = keras.Model(model.inputs, self.outputs)
        self._nodes = [node for nodes in graph._nodes_by_depth.values() for node in nodes]
        self._maker = {id(tensor): node.operation for node in self._nodes for tensor in node.output_tensors}
        order = {id(operation): place for place, operation in enumerate(graph.operations)}
        self._nodes.sort(key=lambda node: order[id(node.operation)])
        self.lookups = list(self._found_lookups())
        self._refuse_other_readers()
        if not self.lookups:
            reason = f"expected a layer of the kinds {', '.join(EMBEDDINGS)}, found none; a model without embeddings"
            raise ConfigError(self.source, "", f"{reason} needs no Hotrow: export it for ONNX Runtime")
        self.tables = list(dict.fromkeys(lookup.layer.name for lookup in self.lookups))
        self._refuse_mixed_keys()
        self.numbers = [tensor for tensor in model.inputs if is_float(tensor) and not self._is_preprocessed(tensor)]
        self.cuts = [self._cut_of(tensor) for tensor in self.numbers]
        self.widths = [self._size(self._maker[id(cut)], cut) for cut in self.cuts]

    def _read_outputs(self, kinds: Mapping[str, Kind] | None) -> None:
        model = self.model
        answer = model.outputs[0] if len(model.outputs) == 1 and not isinstance(model.output, dict) else model.output
        if kinds is not None:
            check_kinds(self.source, kinds)
        if isinstance(answer, list | tuple):
            of_layers, stated = list(model.output_names), list(kinds or ())
            answer = named_in_order(self.source, answer, stated if set(stated).isdisjoint(of_layers) else of_layers)
        self.kinds = kinds_of_answer(self.source, answer, kinds)
        named = [answer[kind] for kind in self.kinds] if isinstance(answer, dict) else [answer]
        for name, tensor in zip(self.kinds, named, strict=True):
            if not hasattr(tensor, "shape"):
                reason = f"{name!r} is a {type(tensor).__name__}, expected a tensor; return one flat dictionary or list"
                raise ConfigError(self.source, "outputs", reason)
            if len(tensor.shape) > 2 or None in tensor.shape[1:]:
                reason = f"{name!r} has the shape {tensor.shape}, expected [B] or [B, L]; add a Flatten, or omit it"
                raise ConfigError(self.source, "outputs", reason)
        # a model cannot be cut at its output
        self.outputs = [self._keras.layers.Identity(dtype="float32")(output) for output in named]

    @property
    def has_preprocessing(self) -> bool:
        """Whether a layer reads raw features."""
        kinds = {kind_of(node.operation) for node in self._nodes}
        return not kinds.isdisjoint(PREPROCESSING) or any(
            cut is not tensor for cut, tensor in zip(self.cuts, self.numbers, strict=True)
        )

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The name of each number, in the order of the network's."""
        widths = zip(self.numbers, self.widths, strict=True)
        return tuple(name for tensor, width in widths for name in names_of_positions(str(tensor.name), width))

    @property
    def before(self) -> Any:
        """The model of the preprocessing. Only its layers need a configuration that Keras can save."""
        keys = {id(lookup.keys): lookup.keys for lookup in self.lookups}
        return self._keras.Model(self.model.input, [*keys.values(), *self.cuts], name=self.source)

    def of_table(self, table: str) -> list[Lookup]:
        """Return the calls of an embedding."""
        return [lookup for lookup in self.lookups if lookup.layer.name == table]

    def refuse(self, layer: Any, reason: str) -> ConfigError:
        """Return an error that names a layer."""
        return ConfigError(self.source, f"layer {layer.name!r} ({type(layer).__name__})", reason)

    def masks_of(self, lookup: Lookup) -> Iterator[tuple[Any, bool]]:
        """Yield the tensors that compare the keys of a sequence with 0, and whether they are true where a key is.

        Lookups of the same keys have the same tensors.
        """
        for node in self._nodes:
            [keys, *others] = node.arguments.args or [None]
            if kind_of(node.operation) in COMPARISONS and keys is lookup.keys and others == [0]:
                yield node.output_tensors[0], COMPARISONS[kind_of(node.operation)]

    def find_padding(self, example: Any) -> None:
        """Find at which side the example's sequences are padded with key 0."""
        sides: dict[str, list[Padding]] = {}
        for lookup in filter(_is_masked, self.lookups):
            found, table = self._sides(lookup, example), lookup.layer.name
            sides[table] = [side for side in sides.get(table, found) if side in found]
            if not sides[table]:
                reason = "expected an example whose sequences are padded on the same side in every call"
                raise self.refuse(lookup.layer, reason)
        self.lookups = [
            lookup._replace(padding=sides[lookup.layer.name][0]) if _is_masked(lookup) else lookup
            for lookup in self.lookups
        ]

    def _sides(self, lookup: Lookup, example: Any) -> list[Padding]:
        """Return the sides at which the keys of the example may be padded; full sequences tell nothing."""
        keys = self._keras.Model(self.model.input, lookup.keys)(example)
        is_key = self._keras.ops.convert_to_numpy(keys) != 0
        lengths = is_key.sum(axis=1, keepdims=True)
        places = np.arange(is_key.shape[1])
        forms: dict[Padding, Any] = {"end": places < lengths, "start": places >= is_key.shape[1] - lengths}
        sides = [side for side, form in forms.items() if (is_key == form).all()]
        if not sides:
            reason = "expected an example whose key 0, which is masked, is only padding at one side"
            raise self.refuse(lookup.layer, reason)
        return sides

    def _found_lookups(self) -> Iterator[Lookup]:
        for node in self._nodes:
            layer, kind = node.operation, kind_of(node.operation)
            if kind != "InputLayer" and getattr(layer, "compute_dtype", None) == "bfloat16":
                reason = "it computes in bfloat16, which ONNX Runtime does not"
                raise self.refuse(layer, f"{reason}; load the model with the dtype policy float32 or mixed_float16")
            if kind == "DistributedEmbedding":
                raise self.refuse(layer, "expected All2AllDenseEmbedding, whose inputs have a fixed number of keys")
            if kind not in EMBEDDINGS:
                continue
            if not TABLE_NAME.fullmatch(layer.name):
                raise self.refuse(layer, "expected a name of letters, digits, '_', '.' and '-', which names the table")
            [keys], [vectors] = node.input_tensors, node.output_tensors
            lookup = Lookup(layer, keys, vectors, self._input_of(layer, keys), self._size(layer, keys))
            if _is_masked(lookup):
                self._check_mask(lookup)
            yield lookup

    def _check_mask(self, lookup: Lookup) -> None:
        """Refuse keys of a masked embedding that are not those of a list of values without padding."""
        unmasked = next((node.operation for node in self._readers(lookup.keys) if _is_unmasked(node.operation)), None)
        if unmasked is not None:
            reason = f"it masks key 0, but {unmasked.name!r} reads the same keys and does not"
            raise self.refuse(lookup.layer, f"{reason}; set mask_zero in both, or give each an input of its own")
        layer, keys, maker = lookup.layer, lookup.keys, self._maker[id(lookup.keys)]
        if len(keys.shape) != 2:
            reason = f"expected keys [B, L], because key 0 is masked, got the shape {keys.shape}"
            raise self.refuse(layer, f"{reason}; a single key has the shape (1,)")
        if kind_of(maker) in PREPROCESSING and getattr(maker, "mask_token", None) != "":
            reason = f"it masks key 0, which {maker.name!r} gives to values; expected a StringLookup with mask_token=''"
            raise self.refuse(layer, f"{reason}, which reads integers as texts too")

    def _refuse_other_readers(self) -> None:
        """Refuse layers that read keys or texts, because the network gets vectors and numbers only."""
        for tensor in self.model.inputs:
            if not self._readers(tensor):
                raise self.refuse(self._maker[id(tensor)], "no layer reads it; make the model without it")
        masks = {id(mask) for lookup in self.lookups if _is_masked(lookup) for mask, _ in self.masks_of(lookup)}
        for node in self._nodes:
            layer, kind = node.operation, kind_of(node.operation)
            if kind in PREPROCESSING:
                self._check_preprocessing(node)
            if kind in (*EMBEDDINGS, *PREPROCESSING) or id(node.output_tensors[0]) in masks:
                continue
            for tensor in node.input_tensors:
                maker = self._maker[id(tensor)]
                is_input = kind_of(maker) == "InputLayer" and not is_float(tensor)
                if is_input or kind_of(maker) in PREPROCESSING:
                    reason = f"it reads {maker.name!r}, which only {', '.join(EMBEDDINGS)} may read"
                    advice = "give a number the dtype float32, and read keys with Keras's Embedding in this model"
                    raise self.refuse(layer, f"{reason}{_instead(layer, advice)}")

    def _refuse_mixed_keys(self) -> None:
        """Refuse a table whose keys two layers make, because a key would stand for two values."""
        for table in self.tables:
            calls = self.of_table(table)
            makers = {id(maker): maker for maker in (self._maker[id(call.keys)] for call in calls)}
            names = [str(maker.name) for maker in makers.values() if kind_of(maker) in PREPROCESSING]
            if names and len(makers) > 1:
                other = next((name for name in names if name != names[0]), "an input")
                reason = f"it reads keys of {names[0]!r} and of {other!r}, which stand for different values"
                raise self.refuse(calls[0].layer, f"{reason}; let one layer make all of its keys")

    def _check_preprocessing(self, node: Any) -> None:
        """Refuse what requests cannot have: encodings, and an input that several layers read."""
        layer, [tensor] = node.operation, node.input_tensors
        mode = getattr(layer, "output_mode", "int")
        if mode != "int":
            raise self.refuse(
                layer, f"output_mode={mode!r}: expected 'int', and an Embedding behind it; {_AS_EMBEDDING}"
            )
        if getattr(layer, "invert", False):
            raise self.refuse(layer, "invert=True: expected a layer that makes keys of values")
        others = [reader.operation for reader in self._readers(tensor) if reader.operation is not layer]
        if others and kind_of(self._maker[id(tensor)]) == "InputLayer":
            reason = f"{others[0].name!r} ({type(others[0]).__name__}) also reads its input {tensor.name!r}"
            raise self.refuse(layer, f"{reason}; give each layer an input of its own with the same values")

    def _input_of(self, layer: Any, keys: Any) -> str:
        """Return the input from which keys come, directly or through a preprocessing layer."""
        maker = self._maker[id(keys)]
        if kind_of(maker) in PREPROCESSING:
            [node] = [
                candidate
                for candidate in self._nodes
                if candidate.operation is maker and candidate.output_tensors[0] is keys
            ]
            maker = self._maker[id(node.input_tensors[0])]
        if kind_of(maker) != "InputLayer":
            reason = f"expected keys of an input or of {', '.join(PREPROCESSING)}, got those of {maker.name!r}"
            raise self.refuse(layer, f"{reason}{_instead(maker, 'compute them before, as an input of their own')}")
        if is_taken(maker.name):
            raise self.refuse(maker, "requests use this name for something else; give the input another name")
        return str(maker.name)

    def _readers(self, tensor: Any) -> list[Any]:
        return [node for node in self._nodes if any(input_tensor is tensor for input_tensor in node.input_tensors)]

    def _is_preprocessed(self, tensor: Any) -> bool:
        """Return whether a preprocessing layer makes keys of an input."""
        return all(kind_of(node.operation) in PREPROCESSING for node in self._readers(tensor))

    def _cut_of(self, tensor: Any) -> Any:
        """Return what the network reads of a float input: the numbers, or those of its Normalization."""
        [first, *others] = self._readers(tensor)
        if kind_of(first.operation) != "Normalization" or others:
            return tensor
        calls = [node.input_tensors[0] for node in self._nodes if node.operation is first.operation]
        is_of_inputs = all(kind_of(self._maker[id(call)]) == "InputLayer" for call in calls)
        is_alone = is_of_inputs and all(len(self._readers(call)) == 1 for call in calls)
        return first.output_tensors[0] if is_alone else tensor

    def _size(self, layer: Any, tensor: Any) -> int:
        """Return how many numbers of a tensor a sample has."""
        sizes = tensor.shape[1:]
        if None in sizes:
            reason = f"expected a fixed number of values in a sample, got the shape {tensor.shape}"
            advice = "for a model of any length, inputs = keras.Input((50,)) and keras.Model(inputs, model(inputs))"
            raise self.refuse(layer, f"{reason}; {advice}")
        return math.prod(sizes)


def kind_of(operation: Any) -> str:
    """Return the class of a layer of Keras or of ours; empty for others: a subclass may compute something else."""
    made = type(operation)
    return str(made.__name__) if made.__module__.split(".")[0] in ("keras", "training") else ""


def is_float(tensor: Any) -> bool:
    """Whether a tensor has floats."""
    return str(tensor.dtype).startswith(("float", "bfloat"))


def _is_unmasked(operation: Any) -> bool:
    return kind_of(operation) in EMBEDDINGS and not getattr(operation, "mask_zero", False)


def _is_masked(lookup: Lookup) -> bool:
    return bool(getattr(lookup.layer, "mask_zero", False))


def _instead(layer: Any, otherwise: str) -> str:
    """Return advice about a layer that reads or makes keys, with a semicolon before it."""
    return f"; {OF_SUBCLASS if hasattr(layer, 'layers') else _INSTEAD.get(type(layer).__name__, otherwise)}"
