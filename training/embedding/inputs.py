"""The bags of keys that a caller of ``EmbeddingBagCollection`` passes, in any of its forms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.arguments import shown
from training.samples import Bags

_PADDING = -1


@dataclass(frozen=True, slots=True)
class FeatureBags:
    """R bags of keys.

    Attributes:
        keys: int64[N].
        row_ptrs: int64[R + 1], or None for one key per bag.
        weights: float32[N] on any device, or None.
        slots: S. Bag r is slot r % S of its sample.
        shape: of the bags: (R,), or (B, S) for ``Bags``.
        device: of the keys.
    """

    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int64] | None
    weights: torch.Tensor | None
    slots: int
    shape: tuple[int, ...]
    device: torch.device

    def slots_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots in which the keys at some places are."""
        bags = places if self.row_ptrs is None else np.searchsorted(self.row_ptrs, places, "right") - 1
        return bags % self.slots


NO_BAGS = FeatureBags(np.empty(0, np.int64), None, None, 1, (0,), torch.device("cpu"))


def read_feature(name: str, value: Any) -> FeatureBags:
    """Read the bags of one input; see ``EmbeddingBagCollection.forward`` for the forms.

    Raises:
        TypeError: the value, or one of its tensors, is of another type.
        ValueError: a tensor has another shape.
    """
    if isinstance(value, Bags):
        row_ptrs = None if value.has_one_key_each else value.row_ptrs
        return FeatureBags(value.keys, row_ptrs, None, value.slots, (len(value), value.slots), torch.device("cpu"))
    if isinstance(value, torch.Tensor) and value.is_nested:
        return _read_jagged(name, *without_holes(name, value))
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return _read_dense(name, value)
    if isinstance(value, tuple) and len(value) in (2, 3):
        return _read_jagged(name, *value)
    if hasattr(value, "values") and hasattr(value, "offsets") and not isinstance(value, torch.Tensor):
        return _read_torchrec(name, value)
    raise TypeError(
        f"feature {name!r}: expected a tensor of keys [B] or [B, n], (keys, offsets), (keys, offsets, weights), or "
        f"a jagged tensor, got {shown(value)}"
    )


def without_holes(name: str, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of a nested tensor, and where each of its R parts begins and ends, int64[R + 1].

    A jagged tensor may have values before, between and after its parts.
    """
    if value.layout == torch.strided:
        parts = value.unbind()
        values = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        return values, torch.tensor([0, *map(len, parts)], device=value.device).cumsum(0)
    values, offsets, lengths = value.values(), value.offsets(), value.lengths()
    found = _places(name, len(values), offsets, lengths)
    return (values, offsets) if found is None else (values[found[0].to(values.device)], found[1])


def by_feature(features: Any) -> Mapping[str, Any]:
    """Return the bags of each feature.

    Raises:
        TypeError: ``features`` is neither a mapping nor TorchRec's ``KeyedJaggedTensor``.
    """
    if not isinstance(features, Mapping) and hasattr(features, "to_dict"):
        features = features.to_dict()
    if not isinstance(features, Mapping):
        expected = "expected a dictionary with the bags of each feature, or TorchRec's KeyedJaggedTensor"
        raise TypeError(f"features: {expected}, got {shown(features)}")
    return features


def _read_dense(name: str, keys: torch.Tensor) -> FeatureBags:
    _require_integers(name, "keys", keys, (1, 2))
    bags = keys.shape[0]
    is_key = keys != _PADDING
    if keys.dim() == 1 and bool(is_key.all()):
        return FeatureBags(_int64(keys), None, None, 1, (bags,), keys.device)
    counts = is_key.sum(dim=1) if keys.dim() == 2 else is_key
    row_ptrs = np.concatenate([[0], counts.cpu().numpy().cumsum()]).astype(np.int64)
    return FeatureBags(_int64(keys[is_key]), row_ptrs, None, 1, (bags,), keys.device)


def _read_jagged(name: str, keys: Any, offsets: Any, weights: Any = None) -> FeatureBags:
    _require_integers(name, "keys", keys, (1,))
    _require_integers(name, "offsets", offsets, (1,))
    _require_weights(name, keys, weights)
    row_ptrs = _int64(offsets)
    if not len(row_ptrs) or row_ptrs[0] != 0 or row_ptrs[-1] != len(keys) or (row_ptrs[1:] < row_ptrs[:-1]).any():
        expected = f"expected offsets that ascend from 0 to {len(keys)}, the number of keys"
        raise ValueError(f"feature {name!r}: {expected}, got {_few(offsets)}")
    return FeatureBags(_int64(keys), row_ptrs, weights, 1, (len(offsets) - 1,), keys.device)


def _require_weights(name: str, keys: torch.Tensor, weights: Any) -> None:
    if weights is None:
        return
    if not isinstance(weights, torch.Tensor) or weights.shape != keys.shape or not weights.is_floating_point():
        raise ValueError(f"feature {name!r}: expected a weight for each of {len(keys)} keys, got {shown(weights)}")


def _read_torchrec(name: str, value: Any) -> FeatureBags:
    """Read the bags of TorchRec's ``JaggedTensor``, or of a ``KeyedJaggedTensor`` of one feature."""
    if callable(getattr(value, "keys", None)) and len(value.keys()) != 1:
        raise TypeError(
            f"feature {name!r}: expected one feature, got a {type(value).__name__} of {len(value.keys())} features; "
            "pass it instead of the dictionary of features"
        )
    keys, offsets, lengths = value.values(), value.offsets(), value.lengths() if hasattr(value, "lengths") else None
    weights = value.weights_or_none() if hasattr(value, "weights_or_none") else None
    _require_integers(name, "keys", keys, (1,))
    _require_weights(name, keys, weights)
    found = _places(name, len(keys), offsets, lengths)
    if found is not None:
        some, offsets = found
        keys, weights = keys[some.to(keys.device)], None if weights is None else weights[some.to(weights.device)]
    return _read_jagged(name, keys, offsets, weights)


def _places(
    name: str, values: int, offsets: torch.Tensor, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the positions of the values in bags, and the row pointers of the bags. None: all values are, in order."""
    _require_integers(name, "offsets", offsets, (1,))
    ptrs = _int64(offsets)
    begins, sizes = ptrs[:-1], np.diff(ptrs)
    if lengths is not None:
        _require_integers(name, "lengths", lengths, (1,))
        sizes = _int64(lengths)
    row_ptrs = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
    if np.array_equal(row_ptrs, ptrs) and row_ptrs[-1] == values:
        return None
    if len(sizes) != len(begins) or (sizes < 0).any() or (begins < 0).any() or (begins + sizes > values).any():
        reason = f"expected bags inside the {values} keys, got offsets {_few(offsets)} and lengths {_few(lengths)}"
        raise ValueError(f"feature {name!r}: {reason}")
    places = np.arange(row_ptrs[-1]) + np.repeat(begins - row_ptrs[:-1], sizes)
    return torch.from_numpy(places), torch.from_numpy(row_ptrs)


def _few(numbers: torch.Tensor | None) -> str:
    return "none" if numbers is None else f"{numbers[:8].tolist()}{'...' * (len(numbers) > 8)}"


def _require_integers(name: str, what: str, tensor: Any, dims: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"feature {name!r}: expected {what} of int64 or int32, got {shown(tensor)}")
    if tensor.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(f"feature {name!r}: expected {what} with {wanted} dimensions, got {shown(tensor)}")


def _int64(tensor: torch.Tensor) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = tensor.detach().to("cpu", torch.int64).contiguous().numpy()
    return numbers
