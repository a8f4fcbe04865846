"""What clients of a model must change when a new version replaces an old one."""

from collections.abc import Iterator

from serving.config import ModelConfig
from serving.features.definition import FeatureConfig, FeatureDefinition
from serving.features.opening import open_features, slots_of
from serving.features.vocabulary import vocabulary_values

#: What decides the keys of a feature, in addition to its vocabulary.
_OF_KEYS = ("kind", "offset", "buckets", "hash", "salt", "unknown_buckets", "boundaries", "of")


def changes(new: ModelConfig, old: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each change that clients must make.

    Raises:
        ConfigError: a definition is wrong, or does not fit its model.
    """
    ours, theirs = open_features(new), open_features(old)
    if theirs is not None and ours is None:
        yield "send keys: the new version has no features by name"
    elif theirs is not None and ours is not None:
        yield from _of_features(ours.definition, theirs.definition)
    before = {slot.name for slot in slots_of(old) if not slot.needs_key}
    for name in dict.fromkeys(slot.name for slot in slots_of(new) if slot.needs_key and slot.name in before):
        yield f"always send a key of {name}: it is now required"
    yield from (f"for requests with keys: {line}" for line in _of_keys(new, old))
    if new.label_dim != old.label_dim:
        yield f"read {new.label_dim} predictions of each sample; the old version has {old.label_dim}"
    kinds = [[output.kind for output in version.outputs] for version in (new, old)]
    if new.stated_outputs != old.stated_outputs or (new.label_dim == old.label_dim and kinds[0] != kinds[1]):
        named = [", ".join(f"{output.name} ({output.kind})" for output in version.outputs) for version in (new, old)]
        yield f"read the outputs {named[0]}; the old version has {named[1]}"


def _of_features(new: FeatureDefinition, old: FeatureDefinition) -> Iterator[str]:
    of_old = {feature.name: feature for feature in old.columns}
    of_new = {feature.name: feature for feature in new.columns}
    for name in of_old:
        if name not in of_new and new.unknown_features == "error":
            yield f"leave out {name}: the new version has no such feature"
    for name, feature in of_new.items():
        if name in of_old:
            yield from _of_feature(feature, of_old[name])
        elif feature.kind == "dense" and feature.missing is None:
            yield f"send {name}, {_described(feature)}: it is new and required"
        else:
            yield f"send {name}, {_described(feature)}: it is new and counts as missing until you send it"


def _of_feature(new: FeatureConfig, old: FeatureConfig) -> Iterator[str]:
    name = new.name
    if _described(new) != _described(old):
        yield f"send {name} as {_described(new)}; the old version takes {_described(old)}"
    if new.kind == "dense" and new.missing is None and (old.kind != "dense" or old.missing is not None):
        yield f"always send {name}: it is now required"
    if new.list is not None and new.list.most is not None and new.list.keep is None:
        most = None if old.list is None or old.list.keep is not None else old.list.most
        if most is None or new.list.most < most:
            yield f"send at most {new.list.most} values of {name}"
    if new.size is not None and (old.size is None or new.size < old.size):
        yield f"send {name} below {new.size}"


def _described(feature: FeatureConfig) -> str:
    """Return what a client sends for a feature."""
    kind = {"string": "text", "integer": "an integer", "float": "a number", "boolean": "true or false"}
    unit = "" if feature.unit is None else f" in {feature.unit}"
    value = f"{kind[feature.value_type]}{unit}"
    return value if feature.list is None else f"a list, each value {value}"


def _of_keys(new: ModelConfig, old: ModelConfig) -> Iterator[str]:
    slots, earlier = ([slot.place for slot in slots_of(config)] for config in (new, old))
    if slots != earlier:
        yield f"send the slots {', '.join(slots)}; the old version has {', '.join(earlier)}"
    if new.dense_dim != old.dense_dim:
        yield f"send {new.dense_dim} dense numbers; the old version has {old.dense_dim}"
    if (new.slot_keys, new.key_type) != (old.slot_keys, old.key_type):
        yield f"send {new.slot_keys} {new.key_type} keys; the old version takes {old.slot_keys} {old.key_type} keys"
    ours, theirs = open_features(new), open_features(old)
    if ours is None or theirs is None or slots != earlier:
        return
    of_new, of_old = ({feature.name: feature for feature in reader.definition.features} for reader in (ours, theirs))
    for slot, one, other in zip(slots, ours.of_slots, theirs.of_slots, strict=True):
        if one != other:
            yield f"send the keys of {one} in the slot {slot}; the old version has those of {other} there"
        elif not _has_equal_keys(of_new[one], of_old[other]):
            yield f"compute the keys of the slot {slot} with the new definition: they have changed"
    if new.dense_dim == old.dense_dim and ours.definition.dense != theirs.definition.dense:
        yield "compute the dense numbers with the new definition: they have changed"


def _has_equal_keys(new: FeatureConfig, old: FeatureConfig) -> bool:
    """Return whether a value has the same key in both; a vocabulary may have more values at its end."""
    if any(getattr(new, key) != getattr(old, key) for key in _OF_KEYS):
        return False
    if new.kind != "vocabulary":
        return True
    known = vocabulary_values(old)
    return vocabulary_values(new)[: len(known)] == known
