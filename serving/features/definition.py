"""``features.json``: what a model's raw features are, and how each becomes keys of a slot or a dense number.

``docs/features.md`` describes each key.
"""

from collections import Counter
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from serving.config.clause import AS_TUPLE, Clause, Count, FilePath, Float32, Text, Whole, at_key, read_clause
from serving.errors import ConfigError, did_you_mean
from serving.model.names import is_taken, names_of_positions
from serving.model.sparse_rows import LARGEST_KEY
from serving.model.strict_json import LARGEST_FLOAT32, read_json

FEATURES_FILE = "features.json"
Kind = Literal["hash", "vocabulary", "bucketize", "identity", "cross", "dense"]
ValueType = Literal["string", "integer", "float", "boolean"]
_OF_SLOTS = ("slot", "offset", "type", "missing", "list", "shares")
# The keys of each kind next to `name`; those in the second tuple are required.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hash": (("buckets", "hash", "salt", "unit", *_OF_SLOTS), ()),
    "vocabulary": (("vocabulary", "values", "unknown_buckets", "unit", *_OF_SLOTS), ()),
    "bucketize": (("boundaries", "unit", *_OF_SLOTS), ("boundaries",)),
    "identity": (("size", "unit", *_OF_SLOTS), ()),
    "cross": (("of", "buckets", "slot", "offset"), ("of",)),
    "dense": (("type", "missing", "clip", "log1p", "mean", "std", "unit", "list", "weighs"), ()),
}
# The types of each kind, the default first.
_TYPES: dict[str, tuple[ValueType, ...]] = {
    "hash": ("string", "integer", "boolean"),
    "vocabulary": ("string", "integer", "boolean"),
    "bucketize": ("float", "integer"),
    "identity": ("integer", "boolean"),
    "cross": ("string",),
    "dense": ("float", "integer", "boolean"),
}


class KeyRange(NamedTuple):
    """The keys that a feature can give: those from ``begin`` up to ``end``, without ``end``."""

    begin: int
    end: int


class ListConfig(Clause):
    """How a feature has several values in a sample.

    Attributes:
        most: the most values of a sample; None: no limit.
        keep: which values of a longer list are kept: the first or the last. None: a longer list is an error.
        separator: cuts the text of a CSV column into values; None: the values come as lists.
    """

    most: Count | None = None
    keep: Literal["first", "last"] | None = None
    separator: Text | None = None

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.keep is not None and self.most is None:
            raise at_key("keep", "most is required, because it says how many values are kept")
        if self.separator is not None and (len(self.separator) > 1 or not self.separator.isascii()):
            raise at_key("separator", f"expected one ASCII character, got {self.separator!r}")
        return self


def _salt(value: Any) -> Any:
    """Read Keras's salt: one number stands for the same number twice."""
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value


_Word = Annotated[int, Field(ge=0, lt=1 << 64)]


class FeatureConfig(Clause):
    """One feature.

    Attributes:
        name: the feature's name in data and requests.
        kind: what becomes of a value.
        type: what a value is. Text and numbers of files are turned into it first.
        unit: of an integer feature that comes from timestamps: they become whole numbers of this unit, in UTC.
        slot: the slot of the model that gets the keys, ``"user"`` or ``"item[0]"``; None: the feature's name.
        offset: is added to each key, so features of one table have ranges of their own.
        shares: the feature of the same table whose keys this feature also gives.
        missing: stands for a missing value. Without it, a missing value has no key, and is an error if dense.
        list: a sample has several values.
        buckets: how many buckets a hash has; None: the low 63 bits of the hash.
        hash: the hash function; see ``kernels/host/features/hashes.hpp``.
        salt: two numbers, with which SipHash takes the place of ``hash``, as in Keras.
        vocabulary: the file of the values, one in each line, or as an export writes it.
        values: the values themselves, in place of a file.
        unknown_buckets: how many keys unknown values have, before the keys of the vocabulary. 0: none.
        boundaries: ascending; the bucket of a number is how many of them are at most it.
        size: every key is less than it; None: any key.
        of: the features whose values are crossed.
        clip: the smallest and the largest number.
        log1p: the logarithm of 1 + the number is taken, after ``clip``.
        mean: is subtracted, after ``log1p``.
        std: the difference is divided by it.
        weighs: the feature whose keys this list of numbers weighs, with a number for each key.
    """

    name: Text
    kind: Kind
    type: ValueType | None = None
    unit: Literal["s", "ms", "us", "ns", "day"] | None = None
    slot: Text | None = None
    offset: Annotated[Whole, Field(le=LARGEST_KEY)] = 0
    shares: Text | None = None
    missing: str | int | float | bool | None = None
    list: ListConfig | None = None
    buckets: Annotated[Count, Field(le=1 << 62)] | None = None
    hash: Literal["farmhash", "murmur3", "xxh64"] = "farmhash"
    salt: Annotated[tuple[_Word, _Word], BeforeValidator(_salt), AS_TUPLE] | None = None
    vocabulary: FilePath | None = None
    values: Annotated[tuple[Text | int, ...], AS_TUPLE, Field(min_length=1)] | None = None
    unknown_buckets: Annotated[Whole, Field(le=1 << 40)] = 1
    boundaries: Annotated[tuple[Float32, ...], AS_TUPLE, Field(min_length=1)] | None = None
    size: Annotated[Count, Field(le=LARGEST_KEY)] | None = None
    of: Annotated[tuple[Text, ...], AS_TUPLE, Field(min_length=2)] | None = None
    clip: Annotated[tuple[Float32, Float32], AS_TUPLE] | None = None
    log1p: bool = False
    mean: Float32 = 0.0
    std: Annotated[Float32, Field(gt=0.0)] = 1.0
    weighs: Text | None = None

    @property
    def value_type(self) -> ValueType:
        """What a value is."""
        return self.type or _TYPES[self.kind][0]

    @property
    def slot_name(self) -> str:
        """The slot that gets the keys."""
        return self.slot or self.name

    @property
    def width(self) -> int:
        """How many dense numbers a dense feature gives."""
        return 1 if self.list is None or self.list.most is None else self.list.most

    @property
    def is_list(self) -> bool:
        """Whether a sample may have several values."""
        return self.list is not None

    @model_validator(mode="after")
    def _has_a_unit(self) -> Self:
        if self.unit is not None and self.value_type != "integer":
            raise at_key("unit", f"only integers have a unit, but the type is {self.value_type}")
        return self

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        end = {"hash": self.buckets, "cross": self.buckets, "identity": self.size}
        if self.offset and end.get(self.kind, 0) is None:
            key = "size" if self.kind == "identity" else "buckets"
            raise at_key("offset", f"needs {key}, which bounds the keys")
        return self

    @model_validator(mode="after")
    def _weighs_keys(self) -> Self:
        if self.kind == "dense" and (self.list is None) != (self.weighs is None):
            key, other = ("list", "weighs") if self.list is not None else ("weighs", "list")
            raise at_key(key, f"a list of dense numbers weighs the keys of a feature, so {other} is required")
        if self.weighs is not None and self.missing is not None:
            raise at_key("missing", "each key has a weight")
        return self

    @model_validator(mode="after")
    def _belongs_to_kind(self) -> Self:
        if is_taken(self.name):
            raise at_key("name", f"a feature cannot be called {self.name!r}, which requests use for something else")
        keys, required = _KEYS[self.kind]
        for key in self.model_fields_set - {"name", "kind", *keys}:
            owners = [kind for kind, (of_kind, _) in _KEYS.items() if key in of_kind]
            raise at_key(key, f"only for the kind {' or '.join(owners)}, but the kind is {self.kind}")
        for key in required:
            if getattr(self, key) is None:
                raise at_key(key, f"required for the kind {self.kind}, but absent")
        if self.value_type not in _TYPES[self.kind]:
            expected = " or ".join(_TYPES[self.kind])
            raise at_key("type", f"expected {expected} for the kind {self.kind}, got {self.type}")
        if self.salt is not None and "hash" in self.model_fields_set:
            raise at_key("hash", "a salt implies SipHash, so leave out hash")
        if any(low >= high for low, high in pairwise(self.boundaries or ())):
            raise at_key("boundaries", "expected ascending numbers")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise at_key("clip", f"expected the smaller number first, got {list(self.clip)}")
        if self.kind == "vocabulary" and (self.vocabulary is None) == (self.values is None):
            raise at_key("vocabulary", "expected either vocabulary, a file, or values, a list")
        self._check_missing()
        return self

    def _check_missing(self) -> None:
        value, kind = self.missing, self.value_type
        if value is None:
            return
        is_right = {
            "string": isinstance(value, str) and value != "",
            "integer": isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63,
            "float": isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT32,
            "boolean": isinstance(value, bool),
        }[kind]
        if not is_right:
            raise at_key("missing", f"expected a value of the type {kind}, got {value!r}")


class FeatureDefinition(Clause):
    """All features of a model.

    Attributes:
        format: of this file.
        unknown_features: what a request's feature that is not defined is: an error, or ignored and counted.
        features: in the order of the dense numbers.
    """

    format: Literal[1]
    unknown_features: Literal["error", "ignore"] = "error"
    features: Annotated[tuple[FeatureConfig, ...], AS_TUPLE, Field(min_length=1)]

    @property
    def slots(self) -> tuple[FeatureConfig, ...]:
        """The features that give keys."""
        return tuple(feature for feature in self.features if feature.kind != "dense")

    @property
    def dense(self) -> tuple[FeatureConfig, ...]:
        """The features that are dense numbers, in their order."""
        return tuple(feature for feature in self.features if feature.kind == "dense")

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The name of each dense number. A list of weights has a number for each position of the keys."""
        of_features = (names_of_positions(feature.name, feature.width) for feature in self.dense)
        return tuple(chain.from_iterable(of_features))

    @property
    def columns(self) -> tuple[FeatureConfig, ...]:
        """The features that requests have: all except crosses."""
        return tuple(feature for feature in self.features if feature.kind != "cross")

    @model_validator(mode="after")
    def _features_fit(self) -> Self:
        names = [feature.name for feature in self.features]
        for what, found in (("feature", names), ("slot", [feature.slot_name for feature in self.slots])):
            for name, count in Counter(found).items():
                if count > 1:
                    raise ValueError(f"features: {count} features have the {what} {name!r}")
        by_name = {feature.name: feature for feature in self.features}
        for number, feature in enumerate(self.features):
            for key, others in (
                ("of", feature.of or ()),
                ("shares", (feature.shares,) if feature.shares else ()),
                ("weighs", (feature.weighs,) if feature.weighs else ()),
            ):
                for other in others:
                    if reason := _why_not(feature, by_name.get(other), key):
                        close = did_you_mean(other, [name for name in names if name != feature.name])
                        raise ValueError(
                            f"features[{number}].{key}: {other!r} {reason}{close * (other not in by_name)}"
                        )
        return self


def _why_not(feature: FeatureConfig, other: FeatureConfig | None, key: str) -> str:
    """Say why a feature cannot cross another, or share its keys; empty if it can."""
    if other is None:
        return "is not a feature"
    if key == "of":
        if other.is_list:
            return "is a list, and only single values can be crossed"
        if other.kind == "dense" or (other.value_type == "float" and other.kind != "bucketize"):
            return "is a dense number; cross a bucketize feature"
        return "is a cross itself" if other.kind == "cross" else ""
    if key == "weighs":
        return _why_not_weighed(feature, other)
    if other is feature or other.shares is not None:
        return "shares keys itself; name the feature whose keys it shares"
    same = (
        *("kind", "value_type", "buckets", "hash", "salt", "vocabulary", "values", "unknown_buckets"),
        "boundaries",
    )
    different = [name for name in (*same, "offset") if getattr(feature, name) != getattr(other, name)]
    return f"has another {different[0].replace('value_type', 'type')}" if different else ""


def _why_not_weighed(feature: FeatureConfig, other: FeatureConfig) -> str:
    """Say why the numbers of a feature cannot weigh the keys of another; empty if they can."""
    own, keys = feature.list, other.list
    if keys is None or other.kind == "dense":
        return "is not a list of keys"
    if keys.most is None:
        return "has no most, and a network takes a fixed number of weights"
    if own is None or (keys.most, keys.keep) != (own.most, own.keep):
        return "has another most or keep"
    if other.missing is not None:
        return "has a key for a missing value, which comes without a weight"
    has_all = other.kind != "vocabulary" or other.unknown_buckets
    return "" if has_all else "has no key for an unknown value, which comes with a weight"


def read_definition(path: str | Path) -> FeatureDefinition:
    """Read a ``features.json``.

    Raises:
        ConfigError: with the JSON path of the first fault.
    """
    path = Path(path)
    return read_clause(FeatureDefinition, read_json(path), path)


def check_ranges(
    definition: FeatureDefinition, tables: dict[str, set[str]], ranges: dict[str, KeyRange], source: str
) -> None:
    """Refuse features of one table whose keys are the same by accident.

    Args:
        definition: the features.
        tables: the tables of the slots of each feature, by the feature's name.
        ranges: the keys of each feature, by name.
        source: the file, for the message.

    Raises:
        ConfigError: two ranges of a table overlap, and the features do not say that they share their keys.
    """
    number = {feature.name: index for index, feature in enumerate(definition.features)}
    for one, other in combinations(definition.slots, 2):
        is_shared = other.name == one.shares or one.name == other.shares or (one.shares and one.shares == other.shares)
        if is_shared or not tables[one.name] & tables[other.name]:
            continue
        ours, theirs = ranges[one.name], ranges[other.name]
        if ours.begin < theirs.end and theirs.begin < ours.end:
            table = min(tables[one.name] & tables[other.name])
            shown = f"{theirs.begin} to {theirs.end - 1}, and those of {one.name!r} are {ours.begin} to {ours.end - 1}"
            reason = f"the keys of {other.name!r} are {shown}, in the same table {table!r}"
            advice = f"set offset to {ours.end} or more, or set shares to {one.name!r}"
            raise ConfigError(source, f"features[{number[other.name]}]", f"{reason}: {advice}")
