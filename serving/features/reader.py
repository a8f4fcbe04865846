"""``FeatureReader``: raw features of samples in, keys and dense numbers of a model out."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.host import FeatureTransform
from serving.errors import ConfigError, FeatureValueError, did_you_mean
from serving.features.columns import Column, TensorColumns, column_of, count_samples, missing_column, shown_value
from serving.features.definition import FeatureConfig, FeatureDefinition, KeyRange, check_ranges
from serving.features.slots import SlotOfTable, is_spread, places_of_features
from serving.features.vocabulary import compiled_vocabulary, key_count
from serving.metrics import MetricSample
from serving.model.names import OFFSETS
from serving.model.sparse_rows import LARGEST_KEY

_FAULT_ITEMS = 4  # of what the native transform returns: a feature, a row, a value and why
_NATIVE = {"string": "text", "integer": "integer", "boolean": "integer", "float": "float"}
_TOO_MANY = "has too many values"
_MISSING = "is missing"
_OTHER_COUNT = "has another number of keys"
_WHY = {
    "is not UTF-8": "expected text in UTF-8",
    _MISSING: "is missing, and the feature has no value for missing",
    "is infinite": "expected a finite number",
    "has no logarithm": "expected a number above -1, because the feature takes log1p",
    "is too large": "the number does not fit float32 after mean and std",
    "is outside of its range": "expected a key from 0 to {last}",
    "is reserved": "the key is reserved",
}


class Transformed(NamedTuple):
    """B samples of S slots and F dense numbers.

    Attributes:
        dense: float32[B, F].
        keys: int64[N], sample-major.
        row_ptrs: int32[B * S + 1], CSR offsets of the bags.
        known: by feature with a vocabulary, how many values it has.
        unknown: and how many it does not have.
    """

    dense: NDArray[np.float32]
    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int32]
    known: Mapping[str, int]
    unknown: Mapping[str, int]


class TransformedTables(NamedTuple):
    """B samples of T tables and F dense numbers.

    Attributes:
        dense: float32[B, F].
        keys: int64[N], table after table.
        row_ptrs: int32, a CSR for each table, table after table.
        lengths: how many offsets each table has.
        bags: of each table int32[B * S], the bag of each slot of each sample; None: each has its own, sample-major. The
            bags of a table are those of its slots with the fewest rows, row by row, and then those with more rows.
        most_keys: of each table; no sample has more.
        known: by feature with a vocabulary, how many values it has.
        unknown: and how many it does not have.
    """

    dense: NDArray[np.float32]
    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int32]
    lengths: Sequence[int]
    bags: Sequence[NDArray[np.int32] | None]
    most_keys: Sequence[int]
    known: Mapping[str, int]
    unknown: Mapping[str, int]


class _Counted:
    """What readers of the same features have counted."""

    def __init__(self) -> None:
        self.lock = Lock()  # guards the fields below
        self.known, self.unknown, self.ignored = Counter[str](), Counter[str](), 0


class FeatureReader:
    """Reads the raw features of one model. Any thread may call it.

    Attributes:
        definition: the features.
        ranges: the keys that each feature can give, by name.
        of_slots: the feature of each slot, in graph order.
        inputs: the features that requests have, in the order of their columns.
        vocabulary_bytes: the size of each vocabulary, by the feature's name. All processes share its memory.
        has_keys: the features only name the keys and dense numbers of the model.
    """

    def __init__(
        self,
        definition: FeatureDefinition,
        slots: Sequence[SlotOfTable],
        dense_dim: int,
        source: str,
        has_keys: bool = False,
    ) -> None:
        """Check that the definition fits the model, and open its vocabularies.

        Args:
            definition: the features.
            slots: of the model, in graph order.
            dense_dim: F.
            source: the file of the definition, for messages.
            has_keys: the features only name the keys and dense numbers of the model.

        Raises:
            ConfigError: the definition does not fit the model, or a vocabulary cannot be read.
        """
        self.definition = definition
        self.has_keys = has_keys
        places = places_of_features(definition, slots, dense_dim, source)
        self.of_slots = tuple(feature for _, feature in sorted((at, name) for name in places for at in places[name]))
        self.inputs = definition.columns
        self._names = {feature.name: number for number, feature in enumerate(self.inputs)}
        self._vocabularies: dict[str, int] = {}
        self._counted = _Counted()
        self._model = slots, dense_dim, source
        self._order: list[FeatureConfig] = []
        self._tables = [len(list(of_table)) for _, of_table in groupby(slot.table for slot in slots)]
        self._transform = FeatureTransform(len(self.inputs), len(slots), dense_dim)
        self.ranges: dict[str, KeyRange] = {}
        self.vocabulary_bytes: dict[str, int] = {}
        for number, feature in enumerate(definition.features):
            if feature.kind == "dense":
                continue
            where = f"features[{number}]"
            has_range = is_spread(feature)
            for at in places[feature.name][:1] if has_range else places[feature.name]:
                size = self._add(feature, at, source, where)
                if has_range:
                    self._transform.spread(len(places[feature.name]))
                self._add_options(feature)
            end = LARGEST_KEY + 1 if size is None else feature.offset + size
            if end > LARGEST_KEY + 1:
                raise ConfigError(source, f"{where}.offset", f"the keys end after {LARGEST_KEY}")
            self.ranges[feature.name] = KeyRange(feature.offset, end)
        self._order += definition.dense
        place = 0
        for feature in definition.dense:
            lowest, highest = feature.clip or (0.0, 0.0)
            self._transform.add_dense(
                self._names[feature.name], place, lowest, highest, feature.log1p, feature.mean, feature.std
            )
            self._add_options(feature)
            if feature.weighs is not None:
                self._transform.weigh([entry.name for entry in self._order].index(feature.weighs))
            place += feature.width
        tables = {name: {slots[at].table for at in places[name]} for name in places}
        check_ranges(definition, tables, self.ranges, source)

    def without(self, dense: Collection[int]) -> "FeatureReader":
        """Return a reader of the same features in which some dense features may be missing; both count together.

        Args:
            dense: the numbers of these dense features. Nobody reads the numbers that they give.
        """
        of_numbers = [feature.name for feature in self.definition.dense for _ in range(feature.width)]
        needed = {name for number, name in enumerate(of_numbers) if number not in dense}
        names = set(of_numbers) - needed
        features = tuple(
            feature.model_copy(update={"missing": 0}) if feature.name in names and feature.missing is None else feature
            for feature in self.definition.features
        )
        reader = FeatureReader(self.definition.model_copy(update={"features": features}), *self._model, self.has_keys)
        reader._counted = self._counted
        return reader

    @property
    def names(self) -> Sequence[str]:
        """The features that samples have, in the order of the definition."""
        return tuple(self._names)

    def columns(self, given: Mapping[str, Any], samples: int) -> list[Column]:
        """Return the columns of named values; see ``column_of``. A feature that is absent is missing in each sample.

        Raises:
            FeatureValueError: a feature is unknown, or a value is of another type.
        """
        self.check_names(given)
        return self.ordered(
            {
                feature.name: column_of(feature, given[feature.name], samples)
                for feature in self.inputs
                if feature.name in given
            },
            samples,
        )

    def named_columns(self, given: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns of named values by feature; each may have another number of samples.

        Raises:
            FeatureValueError: a feature is unknown, or a value is of another type.
        """
        self.check_names(given)
        found = (feature for feature in self.inputs if feature.name in given)
        return {
            feature.name: column_of(feature, given[feature.name], count_samples({feature.name: given[feature.name]}))
            for feature in found
        }

    def ordered(self, columns: Mapping[str, Column], samples: int) -> list[Column]:
        """Return the columns of features for ``transform``. A feature without a column is missing in each sample."""
        return [columns.get(feature.name) or missing_column(feature, samples) for feature in self.inputs]

    def check_names(self, names: Iterable[str]) -> None:
        """Count the names of a request that are not those of features.

        Raises:
            FeatureValueError: there is one, and the definition does not ignore it.
        """
        unknown = [name for name in names if name not in self._names]
        if unknown and self.definition.unknown_features == "error":
            close = did_you_mean(unknown[0], self.names)
            advice = f"{close} If not, leave it out" if close else "; leave it out"
            raise FeatureValueError(unknown[0], None, f"is not a feature{advice}")
        if unknown:
            with self._counted.lock:
                self._counted.ignored += len(unknown)

    def transform(self, columns: Sequence[Column], samples: int) -> Transformed:
        """Return the keys and the dense numbers of ``columns``, in one native call.

        Raises:
            FeatureValueError: a value cannot be transformed.
        """
        found = self._transform.run(columns, samples)
        if len(found) == _FAULT_ITEMS:
            raise self._error(columns, *found)
        keys, row_ptrs, dense, known, unknown = found
        return Transformed(dense, keys, row_ptrs, self._counts(known), self._counts(unknown))

    def transform_by_table(
        self, columns: Sequence[Column], samples: int, users: NDArray[np.int32] | None = None
    ) -> TransformedTables:
        """Return the keys of each table and the dense numbers of ``columns``, in one native call.

        Args:
            columns: each has a row for each sample, one row for all samples, or a row for each user.
            samples: B.
            users: int32[B], the user of each sample, in ascending order; None: there is one user.

        Raises:
            FeatureValueError: a value cannot be transformed.
        """
        given, tensors = (columns.native, columns.tensors) if isinstance(columns, TensorColumns) else (columns, None)
        found = self._transform.read(given, samples, self._tables, users, tensors)
        if len(found) == _FAULT_ITEMS:
            raise self._error(columns, *found)
        return TransformedTables(*found[:-2], *map(self._counts, found[-2:]))

    def _error(self, columns: Sequence[Column], number: int, row: int, at: int, why: str) -> FeatureValueError:
        """Return the error of a value that cannot be transformed, of the feature that was added with this number."""
        if why == "offsets":
            reason = f"expected offsets from 0 to {at} that do not decrease, one more than samples"
            return FeatureValueError(f"{self.inputs[number].name}{OFFSETS}", None, reason)
        feature = self._order[number]
        splits = columns[self._names[feature.name]][-1] if feature.name in self._names else None
        if why == _TOO_MANY and feature.list is not None:
            reason = f"has {at} values, but at most {feature.list.most} are allowed"
            return FeatureValueError(feature.name, row, reason)
        if why == _OTHER_COUNT:
            valid = columns[self._names[feature.name]][-2]  # without splits, each row has one weight or none
            came = int(valid is None or valid[row]) if splits is None else splits[row + 1] - splits[row]
            weights = f"{at} weight{'s' * (at != 1)}"
            reason = f"expected {weights}, one for each key of {feature.weighs!r}, got {came}"
            return FeatureValueError(feature.name, row, reason)
        place = "" if splits is None else f"value {at - int(splits[row])}: "
        reason = _WHY.get(why, why).format(last=(feature.size or 1) - 1)
        if feature.name in self._names and why != _MISSING:
            reason += shown_value(columns[self._names[feature.name]], at)
        return FeatureValueError(feature.name, row, f"{place}{reason}")

    def _counts(self, counts: NDArray[np.int64]) -> Mapping[str, int]:
        """Return the counts of features by the name of those that have a vocabulary."""
        return {name: int(counts[number]) for name, number in self._vocabularies.items()}

    def __call__(self, given: Mapping[str, Any], samples: int) -> Transformed:
        """Transform named values; see ``columns``."""
        return self.transform(self.columns(given, samples), samples)

    def count(self, found: Transformed | TransformedTables) -> None:
        """Count the values of a request for ``readings``."""
        if self._vocabularies:
            with self._counted.lock:
                self._counted.known.update(found.known)
                self._counted.unknown.update(found.unknown)

    def forget_counts(self) -> None:
        """Count the values of requests from zero on."""
        with self._counted.lock:
            self._counted.known.clear()
            self._counted.unknown.clear()

    def readings(self, labels: tuple[tuple[str, str], ...]) -> Iterator[MetricSample]:
        """Return the counts of values and of ignored features, with the labels of the model."""
        with self._counted.lock:
            counts = [("known", self._counted.known.copy()), ("unknown", self._counted.unknown.copy())]
            ignored = self._counted.ignored
        if self.definition.unknown_features == "ignore":
            help_text = "Undefined features of requests, which were ignored."
            yield MetricSample("hotrow_ignored_features", help_text, labels, ignored)
        for name in self._vocabularies:
            for state, of_state in counts:
                help_text = "Values of requests, in and not in a feature's vocabulary."
                where = (*labels, ("feature", name), ("state", state))
                yield MetricSample("hotrow_vocabulary_values", help_text, where, of_state[name])

    def _add(self, feature: FeatureConfig, slot: int, source: str, where: str) -> int | None:
        """Add a feature to the transform for a slot, and return how many keys it can give; see ``key_count``."""
        self._order.append(feature)
        column, offset, native = self._names.get(feature.name, 0), feature.offset, self._transform
        if feature.kind == "hash":
            name, salt = ("siphash", feature.salt) if feature.salt is not None else (feature.hash, (0, 0))
            native.add_hash(column, slot, offset, feature.buckets or 0, name, salt)
        elif feature.kind == "vocabulary":
            self._vocabularies.setdefault(feature.name, len(self._order) - 1)
            with compiled_vocabulary(feature, source, where) as (path, values):
                self.vocabulary_bytes[feature.name] = path.stat().st_size
                try:
                    native.add_vocabulary(column, slot, offset, str(path), feature.unknown_buckets)
                except ValueError as err:
                    raise ConfigError(source, f"{where}.vocabulary", str(err)) from err
            return feature.unknown_buckets + values
        elif feature.kind == "bucketize":
            native.add_bucketize(column, slot, offset, list(feature.boundaries or ()))
        elif feature.kind == "identity":
            native.add_identity(column, slot, offset, feature.size or 0)
        else:
            by_name = {other.name: other for other in self.inputs}
            parts = [
                (self._names[name], list(by_name[name].boundaries or ()), by_name[name].value_type == "string")
                for name in feature.of or ()
            ]
            native.add_cross(parts, slot, offset, feature.buckets or 0)
        return key_count(feature, source, where)

    def _add_options(self, feature: FeatureConfig) -> None:
        if feature.list is not None and feature.list.most is not None:
            self._transform.limit(feature.list.most, feature.list.keep or "")
        value = feature.missing
        if value is not None:
            kind = _NATIVE[feature.value_type]
            text, number = (value, 0) if isinstance(value, str) else ("", value)
            integer = int(number) if kind == "integer" else 0
            self._transform.fill(self._names[feature.name], kind, text, integer, float(number))
