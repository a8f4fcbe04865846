"""Which slots of a model each feature gives keys to."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from serving.errors import ConfigError, did_you_mean
from serving.features.definition import FeatureConfig, FeatureDefinition

_RANGE = re.compile(r"(.+)\[(\d{1,6}):(\d{1,6})\]")  # slots of a table, such as item[0:10]


class SlotOfTable(NamedTuple):
    """A slot of a model.

    Attributes:
        place: ``"user"``, or ``"item[0]"`` if its table has several slots.
        table: the table's name.
        own_name: the graph's name of the slot; empty if the graph has none.
        has_one_key: a sample has at most one key for each slot of the table.
        most: the most keys of a sequence; 0: the slot is pooled.
        needs_key: a sample has exactly one key.
    """

    place: str
    table: str
    own_name: str = ""
    has_one_key: bool = False
    most: int = 0
    needs_key: bool = False

    @property
    def name(self) -> str:
        """What requests call the slot. Slots with the same name have the same keys."""
        return self.own_name or self.place


def is_spread(feature: FeatureConfig) -> bool:
    """Whether the values of a list feature have slots of their own."""
    return _RANGE.fullmatch(feature.slot_name) is not None


def _slots_in_range(feature: FeatureConfig, slots: Sequence[SlotOfTable], source: str, where: str) -> list[int]:
    """Return the slots of a list feature whose values have slots of their own; empty for other features."""
    named = _RANGE.fullmatch(feature.slot_name)
    if named is None:
        return []
    table, begin, end = named[1], int(named[2]), int(named[3])
    of_table = [at for at, slot in enumerate(slots) if slot.table == table]
    if not begin < end <= len(of_table):
        reason = f"expected slots of {table}, which has {len(of_table)}, got {feature.slot_name!r}"
        raise ConfigError(source, f"{where}.slot", reason)
    most = None if feature.list is None else feature.list.most
    if most is None or most > end - begin:
        raise ConfigError(source, f"{where}.slot", f"needs a list with most at most {end - begin}, one value per slot")
    return of_table[begin:end]


def places_of_features(
    definition: FeatureDefinition, slots: Sequence[SlotOfTable], dense_dim: int, source: str
) -> dict[str, list[int]]:
    """Return the numbers of the slots that each feature gives keys to. A feature names a slot by its place or name.

    Raises:
        ConfigError: the definition does not fit the model.
    """
    found: dict[str, list[int]] = {}
    names = list(dict.fromkeys(slot.name for slot in slots))
    for number, feature in enumerate(definition.features):
        if feature.kind == "dense":
            continue
        of_place = _slots_in_range(feature, slots, source, f"features[{number}]")
        of_place = of_place or [at for at, slot in enumerate(slots) if slot.place == feature.slot_name]
        found[feature.name] = of_place or [at for at, slot in enumerate(slots) if slot.name == feature.slot_name]
        if not found[feature.name]:
            close = did_you_mean(feature.slot_name, names)
            key = "slot" if feature.slot is not None else "name"
            reason = f"the model has no slot {feature.slot_name!r}{close}; it has {', '.join(names)}"
            raise ConfigError(source, f"features[{number}].{key}", reason)
        longest = min((slots[at].most for at in found[feature.name] if slots[at].most), default=0)
        if longest and feature.list is not None and (feature.list.most or 0) > longest:
            reason = (
                f"{feature.list.most}, but the sequence {feature.slot_name!r} of the model has at most {longest} keys"
            )
            raise ConfigError(source, f"features[{number}].list.most", reason)
    owners = {at: name for name in found for at in found[name]}
    for at, slot in enumerate(slots):
        if at not in owners:
            raise ConfigError(source, "features", f"no feature gives the keys of the slot {slot.name!r}")
    for name, places in found.items():
        if other := next((owners[at] for at in places if owners[at] != name), ""):
            raise ConfigError(source, "features", f"{name!r} and {other!r} give keys to the same slot")
    if len(definition.dense_names) != dense_dim:
        reason = f"{len(definition.dense_names)} dense features, but the model has {dense_dim} dense numbers"
        raise ConfigError(source, "features", reason)
    return found
