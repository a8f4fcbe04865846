"""The inputs of a module: learn their form from an example, and make more of them.

A feature is what has a list of keys per sample: a position of a key tensor [B, ...], a pair of keys [N] and offsets, a
key of TorchRec's KeyedJaggedTensor, or a padded sequence [B, L]. The masks and lengths of sequences are made from them.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import BoundArguments
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from serving.errors import ConfigError, did_you_mean
from serving.importers.pytorch.jagged import padded
from serving.importers.pytorch.lines import at_line
from serving.importers.pytorch.pairs import name_of, pairs_of
from serving.importers.pytorch.tables import Lookup
from serving.model.names import names_of_positions

_FORMS = "float32 [B, ...] for dense features, int64 or int32 [B, ...] for keys, or a KeyedJaggedTensor"
_MASKS = "for the mask of a sequence, name its input of padded keys, sequences={'ids': 0}"
_CONSTANTS = (type(None), bool, int, float, str)
_MOST_OF_EXAMPLE = 32
_OF_KEYED_JAGGED = ("keys", "values", "lengths", "stride")


class FeatureKeys(NamedTuple):
    """One feature's keys.

    Attributes:
        keys: int64[N], sample by sample; of a padded input they may be int64[B, L] with the padding.
        lengths: int64[B], the number of keys per sample.
    """

    keys: Tensor
    lengths: Tensor


class Padding(NamedTuple):
    """How a sequence has a fixed number of positions.

    Attributes:
        most: L.
        key: stands at positions without a key; None: the input has no padding, its rows are padded.
        at_start: such positions come before the keys.
    """

    most: int
    key: int | None = None
    at_start: bool = False

    @property
    def filler(self) -> int:
        """A key that is not the padding."""
        return 0 if self.key == 1 else 1

    def matrix(self, keys: FeatureKeys, key: int | None = None) -> Tensor:
        """Return int64[B, L]; ``key`` takes the place of the padding."""
        if keys.keys.ndim == 2:
            return keys.keys
        key = self.key if key is None else key
        assert key is not None
        return torch.from_numpy(padded(keys.keys.numpy(), keys.lengths.numpy(), self.most, key, self.at_start))


class WeightsOfKeys(NamedTuple):
    """Weights of the keys of a feature, which are dense features: one for each position.

    Attributes:
        name: what requests call them.
        feature: the name of the feature.
        begin: the first of the dense features.
        most: how many there are.
    """

    name: str
    feature: str
    begin: int
    most: int


class Feature(NamedTuple):
    """One feature.

    Attributes:
        name: as messages show it: ``ids[:, 3]``.
        input: the input that it is a part of.
        lengths: features with the same text here have equal lengths. None: one key per sample.
        padding: of a sequence, whose rows are not pooled; None: the feature is none.
    """

    name: str
    input: str
    lengths: str | None
    padding: Padding | None = None


#: Makes one input from the dense features, [B, F], and the keys of all features.
_Maker = Callable[[Tensor, Sequence[FeatureKeys]], Any]


class Inputs:
    """How to make the arguments of a module.

    Attributes:
        dense: names of the inputs with dense features, in order.
        width: F.
        dense_names: what requests call the dense features, F names.
        is_dense_positive: for each of them, whether its input has no negative number in the example.
        features: in order.
        weights: of keys, which are among the dense features.
        samples: B of the example.
    """

    def __init__(
        self, source: str, bound: BoundArguments, lookups: Sequence[Lookup], sequences: Mapping[str, int]
    ) -> None:
        """Learn them from the arguments of one call and its lookups.

        Args:
            source: names the module in messages.
            bound: the arguments.
            lookups: of the call.
            sequences: the padding key of each input that is a padded sequence.

        Raises:
            ConfigError: an input has no known form, or two inputs differ in B.
        """
        self.dense: list[str] = []
        self.width = 0
        self.dense_names: list[str] = []
        self.is_dense_positive: list[bool] = []
        self.features: list[Feature] = []
        self.weights: list[WeightsOfKeys] = []
        self._source, self._bound = source, bound
        self._samples: dict[str, int] = {}  # B by input
        leaves, self._tree = pytree.tree_flatten_with_path(dict(bound.arguments), is_leaf=_is_keyed_jagged)
        named = {f"{path[0].key}{pytree.keystr(path[1:])}": value for path, value in leaves}
        self._pairs = pairs_of(named, lookups)
        self._lookups = lookups
        self._counts = Counter(map(self._short, named))
        self._validity: dict[int, Tensor] = {}  # by the place of a padded input, where the example has keys
        padded_inputs = self._padded_inputs(named, sequences)
        self._makers = [padded_inputs.get(name) or self._maker(name, value) for name, value in named.items()]
        if len(set(self._samples.values())) > 1:
            found = ", ".join(f"{samples} in {name!r}" for name, samples in self._samples.items())
            advice = "keys [N] need their offsets as another input, and both must reach the table unchanged"
            reason = f"expected the same B in all inputs, got {found}; {advice}"
            raise ConfigError(source, "example", reason)
        self.samples = next(iter(self._samples.values()), 0)

    def arguments(self, dense: Tensor, keys: Sequence[FeatureKeys]) -> BoundArguments:
        """Return arguments with dense features, float32[B, F], and the keys of each feature."""
        made = pytree.tree_unflatten([make(dense, keys) for make in self._makers], self._tree)
        return BoundArguments(self._bound.signature, made)

    @property
    def keys_of_example(self) -> list[int]:
        """Some keys of the example."""
        tensors = [tensor.flatten()[:_MOST_OF_EXAMPLE].tolist() for tensor in self.keys_in(self._bound)]
        return list(dict.fromkeys(key for of_tensor in tensors for key in of_tensor))[:_MOST_OF_EXAMPLE]

    def keys_in(self, arguments: BoundArguments) -> list[Tensor]:
        """Return the tensors of keys in arguments."""
        leaves = pytree.tree_leaves(dict(arguments.arguments), is_leaf=_is_keyed_jagged)
        values = [leaf.values() if _is_keyed_jagged(leaf) else leaf for leaf in leaves]
        return [value for value in values if isinstance(value, Tensor) and not value.is_floating_point()]

    def names_in_requests(self, slots: Sequence[str]) -> list[str]:
        """Return what requests call the slots that these inputs or features feed.

        This is the argument of forward, or the last key of nested inputs: ``shown`` for ``shown[0]``, ``user`` for
        ``features['user']``. If it is not the name of one input, the whole place stays.
        """
        short = {slot: self._short(slot) for slot in slots}
        counts = Counter([*short.values(), *self.dense_names])
        free = {slot: name if counts[name] == 1 else slot for slot, name in short.items()}
        return [names_of_positions(free[slot], 1)[0] for slot in slots]

    def _name(self, dense: str) -> str:
        """Return what requests call an input of numbers; see ``names_in_requests``."""
        short = self._short(dense)
        return short if self._counts[short] == 1 else dense

    def _short(self, slot: str) -> str:
        stem = slot.removesuffix("[0]")
        if slot in self._pairs and sum(name.startswith(f"{stem}[") for name in self._pairs) == 1:
            slot = stem  # of keys and their offsets
        inside = re.fullmatch(r"[^']*\['([^']+)'\]", slot)
        return inside[1] if inside else slot.replace("[:, ", "[")

    def _maker(self, name: str, value: Any) -> _Maker:
        if isinstance(value, _CONSTANTS):
            return lambda dense, keys: value
        if _is_keyed_jagged(value):
            return self._keyed_jagged(name, value)
        if isinstance(value, Tensor) and (derived := self._derived(name, value)):
            return derived
        is_known = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.int64, torch.int32)
        if not is_known or not value.ndim or not value.numel():
            came = type(value).__name__
            if isinstance(value, Tensor):
                came = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                if value.dtype == torch.bool:
                    came += f"; {_MASKS}"
            raise ConfigError(self._source, name, f"expected {_FORMS}, got {came}")
        if of_pair := self._of_pair(name, value):
            return of_pair
        self._samples[name] = value.shape[0]
        return self._dense(name, value) if value.is_floating_point() else self._keys(name, value)

    def _of_pair(self, name: str, value: Tensor) -> _Maker | None:
        """Return the maker of keys [N], their offsets or their weights; None for other inputs."""
        if name in self._pairs:
            padding = self._padding_of_rows(
                name, [lookup for lookup in self._lookups if name_of(lookup.keys, {name: value})]
            )
            place = self._add(name, name, self._pairs[name].offsets, padding)
            return lambda dense, keys: keys[place].keys.to(value.dtype)
        for keys_name, pair in self._pairs.items():
            if name == pair.offsets:
                return self._offsets(name, value, keys_name, pair.with_last)
            if name in pair.weights:
                self.dense.append(name)
                return self._weights(name, keys_name, pair.weights[name])
        return None

    @property
    def names_of_dense(self) -> list[str]:
        """What requests by name call the dense features; weights of keys have one name."""
        of_weights = {weight.begin: weight for weight in self.weights}
        names, place = list[str](), 0
        while place < self.width:
            weights = of_weights.get(place)
            names.append(self.dense_names[place] if weights is None else weights.name)
            place += 1 if weights is None else weights.most
        return names

    def place_of(self, feature: str) -> int:
        """Return the place of the feature with a name."""
        return [known.name for known in self.features].index(feature)

    def _weights(self, name: str, feature: str, most: int) -> _Maker:
        """Add the weights of the keys of a feature to the dense features."""
        begin = self.width
        self.weights.append(WeightsOfKeys(self._name(name), feature, begin, most))
        self.width = end = begin + most
        self.dense_names += names_of_positions(self._name(name), most)
        self.is_dense_positive += [False] * most

        def make(dense: Tensor, keys: Sequence[FeatureKeys]) -> Tensor:
            of_positions, own = dense[:, begin:end], keys[self.place_of(feature)]
            if own.keys.shape[0] == dense.shape[0] * most:
                return of_positions.reshape(-1)
            return of_positions[torch.arange(most) < own.lengths[:, None]]

        return make

    def _dense(self, name: str, value: Tensor) -> _Maker:
        sizes, begin = value.shape[1:], self.width
        self.dense.append(name)
        self.width = end = begin + prod(sizes)
        self.dense_names += names_of_positions(self._name(name), end - begin)
        self.is_dense_positive += [bool((value >= 0).all())] * (end - begin)
        return lambda dense, keys: dense[:, begin:end].reshape(dense.shape[0], *sizes)

    def _keys(self, name: str, value: Tensor) -> _Maker:
        sizes, begin = value.shape[1:], len(self.features)
        for position in product(*map(range, sizes)):
            at = f"[:, {', '.join(map(str, position))}]" if position else ""
            self._add(f"{name}{at}", name, None)
        end = len(self.features)

        def make(dense: Tensor, keys: Sequence[FeatureKeys]) -> Tensor:
            columns = torch.stack([key.keys for key in keys[begin:end]], dim=1)
            return columns.reshape(dense.shape[0], *sizes).to(value.dtype)

        return make

    def _offsets(self, name: str, value: Tensor, keys_name: str, with_last: bool) -> _Maker:
        self._samples[name] = value.numel() - with_last

        def make(dense: Tensor, keys: Sequence[FeatureKeys]) -> Tensor:
            ends = keys[self.place_of(keys_name)].lengths.cumsum(0)
            offsets = torch.cat([ends.new_zeros(1), ends])
            return (offsets if with_last else offsets[:-1]).to(value.dtype)

        return make

    def _keyed_jagged(self, name: str, value: Any) -> _Maker:
        kind, names, begin = type(value), list(value.keys()), len(self.features)
        dtypes = value.values().dtype, value.lengths().dtype
        self._samples[name] = value.stride()
        if empty := next(
            (lookup for lookup in self._lookups if lookup.most and not lookup.feature and not lookup.keys.numel()), None
        ):
            reason = f"expected keys of each feature of this table in the example{at_line(empty.line)}"
            raise ConfigError(self._source, empty.table, reason)
        for key in names:
            feature, own = f"{name}[{key!r}]", value[key].values()
            is_own = own.numel() > 0
            lookups = [
                lookup
                for lookup in self._lookups
                if lookup.feature == key or (is_own and name_of(lookup.keys, {key: own}))
            ]
            self._add(feature, name, feature, self._padding_of_rows(feature, lookups))
        end = len(self.features)
        weights = self._weights_of_jagged(name, value, begin, end)

        def make(dense: Tensor, keys: Sequence[FeatureKeys]) -> Any:
            own = keys[begin:end]
            return kind(
                keys=names,
                values=torch.cat([feature.keys for feature in own]).to(dtypes[0]),
                lengths=torch.cat([feature.lengths for feature in own]).to(dtypes[1]),
                stride=dense.shape[0],
                length_per_key=[feature.keys.shape[0] for feature in own],
                weights=None if weights is None else torch.cat([weight(dense, keys) for weight in weights]),
            )

        return make

    def _weights_of_jagged(self, name: str, value: Any, begin: int, end: int) -> list[_Maker] | None:
        """Return the makers of the weights of each feature; None if the jagged tensor has no weights."""
        if getattr(value, "weights_or_none", lambda: None)() is None:
            return None
        makers, before = list[_Maker](), self.width
        for place, key in zip(range(begin, end), value.keys(), strict=True):
            feature = self.features[place]
            if feature.padding is None:  # nobody reads them
                makers.append(partial(_ones, place))
            else:
                makers.append(self._weights(f"{key}.weights", feature.name, feature.padding.most))
        self.dense += [f"{name}.weights()"] * (self.width > before)
        return makers

    def _add(self, name: str, input_name: str, lengths: str | None, padding: Padding | None = None) -> int:
        self.features.append(Feature(name, input_name, lengths, padding))
        return len(self.features) - 1

    def _padding_of_rows(self, name: str, lookups: Sequence[Lookup]) -> Padding | None:
        """Return the padding of the rows of a jagged feature; None if they are pooled."""
        most = sorted({lookup.most for lookup in lookups if lookup.most})
        if len(most) > 1:
            reason = f"expected one padded length for all rows, got {' and '.join(map(str, most))}"
            raise ConfigError(self._source, name, reason)
        return Padding(most[0]) if most else None

    def _padded_inputs(self, named: Mapping[str, Any], sequences: Mapping[str, int]) -> dict[str, _Maker]:
        """Return the makers of the inputs that are padded sequences."""
        makers: dict[str, _Maker] = {}
        if not isinstance(sequences, Mapping):
            raise ConfigError(self._source, "sequences", f"expected {{name: padding key}}, got {sequences!r}")
        by_short = {self._short(name): name for name in named}
        for given, key in sequences.items():
            name = by_short.get(given, given)
            if not isinstance(key, int) or isinstance(key, bool):
                raise ConfigError(self._source, "sequences", f"expected the padding key of {given!r}, got {key!r}")
            if name not in named:
                close = did_you_mean(given, [*named, *by_short])
                raise ConfigError(self._source, "sequences", f"forward has no input {given!r}{close}")
            value = named[name]
            if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32) or value.ndim != 2:
                came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(self._source, name, f"expected a sequence, int64 or int32 [B, L], got {came}")
            makers[name] = self._sequence(name, value, key)
        return makers

    def _sequence(self, name: str, value: Tensor, key: int) -> _Maker:
        is_key = value != key
        padding = Padding(value.shape[1], key, self._is_at_start(name, is_key, key))
        same = (self.features[place].lengths for place, other in self._validity.items() if torch.equal(other, is_key))
        lengths = next(same, name)
        place = self._add(name, name, lengths, padding)
        self._validity[place] = is_key
        self._samples[name] = value.shape[0]
        return lambda dense, keys: padding.matrix(keys[place]).to(value.dtype)

    def _is_at_start(self, name: str, is_key: Tensor, key: int) -> bool:
        """Return whether the padding of the example is at the start."""
        most = is_key.shape[1]
        lengths, places = is_key.sum(1, keepdim=True), torch.arange(most)
        is_end = torch.equal(is_key, places < lengths)
        is_start = torch.equal(is_key, places >= most - lengths)
        if not is_end and not is_start:
            reason = f"expected the padding {key} at the end of each sample of the example, or at the start of each"
            raise ConfigError(self._source, name, reason)
        if is_end and is_start and most > 1:
            reason = (
                f"expected a sample with 1 to {most - 1} keys in the example, which shows where the padding {key} is"
            )
            raise ConfigError(self._source, name, reason)
        return bool(is_start) and most > 1

    def _derived(self, name: str, value: Tensor) -> _Maker | None:
        """Return the maker of an input that is the mask or the lengths of a sequence in the example."""
        if any(_shares_memory(value, lookup.keys) for lookup in self._lookups):
            return None
        for place, is_key in self._validity.items():
            padding, sizes, dtype = self.features[place].padding, value.shape[1:], value.dtype
            assert padding is not None
            if value.numel() == is_key.numel() and value.shape[0] == is_key.shape[0]:
                same = value.reshape(is_key.shape)
                for wanted in (is_key, ~is_key):
                    if torch.equal(same, wanted.to(dtype)):
                        self._samples[name] = value.shape[0]
                        return _mask_maker(place, padding, wanted is is_key, sizes, dtype)
            is_count = not value.is_floating_point() and value.numel() == value.shape[0] == is_key.shape[0]
            if is_count and torch.equal(value.reshape(-1), is_key.sum(1).to(dtype)):
                self._samples[name] = value.shape[0]
                return _lengths_maker(place, sizes, dtype)
        return None


def _ones(place: int, dense: Tensor, keys: Sequence[FeatureKeys]) -> Tensor:
    return torch.ones_like(keys[place].keys, dtype=torch.float32)


def _mask_maker(place: int, padding: Padding, is_one: bool, sizes: Sequence[int], dtype: torch.dtype) -> _Maker:
    """Return the maker of a mask that is 1 at positions with a key, or at those without."""

    def make(dense: Tensor, keys: Sequence[FeatureKeys]) -> Tensor:
        matrix = padding.matrix(keys[place])
        mask = matrix != padding.key if is_one else matrix == padding.key
        return mask.reshape(dense.shape[0], *sizes).to(dtype)

    return make


def _lengths_maker(place: int, sizes: Sequence[int], dtype: torch.dtype) -> _Maker:
    return lambda dense, keys: keys[place].lengths.reshape(-1, *sizes).to(dtype)


def _shares_memory(value: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_keyed_jagged(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in _OF_KEYED_JAGGED)
