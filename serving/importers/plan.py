"""The plan of an import: a network, its tables, and the ``graph.json`` that joins them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving.errors import ConfigError, did_you_mean
from serving.features import (
    FeatureDefinition,
    FeatureReader,
    read_features,
    slots_of_graph,
)
from serving.importers.matching import Matching, hint, match_tables
from serving.importers.network import ImportedNetwork, NetworkInput, read_network, try_network
from serving.importers.outputs import Kind
from serving.model.graph import name_inputs, parse_graph
from serving.model.names import ANSWER, TABLE_NAME, names_of_positions
from serving.model.records import Combiner, Graph, Output
from serving.model.sequences import Padding, SequenceSlots
from serving.model.version_writer import ONNX_FILE, check_table_names
from serving.sources.checkpoint import show_names
from serving.sources.rows import BareDtype, TableRows

_LARGEST = 2**31 - 1  # the most samples of a request, and the most keys of a sample
_RENAME = "export the network with other input_names"


@dataclass(frozen=True, slots=True)
class SlotsOfRequest:
    """The slots of a table in requests.

    Attributes:
        names: what requests call them.
        sequences: which are sequences; None: all are pooled.
        has_one_key: a sample has exactly one key in each slot that is not a sequence.
        paddings: of each slot the key that stands for no key; None: it has none. Empty: no slot has one.
    """

    names: tuple[str, ...]
    sequences: SequenceSlots | None = None
    has_one_key: bool = False
    paddings: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        """Return how many they are, and the lengths of sequences."""
        slots = f"{len(self.names)} slot{'s' * (len(self.names) > 1)}"
        if self.sequences is None:
            return slots
        return f"{slots} (sequences of at most {', '.join(str(most) for most in self.sequences.most if most)} keys)"

    @property
    def needs_keys(self) -> bool:
        """Whether a slot has exactly one key."""
        return self.has_one_key and (self.sequences is None or 0 in self.sequences.most)

    @property
    def most_keys(self) -> int:
        """The most keys of a sample."""
        if not self.has_one_key:
            return _LARGEST
        return len(self.names) if self.sequences is None else self.sequences.positions


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """One table, which has the name of the network's input that it feeds.

    Attributes:
        name: the name of the table and of the input.
        rows: where its rows come from.
        combiner: how the rows of one slot are pooled.
        of_requests: its slots in requests.
    """

    name: str
    rows: TableRows
    combiner: Combiner
    of_requests: SlotsOfRequest

    @property
    def slots(self) -> int:
        """S."""
        return len(self.of_requests.names)


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """A model that can be written. Everything is checked except the vectors' values.

    Attributes:
        network: the dense network.
        dense: its input for dense features. None if F is 0.
        tables: in the order of the network's inputs, which is their order in a request.
        max_batchsize: maximum samples per request.
        unused: possible tables of the checkpoint that no input is named after.
        dense_names: what requests call the dense features.
        features: the raw features that requests may have; None: they have keys and numbers, by name or not.
    """

    network: ImportedNetwork
    dense: NetworkInput | None
    tables: tuple[PlannedTable, ...]
    max_batchsize: int
    unused: tuple[str, ...]
    dense_names: tuple[str, ...] = ()
    features: FeatureDefinition | None = None

    def document(self) -> dict[str, Any]:
        """Return ``graph.json``: a Data layer and one embedding layer per table. The network replaces the rest."""
        names = {table.name for table in self.tables}
        dense = self.dense or NetworkInput(_fresh("dense", names), (0,))
        keys = {table.name: _fresh(f"{table.name}_keys", {*names, dense.name}) for table in self.tables}
        is_one_answer = self.network.outputs == (Output(ANSWER, width=self.network.label_dim),)
        data = {
            "type": "Data",
            "label": {"label_dim": self.network.label_dim},
            **({} if is_one_answer else {"outputs": [_output(output) for output in self.network.outputs]}),
            "dense": {"top": dense.name, "dense_dim": dense.sizes[0]},
            "sparse": [
                {
                    "top": keys[table.name],
                    "slot_num": table.slots,
                    "max_feature_num_per_sample": table.of_requests.most_keys,
                    **_sequence(table.of_requests.sequences),
                    **({"one_key": True} if table.of_requests.needs_keys else {}),
                    **_paddings(table.of_requests.paddings),
                }
                for table in self.tables
            ],
        }
        inference = {
            "max_batchsize": self.max_batchsize,
            "input_key_type": "I64",
            "dense_model_file": ONNX_FILE,
            "sparse_model_file": [table.name for table in self.tables],
        }
        document = {"inference": inference, "layers": [data, *(_embedding(table, keys) for table in self.tables)]}
        slots = [name for table in self.tables for name in table.of_requests.names]
        return name_inputs(document, slots, self.dense_names)

    def graph(self) -> Graph:
        """Return ``document()`` as a ``Graph``."""
        return parse_graph(self.document(), self.network.source, inputs_only=True)

    def describe(self) -> Iterator[str]:
        """Return lines for the user: what a request must contain, in order, and where the rows come from."""
        dense = f"{self.dense.sizes[0]} dense features ({self.dense.name})" if self.dense else "no dense features"
        answers = ", ".join(
            f"[B, {output.width}]" if output.name == ANSWER else f"{output.name} [B, {output.width}] ({output.kind})"
            for output in self.network.outputs
        )
        yield f"network {self.network.source}: {dense}, answers {answers}"
        for table in self.tables:
            keys = "row numbers are the keys" if table.rows.keys is None else "with keys"
            yield (
                f"table {table.name}: {table.of_requests}, {table.combiner}; "
                f"{table.rows.rows:,} rows of {table.rows.dim} from {table.rows.source}, {keys}"
            )
        if self.features is not None:
            yield f"raw features: {', '.join(feature.name for feature in self.features.columns)}"
        if self.unused:
            yield f"not used, because no input has this name: {show_names(self.unused)}"


def plan_import(
    network: str | Path,
    combiner: Combiner,
    tables: Mapping[str, str | Path] | None = None,
    checkpoint: str | Path | None = None,
    combiners: Mapping[str, Combiner] | None = None,
    logits: bool = False,
    max_batchsize: int = 1024,
    dense: str | None = None,
    row_dtype: BareDtype | None = None,
    features: str | Path | None = None,
    outputs: Mapping[str, Kind] | None = None,
    sequences: Mapping[str, Sequence[int | str]] | None = None,
) -> ImportPlan:
    """Open the network and its tables, and check that they fit.

    Args:
        network: the dense network, an ONNX file. Each input is float32: a table's pooled vectors, [B, S, D] or
            [B, S * D], or the dense features, [B, F]. Each output is float32[B, L] or float32[B].
        combiner: how the rows of one slot are pooled. No file says this, and a wrong guess gives wrong answers.
        tables: where a table's rows are, by the name of its input. See ``open_table`` for the forms.
        checkpoint: where the tables of all other inputs are looked up by name. See ``open_checkpoint``.
        combiners: for tables that are pooled in another way than ``combiner``.
        logits: the network answers with logits, so a Sigmoid is appended to each output that is a probability.
        max_batchsize: maximum samples per request.
        dense: the input that takes the dense features. None: the input called ``dense``, if it has no table. Every
            other input needs a table.
        row_dtype: the type of vectors in files without a header. None: float32, unless half precision fits the input
            too, which is an error.
        features: a ``features.json``, so that requests may have raw features.
        outputs: the kinds of outputs: ``"probability"``, ``"score"``, ``"vector"``, or ``"omit"`` to leave it out.
            Other outputs are probabilities. An only output without a kind is called ``OUTPUT0``.
        sequences: by the name of a table's input, [B, P, D], the most keys of each slot: the input has the row of each
            key. 0 stands for a slot that is pooled. ``"start"`` at the end of the list: positions without a key come
            before those with a key. The input ``<name>_mask``, [B, P], if there is one, is 1 where a position has a
            key.

    Raises:
        ConfigError: the arguments do not fit the network: a table has no input, an input has no table, D differs, or
            the features are not those of the slots.
        ModelFileError: a file cannot be read, or does not hold what is needed.
        MissingExtraError: a package is not installed.
    """
    definition = None if features is None else read_features(features)
    imported = read_network(Path(network), logits, outputs)
    of_sequences = _sequences(imported, sequences or {})
    masks = {found.mask for found in of_sequences.values()}
    inputs = tuple(entry for entry in imported.inputs if entry.name not in masks)
    matching = match_tables(replace(imported, inputs=inputs), tables or {}, checkpoint, dense, row_dtype)
    own = combiners or {}
    for what, names in (("combiner", own), ("sequence", of_sequences)):
        for name in names.keys() - matching.rows.keys():
            raise ConfigError(str(network), what, f"no table is called {name!r}{hint(name, matching.rows)}")
    of_tables = {name: _slots_of(imported, name, rows, of_sequences.get(name)) for name, rows in matching.rows.items()}
    by_table = {name: own.get(name, combiner) for name in matching.rows}
    plan = plan_matched(imported, matching, by_table, max_batchsize, of_tables)
    return plan if definition is None else with_features(plan, definition, str(features))


def with_features(plan: ImportPlan, features: FeatureDefinition, source: str) -> ImportPlan:
    """Return a plan whose requests may have raw features. ``source`` is the file of the definition, for messages.

    Raises:
        ConfigError: the definition does not fit the plan.
    """
    features = _in_order(features, plan.dense_names, source)
    graph = plan.graph()
    slots = slots_of_graph(graph)
    reader = FeatureReader(features, slots, graph.dense_dim, source)
    rows = {table.name: table.rows for table in plan.tables}
    number = {feature.name: place for place, feature in enumerate(features.features)}
    for slot, name in zip(slots, reader.of_slots, strict=True):
        keys, of_table = reader.ranges[name], rows[slot.table]
        if of_table.keys is None and keys.end > of_table.rows:
            reason = f"the keys of {name!r} are {keys.begin} to {keys.end - 1}, but the table {slot.table!r} has only"
            raise ConfigError(source, f"features[{number[name]}]", f"{reason} the keys 0 to {of_table.rows - 1}")
    return replace(plan, features=features)


def _in_order(features: FeatureDefinition, names: Sequence[str], source: str) -> FeatureDefinition:
    """Return the features with the dense numbers in the network's order, if their names are the network's.

    Raises:
        ConfigError: only some of the names are the network's.
    """
    places = {name: place for place, name in enumerate(names)}
    others = [name for name in features.dense_names if name not in places]
    if others and len(others) < len(features.dense_names):
        reason = f"the network has the dense numbers {', '.join(names)}, but no {others[0]!r}"
        raise ConfigError(source, "", f"{reason}{did_you_mean(others[0], places)}")
    if others or len(places) != len(features.dense_names):
        return features
    firsts = {feature.name: places[names_of_positions(feature.name, feature.width)[0]] for feature in features.dense}
    in_order = tuple(sorted(features.features, key=lambda one: firsts.get(one.name, -1)))
    return features.model_copy(update={"features": in_order})


def plan_matched(
    network: ImportedNetwork,
    matching: Matching,
    combiners: Mapping[str, Combiner],
    max_batchsize: int,
    of_tables: Mapping[str, SlotsOfRequest],
) -> ImportPlan:
    """Check that a network and the tables of its inputs fit. See ``plan_import``.

    ``combiners`` and ``of_tables`` have every table.
    """
    if not 1 <= max_batchsize <= _LARGEST:
        raise ConfigError(network.source, "max_batchsize", f"expected 1 to {_LARGEST}, got {max_batchsize!r}")
    planned = tuple(PlannedTable(name, rows, combiners[name], of_tables[name]) for name, rows in matching.rows.items())
    for table in planned:
        trained = table.rows.pooling.combiner
        if trained not in (None, table.combiner):
            reason = (
                f"expected the combiner {trained}, with which {table.rows.source} was trained, got {table.combiner}"
            )
            raise ConfigError(network.source, f"table {table.name!r}", reason)
    dense = matching.dense
    dense_names = tuple(names_of_positions(dense.name, dense.sizes[0])) if dense is not None else ()
    plan = ImportPlan(network, dense, planned, max_batchsize, matching.unused, dense_names)
    graph = _checked_graph(plan)
    for table in planned:
        table.rows.check_keys()
    try_network(graph, network, [table.rows for table in planned])
    return plan


def _checked_graph(plan: ImportPlan) -> Graph:
    """Return the plan's graph. Errors about names are about the inputs, because the user wrote those."""
    source = plan.network.source
    for table in plan.tables:
        if not TABLE_NAME.fullmatch(table.name):
            reason = "a table has the name of its input, which needs 1 to 120 letters, digits, '_', '-' and '.'"
            raise ConfigError(source, f"input {table.name!r}", f"{reason}; {_RENAME}")
    graph = plan.graph()
    try:
        check_table_names(graph)
    except ConfigError as err:
        raise ConfigError(source, "inputs", f"{err.reason}; {_RENAME}") from err
    return graph


def _sequences(network: ImportedNetwork, given: Mapping[str, Sequence[int | str]]) -> dict[str, SequenceSlots]:
    """Return which slots of tables are sequences, with the masks that the network reads."""
    names = [entry.name for entry in network.inputs]
    for name in given:
        if name not in names:
            reason = f"the network has no input of this name{hint(name, names)}"
            raise ConfigError(network.source, f"sequence {name!r}", reason)
    found = {}
    for name, numbers in given.items():
        is_at_start, mask = numbers[-1:] in (["start"], ("start",)), f"{name}_mask"
        most: Any = tuple(numbers[:-1] if is_at_start else numbers)
        padding: Padding = "start" if is_at_start else "end"
        found[name] = SequenceSlots(most, mask if mask in names else "", padding)
    return found


def _slots_of(network: ImportedNetwork, name: str, rows: TableRows, sequences: SequenceSlots | None) -> SlotsOfRequest:
    """Return the slots of a table: as many as its input has vectors, or those with sequences."""
    entry = next(entry for entry in network.inputs if entry.name == name)
    vectors = _vectors(network.source, entry, rows)
    if sequences is None:
        return SlotsOfRequest(tuple(names_of_positions(name, vectors)))
    if sequences.positions != vectors:
        most = ",".join(map(str, sequences.most))
        reason = f"is {entry.shape}, but --sequence {name}={most} (sequences=...) has {sequences.positions} rows"
        raise ConfigError(network.source, f"input {name!r}", reason)
    return SlotsOfRequest(tuple(names_of_positions(name, len(sequences.most))), sequences)


def _vectors(source: str, entry: NetworkInput, rows: TableRows) -> int:
    """Return how many vectors an input has, which follows from its sizes and the table's D."""
    *slots, width = entry.sizes
    if slots and width == rows.dim:
        return slots[0]
    if not slots and width % rows.dim == 0:
        return width // rows.dim
    reason = f"is {entry.shape}, but {rows.source} has rows of {rows.dim}"
    raise ConfigError(source, f"input {entry.name!r}", reason)


def _output(output: Output) -> dict[str, Any]:
    return {"name": output.name, "kind": output.kind, "width": output.width}


def _embedding(table: PlannedTable, keys: Mapping[str, str]) -> dict[str, Any]:
    default_value = table.rows.pooling.default_value
    return {
        "name": table.name,
        "type": "DistributedSlotSparseEmbeddingHash",
        "bottom": keys[table.name],
        "top": table.name,
        "sparse_embedding_hparam": {
            "embedding_vec_size": table.rows.dim,
            "combiner": table.combiner,
            **({"default_emb_vec_value": default_value} if default_value else {}),
        },
    }


def _sequence(sequences: SequenceSlots | None) -> dict[str, Any]:
    """Return the part of a sparse input that says which slots are sequences."""
    if sequences is None:
        return {}
    mask = {"mask": sequences.mask} if sequences.mask else {}
    padding = {} if sequences.padding == "end" else {"padding": sequences.padding}
    return {"sequence": {"most": list(sequences.most), **mask, **padding}}


def _paddings(keys: Sequence[int | None]) -> dict[str, Any]:
    return {} if all(key is None for key in keys) else {"padding_keys": list(keys)}


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
