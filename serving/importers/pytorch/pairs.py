"""Which inputs of a module reach a table as keys, offsets and weights of bags."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving.importers.pytorch.tables import Lookup


class Pair(NamedTuple):
    """The offsets of an input of keys, whether they end with N, and L of each input of weights of the keys."""

    offsets: str
    with_last: bool
    weights: dict[str, int]


def pairs_of(named: Mapping[str, Any], lookups: Sequence[Lookup]) -> dict[str, Pair]:
    """Return the inputs that reach a table as keys with offsets, by the name of the keys."""
    pairs: dict[str, Pair] = {}
    direct = {name_of(lookup.weights, named) for lookup in lookups}
    for lookup in lookups:
        keys, offsets = (name_of(tensor, named) for tensor in (lookup.keys, lookup.offsets))
        if keys is not None and offsets is not None:
            pair = pairs.setdefault(keys, Pair(offsets, lookup.with_last_offset, {}))
            if weights := _name_of_weights(lookup, named, direct):
                pair.weights[weights] = lookup.most
    return pairs


def _name_of_weights(lookup: Lookup, named: Mapping[str, Any], direct: Collection[str | None]) -> str | None:
    """Return the input with the weights of a lookup. The module may compute weights from it, such as exp(input).

    Inputs in ``direct`` are weights as they are.
    """
    if lookup.weights is None or lookup.offsets is None:
        return None
    if name := name_of(lookup.weights, named):
        return name
    samples, count = lookup.offsets.numel() - lookup.with_last_offset, lookup.keys.numel()
    alike = [
        name
        for name, value in named.items()
        if isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == (count,) != (samples,)
        if name not in direct
    ]
    return alike[0] if len(alike) == 1 else None


def name_of(tensor: Tensor | None, named: Mapping[str, Any]) -> str | None:
    """Return the input that is this tensor, or a view of the whole of it."""
    same = (
        name
        for name, value in named.items()
        if isinstance(tensor, Tensor) and isinstance(value, Tensor)
        if (tensor.data_ptr(), tensor.dtype, tensor.shape) == (value.data_ptr(), value.dtype, value.shape)
    )
    return next(same, None)
