"""Import a Keras model in one call. Keras is imported by the call, not by this package.

1. Find the embeddings among the layers, and what makes their keys: an input, or an input and a preprocessing layer.
2. Cut the model behind the embeddings. Keras exports the rest: the dense network.
3. Read the preprocessing layers as raw features, from the model's ``.keras`` archive.
4. Plan and write a version, as for a network and tables in files. It must give the model's answers before it appears.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.batch import DENSE, KEYS, ROW_PTRS
from serving.errors import ConfigError, MissingExtraError
from serving.features import FeatureDefinition
from serving.features.keras_archive import definition_of_archive
from serving.importers.matching import Matching
from serving.importers.network import check_network
from serving.importers.outputs import ONE_ANSWER, strange_answers
from serving.importers.plan import ImportPlan, SlotsOfRequest, plan_matched, with_features
from serving.importers.pytorch import ImportedModule
from serving.importers.verifying import Comparison, ExpectedAnswers
from serving.importers.writing import write_model
from serving.model.names import TABLE_NAME, names_of_positions
from serving.model.records import Combiner
from serving.model.version_writer import check_target
from serving.sources.rows import TableRows, rows_of_array

_PREPROCESSING = ("StringLookup", "IntegerLookup", "Hashing", "Discretization")
_EMBEDDINGS = ("Embedding", "All2AllDenseEmbedding")
_SAMPLES = 64  # of the random requests


class _Lookup(NamedTuple):
    """A call of an embedding layer: the tensors of its keys and vectors, the input, and the keys of a sample."""

    layer: Any
    keys: Any
    vectors: Any
    input: str
    slots: int


def from_keras(
    model: Any,
    example: Any,
    repository: str | Path,
    name: str,
    *,
    logits: bool = False,
    tolerance: float = 1e-5,
    max_batchsize: int = 1024,
) -> ImportedModule:
    """Write a Keras model into a model repository, and compare the version's answers with the model's.

    Every ``Embedding`` and every ``All2AllDenseEmbedding`` of ``training.tf.sok`` becomes a table. StringLookup,
    IntegerLookup, Hashing, Discretization and Normalization at the model's inputs become raw features, so requests may
    have strings. An empty text counts as missing: it has no key for a Hashing layer. Everything else becomes the dense
    network, which Keras exports.

    Args:
        model: a functional or a sequential model of Keras 3 with one output [B, L].
        example: an input of the model, with any B.
        repository: the model repository, which is created if it does not exist.
        name: the model's name: letters, digits, ``_`` and ``-``.
        logits: the model answers with logits, so a Sigmoid is appended.
        tolerance: the largest absolute difference between the probabilities of the model and of the version.
        max_batchsize: maximum samples per request.

    Raises:
        ConfigError: the model cannot be imported. The message names the layer.
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
    check_target(Path(repository), name)
    if not isinstance(model, keras.Model):
        raise ConfigError("from_keras", "model", f"expected a keras.Model, got {type(model).__name__}")
    model(example)
    return _Conversion(model, logits, max_batchsize).write(Path(repository), name, tolerance)


class _Conversion:
    def __init__(self, model: Any, logits: bool, max_batchsize: int) -> None:
        import keras

        self._keras, self._model, self._logits, self._max_batchsize = keras, model, logits, max_batchsize
        self._source = str(model.name)
        inputs = getattr(model, "inputs", None)
        if not inputs or len(model.outputs) != 1:
            raise ConfigError(self._source, "", "expected a functional or a sequential model with one output")
        graph = keras.Model(model.inputs, model.outputs[0])
        self._nodes = [node for nodes in graph._nodes_by_depth.values() for node in nodes]
        self._maker = {id(tensor): node.operation for node in self._nodes for tensor in node.output_tensors}
        order = {id(operation): place for place, operation in enumerate(graph.operations)}
        self._nodes.sort(key=lambda node: order[id(node.operation)])
        self._lookups = list(self._found_lookups())
        if not self._lookups:
            raise ConfigError(self._source, "", f"expected a layer of the kinds {', '.join(_EMBEDDINGS)}, found none")
        self._refuse_other_readers()
        self._tables = list(dict.fromkeys(lookup.layer.name for lookup in self._lookups))
        self._dense = [self._cut_of(tensor) for tensor in model.inputs if _is_float(tensor)]
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
        return ImportedModule(path, found[0], tuple(self._dense_inputs), slots, tuple(names))

    def _refuse(self, layer: Any, reason: str) -> ConfigError:
        return ConfigError(self._source, f"layer {layer.name!r} ({type(layer).__name__})", reason)

    def _found_lookups(self) -> Iterator[_Lookup]:
        for node in self._nodes:
            layer, kind = node.operation, type(node.operation).__name__
            if kind == "DistributedEmbedding":
                raise self._refuse(layer, "expected All2AllDenseEmbedding, whose inputs have a fixed number of keys")
            if kind not in _EMBEDDINGS:
                continue
            if getattr(layer, "mask_zero", False):
                raise self._refuse(layer, "mask_zero=True: expected False, because a version has no masks")
            if not TABLE_NAME.fullmatch(layer.name):
                raise self._refuse(layer, "expected a name of letters, digits, '_', '.' and '-', which names the table")
            [keys], [vectors] = node.input_tensors, node.output_tensors
            yield _Lookup(layer, keys, vectors, self._input_of(layer, keys), self._size(layer, keys))

    def _refuse_other_readers(self) -> None:
        """Refuse layers that read keys or texts, because the network gets vectors and numbers only."""
        for node in self._nodes:
            if type(node.operation).__name__ in (*_EMBEDDINGS, *_PREPROCESSING):
                continue
            for tensor in node.input_tensors:
                maker = self._maker[id(tensor)]
                if not _is_float(tensor) and type(maker).__name__ in ("InputLayer", *_PREPROCESSING):
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

    def _cut_of(self, tensor: Any) -> Any:
        """Return what the network reads of a float input: the numbers, or those of its Normalization."""
        readers = [node for node in self._nodes if any(one is tensor for one in node.input_tensors)]
        is_normalized = len(readers) == 1 and type(readers[0].operation).__name__ == "Normalization"
        return readers[0].output_tensors[0] if is_normalized else tensor

    def _size(self, layer: Any, tensor: Any) -> int:
        """Return how many numbers of a tensor a sample has."""
        sizes = tensor.shape[1:]
        if None in sizes:
            raise self._refuse(layer, f"expected a fixed number of values in a sample, got the shape {tensor.shape}")
        return math.prod(sizes)

    @property
    def _dense_inputs(self) -> list[str]:
        return [str(tensor.name) for tensor in self._model.inputs if _is_float(tensor)]

    def _network(self, folder: Path) -> Any:
        """Return the ONNX model of everything behind the embeddings."""
        import onnx

        keras, inputs, parts = self._keras, dict[str, Any](), list[Any]()
        cuts = [lookup.vectors for lookup in self._lookups] + self._dense
        network = keras.Model(cuts, self._model.outputs[0], name="network")
        slots = {table: sum(one.slots for one in self._lookups if one.layer.name == table) for table in self._tables}
        first = dict.fromkeys(self._tables, 0)
        for lookup in self._lookups:
            table, dim = lookup.layer.name, int(lookup.vectors.shape[-1])
            if table not in inputs:
                inputs[table] = keras.Input((slots[table], dim), name=table)
            own = inputs[table][:, first[table] : first[table] + lookup.slots]
            first[table] += lookup.slots
            parts.append(keras.ops.reshape(own, (-1, *lookup.vectors.shape[1:])))
        if self._dense:
            numbers = inputs[self._dense_name] = keras.Input((sum(self._widths),), name=self._dense_name)
            begin = 0
            for cut, width in zip(self._dense, self._widths, strict=True):
                parts.append(keras.ops.reshape(numbers[:, begin : begin + width], (-1, *cut.shape[1:])))
                begin += width
        cut_model = keras.Model(inputs, network(parts))
        cut_model({name: np.zeros((1, *one.shape[1:]), np.float32) for name, one in inputs.items()})  # before an export
        file = folder / "network.onnx"
        with warnings.catch_warnings():  # of the exporters, about their own code
            warnings.simplefilter("ignore")
            cut_model.export(str(file), format="onnx", verbose=False)
        return onnx.load(str(file))

    @property
    def _dense_name(self) -> str:
        name = "dense_features"
        while name in self._tables:
            name += "_"
        return name

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
            network = check_network(self._source, self._network(Path(folder)), ONE_ANSWER, self._logits)
            layers = {lookup.layer.name: lookup.layer for lookup in self._lookups}
            rows = {one.name: self._rows(layers[one.name]) for one in network.inputs if one.name in layers}
            dense = next((one for one in network.inputs if one.name == self._dense_name), None)
            of_tables = {one: SlotsOfRequest(tuple(self._names(one)), has_one_key=True) for one in rows}
            combiners: dict[str, Combiner] = dict.fromkeys(rows, "sum")
            plan = plan_matched(network, Matching(rows, dense, ()), combiners, self._max_batchsize, of_tables)
            widths = zip(self._dense_inputs, self._widths, strict=True)
            plan = replace(
                plan, dense_names=tuple(one for name, width in widths for one in names_of_positions(name, width))
            )
            if any(type(node.operation).__name__ in (*_PREPROCESSING, "Normalization") for node in self._nodes):
                archive = Path(folder) / f"{self._source}.keras"
                self._model.save(archive)
                plan = with_features(plan, self._sized(definition_of_archive(archive), rows), str(archive))
        return plan

    def _sized(self, definition: FeatureDefinition, rows: Mapping[str, TableRows]) -> FeatureDefinition:
        """Return the features, where ids that are the rows of a table end with it, as an Embedding's ids do."""
        sizes: dict[str, int] = {}
        for lookup in self._lookups:
            of_table = rows[lookup.layer.name]
            if of_table.keys is None:
                sizes[lookup.input] = min(of_table.rows, sizes.get(lookup.input, of_table.rows))
        features = tuple(
            one.model_copy(update={"size": sizes[one.name]}) if one.kind == "identity" and one.name in sizes else one
            for one in definition.features
        )
        return definition.model_copy(update={"features": features})

    def _names(self, table: str) -> Iterator[str]:
        for lookup in self._lookups:
            if lookup.layer.name == table:
                yield from names_of_positions(lookup.input, lookup.slots)

    def _answers(self, plan: ImportPlan) -> ExpectedAnswers:
        """Return random requests and the model's answers."""
        rng, convert = np.random.default_rng(0), self._keras.ops.convert_to_numpy
        tensors = {id(lookup.keys): lookup.keys for lookup in self._lookups}
        keys = {id(one.keys): self._random_keys(rng, one, plan) for one in self._lookups}
        numbers = [rng.normal(size=(_SAMPLES, width)).astype(np.float32) for width in self._widths]
        given: list[NDArray[Any]] = [keys[one].reshape(_SAMPLES, *tensor.shape[1:]) for one, tensor in tensors.items()]
        given += [one.reshape(_SAMPLES, *cut.shape[1:]) for one, cut in zip(numbers, self._dense, strict=True)]
        behind = self._keras.Model([*tensors.values(), *self._dense], self._model.outputs[0])
        answers = convert(behind(given, training=False)).astype(np.float64)
        [output] = plan.network.outputs
        of_tables = [
            keys[id(one.keys)] for table in plan.tables for one in self._lookups if one.layer.name == table.name
        ]
        flat = np.concatenate(of_tables, axis=1).reshape(-1)
        arrays: dict[str, NDArray[Any]] = {
            KEYS: flat,
            ROW_PTRS: np.arange(len(flat) + 1),
            output.name: 1 / (1 + np.exp(-answers)) if self._logits else answers,
        }
        if numbers:
            arrays[DENSE] = np.concatenate(numbers, axis=1)
        if fault := strange_answers(arrays[output.name], plan.network.outputs):
            raise ConfigError(self._source, "", f"{fault}; if they are logits, use logits=True")
        return ExpectedAnswers(f"random requests to {self._source}", arrays)

    def _random_keys(self, rng: np.random.Generator, lookup: _Lookup, plan: ImportPlan) -> NDArray[np.int64]:
        """Return keys [samples, S] that the tables of a lookup have."""
        [rows] = [table.rows for table in plan.tables if table.name == lookup.layer.name]
        sharing = [one.layer.name for one in self._lookups if one.keys is lookup.keys]
        most = min(table.rows.rows for table in plan.tables if table.name in sharing)
        places = rng.integers(0, most, (_SAMPLES, lookup.slots))
        keys: NDArray[np.int64] = places if rows.keys is None else rows.keys[places]
        return keys


def _is_float(tensor: Any) -> bool:
    return str(tensor.dtype).startswith(("float", "bfloat"))
