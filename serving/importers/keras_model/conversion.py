"""Turn a Keras model into a version of a model. ``from_keras`` is the public call."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError
from serving.features import FeatureConfig, FeatureDefinition
from serving.features.definition import ListConfig
from serving.features.keras_archive import definition_of_archive
from serving.importers.keras_model.example import as_inputs, read_example, said
from serving.importers.keras_model.graph import COMPARISONS, OF_SUBCLASS, KerasGraph, Lookup, is_float, kind_of
from serving.importers.keras_model.network import Network, dense_name, mask_name
from serving.importers.matching import Matching
from serving.importers.network import check_network
from serving.importers.outputs import ADVICE, Kind, strange_answers
from serving.importers.plan import ImportPlan, SlotsOfRequest, plan_matched, with_features
from serving.importers.pytorch import ImportedModule
from serving.importers.verifying import Comparison, ExpectedAnswers, NamedSamples, check_tolerance
from serving.importers.writing import write_model
from serving.model.names import DENSE, KEYS, ROW_PTRS, names_of_positions
from serving.model.records import Combiner
from serving.model.sequences import SequenceSlots
from serving.sources.rows import TableRows, rows_of_array

_SAMPLES = 64  # of the random requests
_LOGGERS = ("tensorflow", "tf2onnx", "torch.onnx", "onnxscript")


def convert(
    model: Any,
    example: Any,
    repository: Path,
    name: str,
    logits: bool,
    tolerance: float,
    max_batchsize: int,
    outputs: Mapping[str, Kind] | None,
) -> ImportedModule:
    """See ``from_keras``."""
    import keras

    check_tolerance("from_keras", tolerance)
    if not isinstance(model, keras.Model):
        raise ConfigError("from_keras", "model", f"expected a keras.Model, got {type(model).__name__}")
    if isinstance(model, keras.Sequential) and not model.built:
        answers_to(keras, model, example)  # which builds it
    if not getattr(model, "inputs", None):
        came = f"{type(model).__name__}, whose inputs Keras does not know"
        reason = f"expected a functional or a sequential model, got {came}; {OF_SUBCLASS}"
        raise ConfigError(str(model.name), "", reason)
    _check_names(model)
    with _quiet():
        graph, arrays = _read(keras, model, example, tolerance, outputs)
        return _Conversion(keras, graph, arrays, logits, max_batchsize).write(repository, name, tolerance)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Keras and its exporters, which warn about their own code."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _read(
    keras: Any, model: Any, example: Any, tolerance: float, outputs: Mapping[str, Kind] | None
) -> tuple[KerasGraph, dict[str, NDArray[Any]]]:
    """Return the parts of a model, and the example as arrays."""
    flat = _without_inner(keras, model)
    graph = KerasGraph(keras, flat, outputs)
    arrays = read_example(model, example)
    given = as_inputs(keras, model, arrays)
    for answer, found in zip(answers_to(keras, model, given), keras.tree.flatten(flat(given)), strict=True):
        expected, own = map(keras.ops.convert_to_numpy, (answer, found))
        if not np.allclose(expected, own, atol=tolerance, equal_nan=True):
            reason = "a model overrides call, or its answers are random or depend on earlier samples"
            raise ConfigError(str(model.name), "", f"{reason}; expected a model that only calls its layers")
    graph.find_padding(given)
    return graph, arrays


def answers_to(keras: Any, model: Any, example: Any) -> list[Any]:
    """Return the outputs of a model. Raise ConfigError if it does not take the example."""
    try:
        answers: list[Any] = keras.tree.flatten(model(example))
    except Exception as err:  # of any layer or backend
        raise ConfigError("from_keras", "example", f"the model does not accept it: {said(err)}") from err
    return answers


def _check_names(model: Any) -> None:
    """Refuse a dictionary of inputs that calls an input by another name than its own, which requests have."""
    inputs = getattr(model, "input", None)  # absent before a call of some sequential models
    for key, tensor in inputs.items() if isinstance(inputs, dict) else ():
        if key != tensor.name:
            reason = f"its dictionary has the input {tensor.name!r} under the key {key!r}; give both the same name"
            raise ConfigError(str(model.name), "", reason)


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
            readers.setdefault(str(getattr(tensor, "name", "")), set()).add(kind_of(layer))
        return layer(*arguments, **named)

    def placeholder(tensor: Any) -> Any:
        kinds = readers.get(str(tensor.name), set())
        is_ids = "Embedding" in kinds and kinds <= {"Embedding", *COMPARISONS}
        dtype = "int64" if is_ids and is_float(tensor) else tensor.dtype
        return keras.Input(batch_shape=tensor.shape, dtype=dtype, name=tensor.name)

    given = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    for _ in range(2):  # the first run finds the readers
        inputs = keras.tree.map_structure(placeholder, given)
        answer = run(model, inputs)
    return keras.Model(inputs, answer, name=model.name)


class _Conversion:
    def __init__(
        self,
        keras: Any,
        graph: KerasGraph,
        example: Mapping[str, NDArray[Any]],
        logits: bool,
        max_batchsize: int,
    ) -> None:
        self._keras, self._graph, self._example, self._source = keras, graph, example, graph.source
        self._logits, self._max_batchsize = logits, max_batchsize
        layers = {lookup.layer.name: lookup.layer for lookup in graph.lookups}
        self._rows = {name: self._rows_of(layers[name]) for name in graph.tables}

    def write(self, repository: Path, name: str, tolerance: float) -> ImportedModule:
        """Write the version."""
        plan = self._plan()
        expected, found = self._answers(plan), list[Comparison]()
        path = write_model(
            plan, repository, name, check=lambda folder: found.append(expected.compare(folder, name, tolerance))
        )
        slots = tuple((table.name, slot) for table in plan.tables for slot in table.of_requests.names)
        assert plan.features is not None
        names = tuple(feature.name for feature in plan.features.features)
        return ImportedModule(path, found[0], tuple(str(number.name) for number in self._graph.numbers), slots, names)

    def _rows_of(self, layer: Any) -> TableRows:
        source = f"{self._source}#{layer.name}"
        variable = getattr(layer, "embedding_variable", None)
        if variable is None:
            return rows_of_array(source, self._keras.ops.convert_to_numpy(layer.embeddings), None)
        if not variable.row_count:
            raise self._graph.refuse(layer, "it has no rows yet; train it first")
        parts = list(variable.own_rows())
        keys, vectors = (np.concatenate(column) for column in zip(*parts, strict=True))
        return rows_of_array(source, vectors, keys)

    def _plan(self) -> ImportPlan:
        graph, has_mask = self._graph, {other.layer.name for other in self._graph.lookups if other.padding}
        padding_rows = {table: self._rows[table].read(0, 1)[0] for table in has_mask}
        with TemporaryDirectory() as folder:
            definition = self._definition(Path(folder))
            exported = Network(self._keras, graph, padding_rows).export(Path(folder))
        network = check_network(self._source, exported, graph.kinds, self._logits)
        rows = {tensor.name: self._rows[tensor.name] for tensor in network.inputs if tensor.name in self._rows}
        dense = next((tensor for tensor in network.inputs if tensor.name == dense_name(graph)), None)
        of_tables = {}
        for table in rows:
            names = tuple(name for lookup in graph.of_table(table) for name in lookup.names)
            paddings = tuple(0 for lookup in graph.of_table(table) if lookup.padding is not None)
            of_tables[table] = SlotsOfRequest(names, self._sequences(table), True, paddings)
        combiners: dict[str, Combiner] = dict.fromkeys(rows, "sum")
        plan = plan_matched(network, Matching(rows, dense, ()), combiners, self._max_batchsize, of_tables)
        return with_features(replace(plan, dense_names=graph.dense_names), definition, self._source)

    def _sequences(self, table: str) -> SequenceSlots | None:
        """Return which slots of a table are sequences; None: none is."""
        lookups = self._graph.of_table(table)
        padding = lookups[0].padding
        if padding is None:
            return None
        return SequenceSlots(tuple(lookup.size for lookup in lookups), mask_name(self._graph, table), padding)

    def _definition(self, folder: Path) -> FeatureDefinition:
        """Return the inputs as features. Ids that are the rows of a table end with it, and a larger id is an error.

        Keras may fail to save a model after others were made of its layers, so this comes first.
        """
        graph = self._graph
        lists = [lookup.input for lookup in graph.lookups if lookup.size > 1 and lookup.padding is None]
        is_list_read_once = len(set(lists)) == len(lists) and all(
            len(tensor.shape) <= 2 for tensor in graph.model.inputs
        )
        if not is_list_read_once and not graph.has_preprocessing:
            return self._definition_of_positions()
        archive = folder / "model.keras"
        graph.before.save(archive)
        return self._sized(definition_of_archive(archive, self._source))

    def _definition_of_positions(self) -> FeatureDefinition:
        """Return a feature for each key of an input."""
        features = {name: FeatureConfig(name=name, kind="dense") for name in self._graph.dense_names}
        owners: dict[str, str] = {}
        for lookup in self._graph.lookups:
            table = lookup.layer.name
            for name in lookup.names:
                owner, earlier = owners.setdefault(table, name), features.get(name)
                shares = owner if earlier is None or earlier.shares is None else earlier.shares
                features[name] = FeatureConfig(
                    name=name,
                    kind="identity",
                    list=ListConfig(most=lookup.size) if lookup.padding else None,
                    size=self._end(table, earlier),
                    shares=None if shares == name else shares,
                )
        return FeatureDefinition(format=1, features=tuple(features.values()))

    def _end(self, table: str, earlier: FeatureConfig | None) -> int | None:
        """Return the number that is larger than every id of a table, and of the tables that read them earlier."""
        rows, before = self._rows[table], None if earlier is None else earlier.size
        if rows.keys is not None:
            return before
        return rows.rows if before is None else min(rows.rows, before)

    def _sized(self, definition: FeatureDefinition) -> FeatureDefinition:
        """Return the features with their slots and their ends."""
        features = {known.name: known for known in definition.features}
        slots = dict.fromkeys(self._graph.tables, 0)
        owners: dict[str, str] = {}
        for lookup in self._graph.lookups:
            table, feature = lookup.layer.name, features[lookup.input]
            change: dict[str, Any] = {}
            begin, owner = slots[table], owners.setdefault(table, lookup.input)
            slots[table] += 1 if lookup.padding else lookup.size
            if slots[table] > begin + 1:  # each value of a list has a slot
                if feature.slot is not None:
                    reason = f"it reads {lookup.input!r}, whose values another layer looks up too"
                    advice = "give it an input of its own with the same values"
                    raise self._graph.refuse(lookup.layer, f"{reason}; {advice}")
                change["slot"] = f"{table}[{begin}:{slots[table]}]"
            if feature.kind == "identity":
                change["size"] = self._end(table, feature)
                if owner != lookup.input and features[owner].kind == "identity":
                    change["shares"] = features[owner].shares or owner
            features[lookup.input] = feature.model_copy(update=change)
        return definition.model_copy(update={"features": tuple(features.values())})

    def _answers(self, plan: ImportPlan) -> ExpectedAnswers:
        """Return random requests and the model's answers."""
        graph, keras = self._graph, self._keras
        rng, convert = np.random.default_rng(0), keras.ops.convert_to_numpy
        tensors = {id(lookup.keys): lookup.keys for lookup in graph.lookups}
        keys = {id(lookup.keys): self._random_keys(rng, lookup) for lookup in graph.lookups}
        numbers = [rng.normal(size=(_SAMPLES, width)).astype(np.float32) for width in graph.widths]
        given: list[NDArray[Any]] = [keys[one].reshape(_SAMPLES, *tensor.shape[1:]) for one, tensor in tensors.items()]
        given += [one.reshape(_SAMPLES, *cut.shape[1:]) for one, cut in zip(numbers, graph.cuts, strict=True)]
        behind = keras.Model([*tensors.values(), *graph.cuts], graph.outputs)
        parts = [convert(one).reshape(_SAMPLES, -1) for one in keras.tree.flatten(behind(given, training=False))]
        answers = np.concatenate(parts, axis=1).astype(np.float64)
        in_order = [lookup for table in plan.tables for lookup in graph.of_table(table.name)]
        own = [keys[id(lookup.keys)] for lookup in in_order]
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
        answers = self._squashed(plan, answers[asked])
        arrays |= _by_output(plan, answers)
        if fault := strange_answers(answers, plan.network.outputs):
            raise ConfigError(self._source, "", f"{fault}; {ADVICE}")
        return ExpectedAnswers(f"random requests to {self._source}", arrays, self._named(plan))

    def _squashed(self, plan: ImportPlan, answers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the answers with probabilities in place of logits."""
        squashed = answers.copy()
        for output in plan.network.outputs:
            if self._logits and output.kind == "probability":
                squashed[:, output.columns] = 1 / (1 + np.exp(-answers[:, output.columns]))
        return squashed

    def _named(self, plan: ImportPlan) -> NamedSamples:
        """Return the example as a request by name, and the model's answers: preprocessing layers are compared too."""
        keras, graph = self._keras, self._graph
        example = {name: array[: self._max_batchsize] for name, array in self._example.items()}
        inputs = as_inputs(keras, graph.model, example)
        outputs = keras.tree.flatten(keras.Model(graph.model.input, graph.outputs)(inputs, training=False))
        parts = [keras.ops.convert_to_numpy(output) for output in outputs]
        answers = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1).astype(np.float64)
        asked = np.isfinite(answers).all(axis=1)  # a request without an answer is an error
        if not asked.any():
            inputs = [name for name, array in example.items() if array.dtype.kind == "f" and np.isnan(array).any()]
            came = f"none; these inputs have NaN: {', '.join(map(repr, inputs))}" if inputs else "none"
            raise ConfigError("from_keras", "example", f"expected a sample whose answers are finite, got {came}")
        assert plan.features is not None
        features = {feature.name for feature in plan.features.features}
        columns = {
            key: column
            for name, array in example.items()
            for key, column in self._columns(name, array[asked].reshape(asked.sum(), -1), name in features)
        }
        return NamedSamples(columns, _by_output(plan, self._squashed(plan, answers[asked])))

    def _columns(self, name: str, array: NDArray[Any], is_feature: bool) -> Iterator[tuple[str, list[Any]]]:
        """Yield the features of an input, [B, n], and their values."""
        if not is_feature:
            yield from zip(names_of_positions(name, array.shape[1]), array.T.tolist(), strict=True)
        elif array.shape[1] == 1:
            yield name, array[:, 0].tolist()
        else:
            is_sequence = any(other.padding is not None for other in self._graph.lookups if other.input == name)
            padding = "" if array.dtype.kind in "US" else 0
            yield name, [[key for key in row if not is_sequence or key != padding] for row in array.tolist()]

    def _random_keys(self, rng: np.random.Generator, lookup: Lookup) -> NDArray[np.int64]:
        """Return keys [samples, S] that the tables of a lookup have."""
        rows = self._rows[lookup.layer.name]
        sharing = [other.layer.name for other in self._graph.lookups if other.keys is lookup.keys]
        places = rng.integers(0, min(self._rows[name].rows for name in sharing), (_SAMPLES, lookup.size))
        keys: NDArray[np.int64] = places if rows.keys is None else rows.keys[places]
        if lookup.padding is None:
            return keys
        begins = np.arange(lookup.size)[:: 1 if lookup.padding == "end" else -1]
        return np.where(begins < rng.integers(0, lookup.size + 1, (_SAMPLES, 1)), np.maximum(keys, 1), 0)


def _by_output(plan: ImportPlan, answers: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    return {output.name: answers[:, output.columns] for output in plan.network.outputs}
