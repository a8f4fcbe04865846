"""The ``features.json`` of a model, next to its ``graph.json``."""

from collections.abc import Iterable

from serving.config import ModelConfig
from serving.errors import ConfigError
from serving.features.definition import FEATURES_FILE, read_definition
from serving.features.reader import FeatureReader, SlotOfTable
from serving.model.regular_file import is_absent

_GRAPH_FILE = "graph.json"


def slots_of(config: ModelConfig) -> list[SlotOfTable]:
    """Return the slots of a model in order; see ``slots_of_tables``."""
    return slots_of_tables([(table.name, table.slots) for table in config.tables])


def slots_of_tables(tables: Iterable[tuple[str, int]]) -> list[SlotOfTable]:
    """Return the slots of tables in order; each table is given with its number of slots.

    HugeCTR's graphs name tables, not slots. A table's only slot has the table's name, and several slots have their
    numbers too: ``user``, ``item[0]``, ``item[1]``. These are also paths in the keys of a ``/predict`` sample.
    """
    return [
        SlotOfTable(table if slots == 1 else f"{table}[{slot}]", table)
        for table, slots in tables
        for slot in range(slots)
    ]


def open_features(config: ModelConfig) -> FeatureReader | None:
    """Return the reader of a model's raw features; None if the model takes keys alone.

    Raises:
        ConfigError: the definition is wrong, or does not fit the model.
    """
    if config.graph_file is None or config.graph_file.name != _GRAPH_FILE:
        return None
    path = config.graph_file.parent / FEATURES_FILE
    if is_absent(path):
        return None
    if config.slot_keys == "unshifted" or config.key_type == "I32":
        reason = (
            "features give int64 keys of the tables, but the model's requests have keys that begin at 0 in each slot"
        )
        raise ConfigError(str(path), "", reason if config.key_type == "I64" else "features need a model of int64 keys")
    return FeatureReader(read_definition(path), slots_of(config), config.dense_dim, str(path))
