"""Which inputs of a module reach a table as keys, offsets and weights of bags."""

from collections.abc import Mapping, Sequence
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
    """Return the inputs that reach a table as keys with offsets, by the name of the keys.

    The module may compute keys and weights from an input, such as keys + 3 or exp(weights).
    """
    pairs: dict[str, Pair] = {}
    direct = {name_of(tensor, named) for lookup in lookups for tensor in (lookup.keys, lookup.offsets, lookup.weights)}
    for lookup in lookups:
        offsets = name_of(lookup.offsets, named)
        if lookup.offsets is None or offsets is None:
            continue
        count, samples = lookup.keys.numel(), lookup.offsets.numel() - lookup.with_last_offset
        others = {
            name: value
            for name, value in named.items()
            if isinstance(value, Tensor) and value.shape == (count,) != (samples,) and name not in direct
        }
        if keys := name_of(lookup.keys, named) or _only(others, torch.int64, torch.int32):
            pair = pairs.setdefault(keys, Pair(offsets, lookup.with_last_offset, {}))
            if lookup.weights is None:
                continue
            if weights := name_of(lookup.weights, named) or _only(others, torch.float32):
                pair.weights[weights] = lookup.most
    return pairs


def _only(named: Mapping[str, Tensor], *dtypes: torch.dtype) -> str | None:
    """Return the name of the only tensor of these types; None if there are several."""
    found = [name for name, value in named.items() if value.dtype in dtypes]
    return found[0] if len(found) == 1 else None


def name_of(tensor: Tensor | None, named: Mapping[str, Any]) -> str | None:
    """Return the input that is this tensor, or a view of the whole of it."""
    same = (
        name
        for name, value in named.items()
        if isinstance(tensor, Tensor) and isinstance(value, Tensor)
        if (tensor.data_ptr(), tensor.dtype, tensor.shape) == (value.data_ptr(), value.dtype, value.shape)
    )
    return next(same, None)
