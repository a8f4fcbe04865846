"""The inputs of a module: learn their form from an example, and make more of them.

A feature is what has a list of keys per sample: a position of a key tensor [B, ...], a pair of keys [N] and offsets, or
a key of TorchRec's KeyedJaggedTensor.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import BoundArguments
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from serving.errors import ConfigError
from serving.importers.pytorch.tables import Lookup
from serving.model.names import names_of_positions

_FORMS = "float32 [B, ...] for dense features, int64 or int32 [B, ...] for keys, or a KeyedJaggedTensor"
_CONSTANTS = (type(None), bool, int, float, str)
_OF_KEYED_JAGGED = ("keys", "values", "lengths", "stride")


class FeatureKeys(NamedTuple):
    """One feature's keys, int64[N] sample by sample, and the number of keys per sample, int64[B]."""

    keys: Tensor
    lengths: Tensor


class Feature(NamedTuple):
    """One feature.

    Attributes:
        name: as messages show it: ``ids[:, 3]``.
        input: the input that it is a part of.
        lengths: features with the same text here have equal lengths. None: one key per sample.
    """

    name: str
    input: str
    lengths: str | None


#: Makes one input from the dense features, [B, F], and the keys of all features.
_Maker = Callable[[Tensor, Sequence[FeatureKeys]], Any]


class Inputs:
    """How to make the arguments of a module.

    Attributes:
        dense: names of the inputs with dense features, in order.
        width: F.
        dense_names: what requests call the dense features, F names.
        features: in order.
        samples: B of the example.
    """

    def __init__(self, source: str, bound: BoundArguments, lookups: Sequence[Lookup]) -> None:
        """Learn them from the arguments of one call and its lookups. ``source`` names the module in messages.

        Raises:
            ConfigError: an input has no known form, or two inputs differ in B.
        """
        self.dense: list[str] = []
        self.width = 0
        self.dense_names: list[str] = []
        self.features: list[Feature] = []
        self._source, self._bound = source, bound
        self._samples: dict[str, int] = {}  # B by input
        leaves, self._tree = pytree.tree_flatten_with_path(dict(bound.arguments), is_leaf=_is_keyed_jagged)
        named = {f"{path[0].key}{pytree.keystr(path[1:])}": value for path, value in leaves}
        self._pairs = _pairs(named, lookups)
        self._makers = [self._maker(name, value) for name, value in named.items()]
        if len(set(self._samples.values())) > 1:
            found = ", ".join(f"{samples} in {name!r}" for name, samples in self._samples.items())
            advice = "keys [N] need their offsets as another input, and both must reach the table as they are"
            reason = f"expected the same B in all inputs, got {found}; {advice}"
            raise ConfigError(source, "example", reason)
        self.samples = next(iter(self._samples.values()), 0)

    def arguments(self, dense: Tensor, keys: Sequence[FeatureKeys]) -> BoundArguments:
        """Return arguments with dense features, float32[B, F], and the keys of each feature."""
        made = pytree.tree_unflatten([make(dense, keys) for make in self._makers], self._tree)
        return BoundArguments(self._bound.signature, made)

    def names_in_requests(self, slots: Sequence[str]) -> list[str]:
        """Return what requests call the slots that these inputs or features feed.

        This is the argument of forward, or the last key of nested inputs: ``shown`` for ``shown[0]``, ``user`` for
        ``features['user']``. If it is not the name of one input, the whole place stays.
        """
        short = {slot: self._short(slot) for slot in slots}
        counts = Counter([*short.values(), *self.dense_names])
        free = {slot: name if counts[name] == 1 else slot for slot, name in short.items()}
        return [names_of_positions(free[slot], 1)[0] for slot in slots]

    def _short(self, slot: str) -> str:
        if slot in self._pairs:
            slot = slot.removesuffix("[0]")
        inside = re.fullmatch(r"[^']*\['([^']+)'\]", slot)
        return inside[1] if inside else slot.replace("[:, ", "[")

    def _maker(self, name: str, value: Any) -> _Maker:
        if isinstance(value, _CONSTANTS):
            return lambda dense, keys: value
        if _is_keyed_jagged(value):
            return self._keyed_jagged(name, value)
        is_known = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.int64, torch.int32)
        if not is_known or not value.ndim or not value.numel():
            came = type(value).__name__
            if isinstance(value, Tensor):
                came = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise ConfigError(self._source, name, f"expected {_FORMS}, got {came}")
        if name in self._pairs:
            place = self._add(name, name, self._pairs[name].offsets)
            return lambda dense, keys: keys[place].keys.to(value.dtype)
        for keys_name, pair in self._pairs.items():
            if name == pair.offsets:
                return self._offsets(name, value, keys_name, pair.with_last)
        self._samples[name] = value.shape[0]
        return self._dense(name, value) if value.is_floating_point() else self._keys(name, value)

    def _dense(self, name: str, value: Tensor) -> _Maker:
        sizes, begin = value.shape[1:], self.width
        self.dense.append(name)
        self.width = end = begin + prod(sizes)
        self.dense_names += names_of_positions(name, end - begin)
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
            place = [feature.name for feature in self.features].index(keys_name)
            ends = keys[place].lengths.cumsum(0)
            offsets = torch.cat([ends.new_zeros(1), ends])
            return (offsets if with_last else offsets[:-1]).to(value.dtype)

        return make

    def _keyed_jagged(self, name: str, value: Any) -> _Maker:
        kind, names, begin = type(value), list(value.keys()), len(self.features)
        dtypes = value.values().dtype, value.lengths().dtype
        self._samples[name] = value.stride()
        for key in names:
            feature = f"{name}[{key!r}]"
            self._add(feature, name, feature)
        end = len(self.features)

        def make(dense: Tensor, keys: Sequence[FeatureKeys]) -> Any:
            own = keys[begin:end]
            return kind(
                keys=names,
                values=torch.cat([feature.keys for feature in own]).to(dtypes[0]),
                lengths=torch.cat([feature.lengths for feature in own]).to(dtypes[1]),
                stride=dense.shape[0],
                length_per_key=[feature.keys.shape[0] for feature in own],
            )

        return make

    def _add(self, name: str, input_name: str, lengths: str | None) -> int:
        self.features.append(Feature(name, input_name, lengths))
        return len(self.features) - 1


class _Pair(NamedTuple):
    """The offsets of an input of keys, and whether they end with N."""

    offsets: str
    with_last: bool


def _pairs(named: Mapping[str, Any], lookups: Sequence[Lookup]) -> dict[str, _Pair]:
    """Return the inputs that reach a table as keys with offsets, by the name of the keys."""
    pairs: dict[str, _Pair] = {}
    for lookup in lookups:
        keys, offsets = (_name_of(tensor, named) for tensor in (lookup.keys, lookup.offsets))
        if keys is not None and offsets is not None:
            pairs.setdefault(keys, _Pair(offsets, lookup.with_last_offset))
    return pairs


def _name_of(tensor: Tensor | None, named: Mapping[str, Any]) -> str | None:
    """Return the input that is this tensor, or a view of the whole of it."""
    same = (
        name
        for name, value in named.items()
        if isinstance(tensor, Tensor) and isinstance(value, Tensor)
        if (tensor.data_ptr(), tensor.dtype, tensor.shape) == (value.data_ptr(), value.dtype, value.shape)
    )
    return next(same, None)


def _is_keyed_jagged(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in _OF_KEYED_JAGGED)
