"""Constants that a module adds to the keys of a slot, such as the offsets of fields that share one table.

The version gets a ``features.json`` that adds them, so that requests by name have the module's keys.
"""

from collections.abc import Mapping, Sequence

from serving.errors import ConfigError
from serving.features import FeatureConfig, FeatureDefinition, SlotOfTable
from serving.features.definition import ListConfig
from serving.importers.pytorch.inputs import Inputs
from serving.importers.pytorch.runs import Sources


def shifting_definition(
    inputs: Inputs, sources: Sources, slots: Sequence[SlotOfTable], rows: Mapping[str, int]
) -> FeatureDefinition:
    """Return features that add the constants.

    Args:
        inputs: of the module.
        sources: where the keys of the slots come from.
        slots: the same slots, with the names that requests have.
        rows: by table, the number that is larger than every key.

    Raises:
        ConfigError: one input gets another constant in each of two tables.
    """
    ranges: dict[str, tuple[int, int]] = {}  # by name: the constant, and the number of keys
    of_slots = ((table, source) for table, of_table in sources.slots.items() for source in of_table)
    for (table, source), slot in zip(of_slots, slots, strict=True):
        later = [other.shift for other in sources.slots[table] if other.shift > source.shift]
        size = min(later, default=rows[table]) - source.shift
        shift, others = ranges.get(slot.name, (source.shift, size))
        if shift != source.shift:
            reason = (
                f"forward adds {shift} to the keys of {slot.name!r} for one table, and {source.shift} for {table!r}"
            )
            raise ConfigError(table, "", f"{reason}; pass the keys of each table as an input of its own")
        ranges[slot.name] = shift, min(size, others)
    features = [FeatureConfig(name=name, kind="dense") for name in inputs.dense_names]
    owners: dict[tuple[int, int], str] = {}
    by_name = {slot.name: slot for slot in slots}
    for name, (shift, size) in ranges.items():
        owner, slot = owners.setdefault((shift, size), name), by_name[name]
        several = None if slot.has_one_key else ListConfig(most=slot.most or None)
        shares = None if owner == name else owner
        features.append(FeatureConfig(name=name, kind="identity", offset=shift, size=size, list=several, shares=shares))
    return FeatureDefinition(format=1, features=tuple(features))
