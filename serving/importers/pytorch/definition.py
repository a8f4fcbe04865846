"""The ``features.json`` of a module whose requests by name differ from the inputs of its version.

It adds the constants that a module adds to the keys of a slot, such as the offsets of fields that share one table. It
also has the weights of keys as lists.
"""

from collections.abc import Mapping, Sequence

from serving.errors import ConfigError
from serving.features import FeatureConfig, FeatureDefinition, SlotOfTable
from serving.features.definition import ListConfig
from serving.importers.pytorch.inputs import Inputs
from serving.importers.pytorch.runs import Sources


def definition_of(
    inputs: Inputs, sources: Sources, slots: Sequence[SlotOfTable], rows: Mapping[str, int]
) -> FeatureDefinition:
    """Return features that add the constants, and weights as lists.

    Args:
        inputs: of the module.
        sources: where the keys of the slots come from.
        slots: the same slots, with the names that requests have.
        rows: by table, the number that is larger than every key.

    Raises:
        ConfigError: one input gets another constant in each of two tables.
    """
    ranges: dict[str, tuple[int, int]] = {}  # by name: the constant, and the number of keys
    slots_of_name: dict[str, list[SlotOfTable]] = {}
    names: dict[str, str] = {}  # of slots, by the feature of the module
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
        slots_of_name.setdefault(slot.name, []).append(slot)
        names |= {inputs.features[place].name: slot.name for place in source.places}
    is_shifted = any(shift for shift, _ in ranges.values())
    owners: dict[tuple[int, int | None], str] = {}
    features: list[FeatureConfig] = []
    lists: dict[str, ListConfig | None] = {}
    for name, (shift, count) in ranges.items():
        limit = count if is_shifted else None
        owner, own = owners.setdefault((shift, limit), name), slots_of_name[name]
        longest = min((slot.most for slot in own if slot.most), default=None)
        has_one_key = longest is None and all(slot.has_one_key for slot in own)
        lists[name] = None if has_one_key else ListConfig(most=longest)
        shares = None if owner == name else owner
        features.append(
            FeatureConfig(name=name, kind="identity", offset=shift, size=limit, list=lists[name], shares=shares)
        )
    weighed = {weight.name: names[weight.feature] for weight in inputs.weights}
    dense = [
        FeatureConfig(name=name, kind="dense")
        if name not in weighed
        else FeatureConfig(name=name, kind="dense", list=lists[weighed[name]], weighs=weighed[name])
        for name in inputs.names_of_dense
    ]
    return FeatureDefinition(format=1, features=(*dense, *features))
