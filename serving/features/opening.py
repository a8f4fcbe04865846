"""What a model calls its inputs: the ``features.json`` next to its ``graph.json``, or the names in the graph."""

from collections.abc import Iterator, Sequence

from serving.config import ModelConfig
from serving.errors import ConfigError
from serving.features.definition import (
    FEATURES_FILE,
    FeatureConfig,
    FeatureDefinition,
    ListConfig,
    read_definition,
)
from serving.features.reader import FeatureReader
from serving.features.slots import SlotOfTable
from serving.model.records import Graph
from serving.model.regular_file import is_absent
from serving.model.sequences import SequenceSlots

_GRAPH_FILE = "graph.json"


def slots_of(config: ModelConfig) -> list[SlotOfTable]:
    """Return the slots of a model in order."""
    return [
        slot
        for table in config.tables
        for slot in _slots(
            table.name, table.slots, table.slot_names, table.max_keys_per_sample, table.sequences, table.one_key
        )
    ]


def slots_of_graph(graph: Graph) -> list[SlotOfTable]:
    """Return the slots of a graph in order."""
    inputs = {entry.top: entry for entry in graph.sparse}
    pairs = ((each.table, inputs[each.bottom]) for each in graph.embeddings)
    return [
        slot
        for table, entry in pairs
        for slot in _slots(table, entry.slots, entry.names, entry.max_keys_per_sample, entry.sequences, entry.one_key)
    ]


def _slots(
    table: str,
    slots: int,
    names: Sequence[str],
    most_keys: int | None,
    sequences: SequenceSlots | None,
    one_key: bool,
) -> Iterator[SlotOfTable]:
    """Yield the slots of a table in order.

    A table's only slot has the place ``user``, and several slots have their numbers: ``item[0]``, ``item[1]``. These
    are also paths in the keys of a ``/predict`` sample.
    """
    for slot in range(slots):
        most = 0 if sequences is None else sequences.most[slot]
        yield SlotOfTable(
            place=table if slots == 1 else f"{table}[{slot}]",
            table=table,
            own_name=names[slot] if names else "",
            has_one_key=most_keys == (slots if sequences is None else sequences.positions),
            most=most,
            needs_key=one_key and not most,
        )


def definition_of_names(slots: Sequence[SlotOfTable], dense: Sequence[str]) -> FeatureDefinition | None:
    """Return the features of a graph that names its inputs: keys and numbers by name, as they are.

    None if the graph has no names.
    """
    by_name: dict[str, list[SlotOfTable]] = {}
    for slot in slots:
        if not slot.own_name:
            return None
        by_name.setdefault(slot.own_name, []).append(slot)
    first = next(iter(by_name))
    features = [FeatureConfig(name=name, kind="dense") for name in dense]
    for name, own in by_name.items():
        longest = min((slot.most for slot in own if slot.most), default=None)
        has_one_key = longest is None and all(slot.has_one_key for slot in own)
        several = None if has_one_key else ListConfig(most=longest)
        shares = None if name == first else first
        features.append(FeatureConfig(name=name, kind="identity", list=several, shares=shares))
    return FeatureDefinition(format=1, features=tuple(features))


def open_features(config: ModelConfig) -> FeatureReader | None:
    """Return the reader of a model's raw features, or of its inputs by name; None if requests have keys alone.

    Raises:
        ConfigError: the definition is wrong, or does not fit the model.
    """
    if config.graph_file is None:
        return None
    path, slots = config.graph_file.parent / FEATURES_FILE, slots_of(config)
    if config.graph_file.name != _GRAPH_FILE or is_absent(path):
        definition = definition_of_names(slots, config.dense_names)
        if definition is None or len(config.dense_names) != config.dense_dim:  # of an older version on other tables
            return None
        by_name = [slot._replace(place=slot.name) for slot in slots]
        return FeatureReader(definition, by_name, config.dense_dim, str(config.graph_file), has_keys=True)
    if config.slot_keys == "unshifted" or config.key_type == "I32":
        reason = (
            "features give int64 keys of the tables, but the model's requests have keys that begin at 0 in each slot"
        )
        raise ConfigError(str(path), "", reason if config.key_type == "I64" else "features need a model of int64 keys")
    return FeatureReader(read_definition(path), slots, config.dense_dim, str(path))
