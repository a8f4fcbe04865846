"""Import a Keras model in one call. Keras is imported by the call, not by this package.

1. Find the embeddings among the layers, and what makes their keys: an input, or an input and a preprocessing layer.
2. Cut the model behind the embeddings. Keras exports the rest: the dense network.
3. Read the preprocessing layers as raw features, from the model's ``.keras`` archive.
4. Plan and write a version, as for a network and tables in files. It must give the model's answers before it appears.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, MissingExtraError
from serving.features import FeatureDefinition
from serving.features.keras_archive import definition_of_archive
from serving.importers.matching import Matching
from serving.importers.network import check_network
from serving.importers.outputs import ADVICE, Kind, check_kinds, kinds_of_answer, named_in_order, strange_answers
from serving.importers.plan import ImportPlan, SlotsOfRequest, plan_matched, with_features
from serving.importers.pytorch import ImportedModule
from serving.importers.verifying import Comparison, ExpectedAnswers
from serving.importers.writing import write_model
from serving.model.names import DENSE, KEYS, ROW_PTRS, TABLE_NAME, names_of_positions
from serving.model.records import Combiner
from serving.model.sequences import Padding, SequenceSlots
from serving.model.version_writer import check_target
from serving.sources.rows import TableRows, rows_of_array

_PREPROCESSING = ("StringLookup", "IntegerLookup", "Hashing", "Discretization")
_EMBEDDINGS = ("Embedding", "All2AllDenseEmbedding")
_SAMPLES = 64  # of the random requests


class _Lookup(NamedTuple):
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


def from_keras(
    model: Any,
    example: Any,
    repository: str | Path,
    name: str,
    *,
    logits: bool = False,
    tolerance: float = 1e-5,
    max_batchsize: int = 1024,
    outputs: Mapping[str, Kind] | None = None,
) -> ImportedModule:
    """Write a Keras model into a model repository, and compare the version's answers with the model's.

    Every ``Embedding`` and every ``All2AllDenseEmbedding`` of ``training.tf.sok`` becomes a table. StringLookup,
    IntegerLookup, Hashing, Discretization and Normalization at the model's inputs become raw features, so requests may
    have strings. An empty text counts as missing: it has no key for a Hashing layer. The keys of an ``Embedding`` with
    ``mask_zero`` are a sequence, which needs no padding in requests. Everything else becomes the dense network, which
    Keras exports.

    Args:
        model: a functional or a sequential model of Keras 3 with outputs [B, L]. It may contain such models.
        example: an input of the model, with any B. It shows at which side the sequences of an ``Embedding`` with
            ``mask_zero`` are padded.
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        logits: the model answers with logits, so a Sigmoid is appended to each output that is a probability.
        tolerance: the largest difference between the answers of the model and of the version; relative to the answer if
            a score or a number of a vector is above 1.
        max_batchsize: maximum samples per request.
        outputs: the names and kinds of the outputs; see ``from_torch``. The model's outputs are in a dictionary by
            these names, or in a list: made by layers of these names, or in this order if no layer has such a name.

    Raises:
        ConfigError: the model or the example cannot be imported. The message names the layer.
        ModelFileError: an answer differs by more than ``tolerance``. No version is written.
        MissingExtraError: Keras, onnx, ONNX Runtime or the exporter of Keras's backend is not installed.
        OutputError: the name cannot be used, or the file system refuses.
    """
    try:
        import keras
        import onnx  # noqa: F401

        if keras.backend.backend() == "tensorflow":
            import tf2onnx  # noqa: F401
    except ImportError as err:
        raise MissingExtraError(err.name or "keras", "tensorflow", "importing a Keras model") from err
    if keras.backend.backend() == "jax" and find_spec("jax2onnx") is None:
        reason = "Keras exports models of the backend jax with jax2onnx, which is not installed; install it"
        raise ConfigError("from_keras", "model", f"{reason}; or load the saved model with another backend")
    check_target(Path(repository), name)
    if not isinstance(model, keras.Model):
        raise ConfigError("from_keras", "model", f"expected a keras.Model, got {type(model).__name__}")
    try:
        answers = keras.tree.flatten(model(example))
    except Exception as err:  # of any layer or backend
        raise ConfigError("from_keras", "example", f"the model does not take it: {_said(err)}") from err
    if not getattr(model, "inputs", None):
        came = f"{type(model).__name__}, whose inputs Keras does not know"
        raise ConfigError(str(model.name), "", f"expected a functional or a sequential model, got {came}")
    _check_names(model)
    flat = _without_inner(keras, model)
    for answer, found in zip(answers, keras.tree.flatten(flat(example)), strict=True):
        expected, own = map(keras.ops.convert_to_numpy, (answer, found))
        if not np.allclose(expected, own, atol=tolerance, equal_nan=True):
            raise ConfigError(str(model.name), "", "a model overrides call; expected models that are only their layers")
    return _Conversion(flat, example, logits, max_batchsize, outputs).write(Path(repository), name, tolerance)


def _check_names(model: Any) -> None:
    """Refuse a dictionary of inputs that calls an input by another name than its own, which requests have."""
    inputs = getattr(model, "input", None)  # absent before a call of some sequential models
    for key, tensor in inputs.items() if isinstance(inputs, dict) else ():
        if key != tensor.name:
            reason = f"its dictionary calls the input {tensor.name!r} {key!r}; give both one name, which requests have"
            raise ConfigError(str(model.name), "", reason)


def _said(err: Exception) -> str:
    """Return the message of an error of Keras in one line, without its colours and its list of arguments."""
    message = re.sub(r"\x1b\[\d*m", "", str(err)).partition("\n\nArguments received by ")[0]
    return " ".join(line for line in message.splitlines() if line and not line.startswith("Exception encountered"))


def _without_inner(keras: Any, model: Any) -> Any:
    """Return a model of the same layers, where the layers of inner models are the model's own.

    Inputs that only embeddings read are integers, also where Keras has made them floats, its default.
    """
    readers: dict[str, set[str]] = {}

    def run(layer: Any, *arguments: Any, **named: Any) -> Any:
        functional = getattr(layer, "_functional", None) or layer  # of a sequential model
        if hasattr(functional, "_run_through_graph"):
            return functional._run_through_graph(arguments[0], call_fn=run)
        for tensor in keras.tree.flatten((arguments, named)):
            readers.setdefault(str(getattr(tensor, "name", "")), set()).add(type(layer).__name__)
        return layer(*arguments, **named)

    def placeholder(tensor: Any) -> Any:
        kinds = readers.get(str(tensor.name), set())
        is_ids = "Embedding" in kinds and kinds <= {"Embedding", "NotEqual"}  # NotEqual makes a mask
        dtype = "int64" if is_ids and _is_float(tensor) else tensor.dtype
        return keras.Input(batch_shape=tensor.shape, dtype=dtype, name=tensor.name)

    given = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    for _ in range(2):  # the first run finds the readers
        inputs = keras.tree.map_structure(placeholder, given)
        answer = run(model, inputs)
    return keras.Model(inputs, answer, name=model.name)


class _Conversion:
    def __init__(
        self, model: Any, example: Any, logits: bool, max_batchsize: int, kinds: Mapping[str, Kind] | None
    ) -> None:
        import keras

        self._keras, self._model, self._logits, self._max_batchsize = keras, model, logits, max_batchsize
        self._example, self._source = example, str(model.name)
        answer = model.outputs[0] if len(model.outputs) == 1 and not isinstance(model.output, dict) else model.output
        if kinds is not None:
            check_kinds(self._source, kinds)
        if isinstance(answer, list | tuple):
            of_layers, stated = list(model.output_names), list(kinds or ())
            answer = named_in_order(self._source, answer, stated if set(stated).isdisjoint(of_layers) else of_layers)
        self._kinds = kinds_of_answer(self._source, answer, kinds)
        named = [answer[one] for one in self._kinds] if isinstance(answer, dict) else [answer]
        self._outputs = [keras.layers.Identity()(one) for one in named]  # a model cannot be cut at its output
        graph = keras.Model(model.inputs, self._outputs)
        self._nodes = [node for nodes in graph._nodes_by_depth.values() for node in nodes]
        self._maker = {id(tensor): node.operation for node in self._nodes for tensor in node.output_tensors}
        order = {id(operation): place for place, operation in enumerate(graph.operations)}
        self._nodes.sort(key=lambda node: order[id(node.operation)])
        self._lookups = list(self._found_lookups())
        if not self._lookups:
            raise ConfigError(self._source, "", f"expected a layer of the kinds {', '.join(_EMBEDDINGS)}, found none")
        self._refuse_other_readers()
        self._tables = list(dict.fromkeys(lookup.layer.name for lookup in self._lookups))
        self._numbers = [tensor for tensor in model.inputs if _is_float(tensor) and not self._is_preprocessed(tensor)]
        self._dense = [self._cut_of(tensor) for tensor in self._numbers]
        self._widths = [self._size(self._maker[id(cut)], cut) for cut in self._dense]

    def write(self, repository: Path, name: str, tolerance: float) -> ImportedModule:
        """Write the version."""
        plan = self._plan()
        expected, found = self._answers(plan), list[Comparison]()
        path = write_model(
            plan, repository, name, check=lambda folder: found.append(expected.compare(folder, name, tolerance))
        )
        slots = tuple((table.name, slot) for table in plan.tables for slot in table.of_requests.names)
        names = dict.fromkeys([*plan.dense_names, *(slot for _, slot in slots)])
        if plan.features is not None:
            names = dict.fromkeys(one.name for one in plan.features.features)
        return ImportedModule(path, found[0], tuple(str(tensor.name) for tensor in self._numbers), slots, tuple(names))

    def _refuse(self, layer: Any, reason: str) -> ConfigError:
        return ConfigError(self._source, f"layer {layer.name!r} ({type(layer).__name__})", reason)

    def _found_lookups(self) -> Iterator[_Lookup]:
        for node in self._nodes:
            layer, kind = node.operation, type(node.operation).__name__
            if kind == "DistributedEmbedding":
                raise self._refuse(layer, "expected All2AllDenseEmbedding, whose inputs have a fixed number of keys")
            if kind not in _EMBEDDINGS:
                continue
            if not TABLE_NAME.fullmatch(layer.name):
                raise self._refuse(layer, "expected a name of letters, digits, '_', '.' and '-', which names the table")
            [keys], [vectors] = node.input_tensors, node.output_tensors
            lookup = _Lookup(layer, keys, vectors, self._input_of(layer, keys), self._size(layer, keys))
            has_mask = getattr(layer, "mask_zero", False)
            yield lookup._replace(padding=self._padding_of(layer, keys)) if has_mask else lookup

    def _masks(self) -> Iterator[tuple[_Lookup, Any]]:
        """Yield the lookups of sequences and the tensors that say which of their keys are not 0."""
        for node in self._nodes:
            if type(node.operation).__name__ == "NotEqual":
                keys, other = node.arguments.args
                for lookup in self._lookups:
                    if lookup.padding and keys is lookup.keys and isinstance(other, int) and other == 0:
                        yield lookup, node.output_tensors[0]

    def _padding_of(self, layer: Any, keys: Any) -> Padding:
        """Return at which side the example's keys are padded with 0."""
        maker = self._maker[id(keys)]
        if len(keys.shape) != 2:
            raise self._refuse(layer, f"expected keys [B, L], because key 0 is masked, got the shape {keys.shape}")
        if type(maker).__name__ in _PREPROCESSING and getattr(maker, "mask_token", None) != "":
            reason = f"it masks key 0, which {maker.name!r} gives to values"
            raise self._refuse(layer, f"{reason}; expected a StringLookup with mask_token=''")
        is_key = self._keras.ops.convert_to_numpy(self._keras.Model(self._model.input, keys)(self._example)) != 0
        lengths = is_key.sum(axis=1, keepdims=True)
        places = np.arange(is_key.shape[1])
        if (is_key == (places < lengths)).all():
            return "end"
        if (is_key == (places >= is_key.shape[1] - lengths)).all():
            return "start"
        raise self._refuse(layer, "expected an example whose key 0, which is masked, is only padding at one side")

    def _refuse_other_readers(self) -> None:
        """Refuse layers that read keys or texts, because the network gets vectors and numbers only."""
        for tensor in self._model.inputs:
            if not self._readers(tensor):
                raise self._refuse(self._maker[id(tensor)], "no layer reads it; make the model without it")
        masks = {id(mask) for _, mask in self._masks()}
        for node in self._nodes:
            kind = type(node.operation).__name__
            if kind in (*_EMBEDDINGS, *_PREPROCESSING) or id(node.output_tensors[0]) in masks:
                continue
            for tensor in node.input_tensors:
                maker = self._maker[id(tensor)]
                is_input = type(maker).__name__ == "InputLayer" and not _is_float(tensor)
                if is_input or type(maker).__name__ in _PREPROCESSING:
                    reason = f"it reads {maker.name!r}, which only {', '.join(_EMBEDDINGS)} may read"
                    raise self._refuse(node.operation, reason)

    def _input_of(self, layer: Any, keys: Any) -> str:
        """Return the input from which keys come, directly or through a preprocessing layer."""
        maker = self._maker[id(keys)]
        if type(maker).__name__ in _PREPROCESSING:
            [node] = [one for one in self._nodes if one.operation is maker and one.output_tensors[0] is keys]
            maker = self._maker[id(node.input_tensors[0])]
        if type(maker).__name__ != "InputLayer":
            reason = f"expected keys of an input or of {', '.join(_PREPROCESSING)}, got those of {maker.name!r}"
            raise self._refuse(layer, reason)
        return str(maker.name)

    def _readers(self, tensor: Any) -> list[Any]:
        return [node for node in self._nodes if any(one is tensor for one in node.input_tensors)]

    def _is_preprocessed(self, tensor: Any) -> bool:
        """Return whether a preprocessing layer makes keys of an input, and nothing else reads it."""
        return all(type(node.operation).__name__ in _PREPROCESSING for node in self._readers(tensor))

    def _cut_of(self, tensor: Any) -> Any:
        """Return what the network reads of a float input: the numbers, or those of its Normalization."""
        readers = self._readers(tensor)
        is_normalized = len(readers) == 1 and type(readers[0].operation).__name__ == "Normalization"
        return readers[0].output_tensors[0] if is_normalized else tensor

    def _size(self, layer: Any, tensor: Any) -> int:
        """Return how many numbers of a tensor a sample has."""
        sizes = tensor.shape[1:]
        if None in sizes:
            raise self._refuse(layer, f"expected a fixed number of values in a sample, got the shape {tensor.shape}")
        return math.prod(sizes)

    @property
    def _dense_names(self) -> tuple[str, ...]:
        """The name of each number, in the order of the network's."""
        widths = zip(self._numbers, self._widths, strict=True)
        return tuple(one for tensor, width in widths for one in names_of_positions(str(tensor.name), width))

    def _network(self, folder: Path) -> Any:
        """Return the ONNX model of everything behind the embeddings."""
        import onnx

        keras, inputs, masks = self._keras, dict[str, Any](), list[Any]()
        cuts, parts = list[Any](), list[Any]()
        sizes = {table: sum(one.size for one in self._lookups if one.layer.name == table) for table in self._tables}
        first = dict.fromkeys(self._tables, 0)
        for lookup in self._lookups:
            table, dim = lookup.layer.name, int(lookup.vectors.shape[-1])
            if table not in inputs:
                inputs[table] = keras.Input((sizes[table], dim), name=table)
            place = slice(first[table], first[table] + lookup.size)
            first[table] += lookup.size
            own = inputs[table][:, place]
            mask = None
            if lookup.padding is not None:
                name = self._mask_name(table)
                if name not in inputs:
                    inputs[name] = keras.Input((sizes[table],), name=name)
                mask = inputs[name][:, place] > 0.5
                own = keras.ops.where(mask[..., None], own, self._padding_row(lookup.layer))
                read = [tensor for other, tensor in self._masks() if other is lookup]
                cuts += read
                parts += [mask] * len(read)
                masks += [None] * len(read)
            masks.append(mask)
            parts.append(keras.ops.reshape(own, (-1, *lookup.vectors.shape[1:])))
            cuts.append(lookup.vectors)
        network = keras.Model([*cuts, *self._dense], self._outputs, name="network")
        if self._dense:
            numbers = inputs[self._dense_name] = keras.Input((sum(self._widths),), name=self._dense_name)
            begin = 0
            for cut, width in zip(self._dense, self._widths, strict=True):
                parts.append(keras.ops.reshape(numbers[:, begin : begin + width], (-1, *cut.shape[1:])))
                begin += width
        masks += [None] * len(self._dense)
        cut_model = keras.Model(inputs, network(parts, mask=masks if any(one is not None for one in masks) else None))
        cut_model({name: np.zeros((1, *one.shape[1:]), np.float32) for name, one in inputs.items()})  # before an export
        file = folder / "network.onnx"
        with warnings.catch_warnings():  # of the exporters, about their own code
            warnings.simplefilter("ignore")
            cut_model.export(str(file), format="onnx", verbose=False)
        exported = onnx.load(str(file))
        for entry, tensor in zip(exported.graph.output, self._outputs, strict=True):
            for dim, size in zip(entry.type.tensor_type.shape.dim[1:], tensor.shape[1:], strict=False):
                dim.dim_value = size or 0  # exporters do not know the sizes behind some layers
        return exported

    @property
    def _dense_name(self) -> str:
        name = "dense_features"
        while name in self._tables:
            name += "_"
        return name

    def _mask_name(self, table: str) -> str:
        name = f"{table}_mask"
        while name in (*self._tables, self._dense_name):
            name += "_"
        return name

    def _padding_row(self, layer: Any) -> NDArray[np.float32]:
        """Return the row of key 0."""
        row: NDArray[np.float32] = self._rows(layer).read(0, 1)[0]
        return row

    def _sequences(self, table: str) -> SequenceSlots | None:
        """Return which slots of a table are sequences; None if all are pooled."""
        lookups = [one for one in self._lookups if one.layer.name == table]
        padding = lookups[0].padding
        if padding is None:
            return None
        if any(one.padding != padding for one in lookups):
            reason = "expected an example whose sequences are padded at the same side in all its calls"
            raise self._refuse(lookups[0].layer, reason)
        return SequenceSlots(tuple(one.size for one in lookups), self._mask_name(table), padding)

    def _paddings(self, table: str) -> tuple[int, ...]:
        """Return the key of each slot that stands for no key; empty if the slots are no sequences."""
        return tuple(0 for one in self._lookups if one.layer.name == table and one.padding is not None)

    def _rows(self, layer: Any) -> TableRows:
        source = f"{self._source}#{layer.name}"
        variable = getattr(layer, "embedding_variable", None)
        if variable is None:
            return rows_of_array(source, self._keras.ops.convert_to_numpy(layer.embeddings), None)
        if not variable.row_count:
            raise self._refuse(layer, "it has no rows yet; train it first")
        parts = list(variable.own_rows())
        keys, vectors = (np.concatenate(column) for column in zip(*parts, strict=True))
        return rows_of_array(source, vectors, keys)

    def _plan(self) -> ImportPlan:
        with TemporaryDirectory() as folder:
            definition = self._definition(Path(folder))
            network = check_network(self._source, self._network(Path(folder)), self._kinds, self._logits)
            layers = {lookup.layer.name: lookup.layer for lookup in self._lookups}
            rows = {one.name: self._rows(layers[one.name]) for one in network.inputs if one.name in layers}
            dense = next((one for one in network.inputs if one.name == self._dense_name), None)
            of_tables = {
                one: SlotsOfRequest(tuple(self._names(one)), self._sequences(one), True, self._paddings(one))
                for one in rows
            }
            combiners: dict[str, Combiner] = dict.fromkeys(rows, "sum")
            plan = plan_matched(network, Matching(rows, dense, ()), combiners, self._max_batchsize, of_tables)
            plan = replace(plan, dense_names=self._dense_names)
        return plan if definition is None else with_features(plan, self._sized(definition, rows), self._source)

    def _definition(self, folder: Path) -> FeatureDefinition | None:
        """Return the inputs as features, if a layer reads raw features, or if requests may have lists of ids.

        Keras may fail to save a model after others were made of its layers, so this comes first.
        """
        lists = [one.input for one in self._lookups if one.size > 1 and one.padding is None]
        has_lists = bool(lists) and len(set(lists)) == len(lists)
        kinds = {type(node.operation).__name__ for node in self._nodes}
        if kinds.isdisjoint((*_PREPROCESSING, "Normalization")) and not (
            has_lists and all(len(one.shape) <= 2 for one in self._model.inputs)
        ):
            return None
        archive = folder / "model.keras"
        self._model.save(archive)
        return definition_of_archive(archive, self._source)

    def _sized(self, definition: FeatureDefinition, rows: Mapping[str, TableRows]) -> FeatureDefinition:
        """Return the features with their slots. Ids that are the rows of a table end with it, and inputs share them."""
        changes: dict[str, dict[str, Any]] = {one.name: {} for one in definition.features}
        ids = {one.name for one in definition.features if one.kind == "identity"}
        slots = dict.fromkeys(self._tables, 0)
        owners: dict[str, str] = {}
        for lookup in self._lookups:
            table, change = lookup.layer.name, changes[lookup.input]
            begin, owner = slots[table], owners.setdefault(table, lookup.input)
            if owner != lookup.input and owner in ids:
                change["shares"] = changes[owner].get("shares", owner)
            slots[table] += 1 if lookup.padding else lookup.size
            if slots[table] > begin + 1:  # each value of a list has a slot
                if "slot" in change:
                    reason = f"it reads {lookup.input!r}, whose values another layer looks up too; expected one key"
                    raise self._refuse(lookup.layer, reason)
                change["slot"] = f"{table}[{begin}:{slots[table]}]"
            if rows[table].keys is None:
                change["size"] = min(rows[table].rows, change.get("size", rows[table].rows))
        features = tuple(
            one.model_copy(
                update={key: to for key, to in changes[one.name].items() if key == "slot" or one.name in ids}
            )
            for one in definition.features
        )
        return definition.model_copy(update={"features": features})

    def _names(self, table: str) -> Iterator[str]:
        for lookup in self._lookups:
            if lookup.layer.name == table:
                yield from [lookup.input] if lookup.padding else names_of_positions(lookup.input, lookup.size)

    def _answers(self, plan: ImportPlan) -> ExpectedAnswers:
        """Return random requests and the model's answers."""
        rng, convert = np.random.default_rng(0), self._keras.ops.convert_to_numpy
        tensors = {id(lookup.keys): lookup.keys for lookup in self._lookups}
        keys = {id(one.keys): self._random_keys(rng, one, plan) for one in self._lookups}
        numbers = [rng.normal(size=(_SAMPLES, width)).astype(np.float32) for width in self._widths]
        given: list[NDArray[Any]] = [keys[one].reshape(_SAMPLES, *tensor.shape[1:]) for one, tensor in tensors.items()]
        given += [one.reshape(_SAMPLES, *cut.shape[1:]) for one, cut in zip(numbers, self._dense, strict=True)]
        behind = self._keras.Model([*tensors.values(), *self._dense], self._outputs)
        parts = [convert(one).reshape(_SAMPLES, -1) for one in self._keras.tree.flatten(behind(given, training=False))]
        answers = np.concatenate(parts, axis=1).astype(np.float64)
        in_order = [one for table in plan.tables for one in self._lookups if one.layer.name == table.name]
        own = [keys[id(one.keys)] for one in in_order]
        is_key = [(part != 0) | (one.padding is None) for one, part in zip(in_order, own, strict=True)]
        # an average of no key is not a number, which need not be compared
        is_empty = np.any([~part.any(axis=1) for part in is_key], axis=0)
        asked = np.isfinite(answers).all(axis=1) | ~is_empty
        counts = [
            part.astype(int) if one.padding is None else part.sum(axis=1, keepdims=True)
            for one, part in zip(in_order, is_key, strict=True)
        ]
        flat = np.concatenate(own, axis=1)[asked]
        arrays: dict[str, NDArray[Any]] = {
            KEYS: flat[np.concatenate(is_key, axis=1)[asked]],
            ROW_PTRS: np.cumsum([0, *np.concatenate(counts, axis=1)[asked].reshape(-1)]),
        }
        if numbers:
            arrays[DENSE] = np.concatenate(numbers, axis=1)[asked]
        for output in plan.network.outputs:
            if self._logits and output.kind == "probability":
                answers[:, output.columns] = 1 / (1 + np.exp(-answers[:, output.columns]))
            arrays[output.name] = answers[asked][:, output.columns]
        if fault := strange_answers(answers[asked], plan.network.outputs):
            raise ConfigError(self._source, "", f"{fault}; {ADVICE}")
        return ExpectedAnswers(f"random requests to {self._source}", arrays)

    def _random_keys(self, rng: np.random.Generator, lookup: _Lookup, plan: ImportPlan) -> NDArray[np.int64]:
        """Return keys [samples, S] that the tables of a lookup have."""
        [rows] = [table.rows for table in plan.tables if table.name == lookup.layer.name]
        sharing = [one.layer.name for one in self._lookups if one.keys is lookup.keys]
        most = min(table.rows.rows for table in plan.tables if table.name in sharing)
        places = rng.integers(0, most, (_SAMPLES, lookup.size))
        keys: NDArray[np.int64] = places if rows.keys is None else rows.keys[places]
        if lookup.padding is None:
            return keys
        begins = np.arange(lookup.size)[:: 1 if lookup.padding == "end" else -1]
        return np.where(begins < rng.integers(0, lookup.size + 1, (_SAMPLES, 1)), np.maximum(keys, 1), 0)


def _is_float(tensor: Any) -> bool:
    return str(tensor.dtype).startswith(("float", "bfloat"))
