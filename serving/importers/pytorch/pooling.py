"""Pooling that the network does itself: maxima, and sums with weights. It gets the row of each key of a bag."""

from typing import NamedTuple

import torch
from torch import Tensor

#: The key of a position without a key.
NO_KEY = -1


class Positions(NamedTuple):
    """Bags of keys in a fixed number of positions.

    Attributes:
        is_key: bool[B, L], which positions have a key.
        weights: float32[B, L], of the keys; None: they have none.
    """

    is_key: Tensor
    weights: Tensor | None

    def pool(self, rows: Tensor) -> Tensor:
        """Return the maximum of rows, float32[B, L, D], or their sum with weights, as ``nn.EmbeddingBag`` does."""
        if self.weights is not None:
            weights = torch.where(self.is_key, self.weights, 0.0)  # others may be log(0)
            return (rows * weights[..., None]).sum(1)
        largest = rows.masked_fill(~self.is_key[..., None], -torch.inf).amax(1)
        return torch.where(self.is_key.any(1, keepdim=True), largest, 0.0)


def matrix_positions(keys: Tensor, padding_key: int | None, weights: Tensor | None) -> Positions:
    """Return the positions of keys [B, L], some of which may be padding."""
    is_key = torch.ones_like(keys, dtype=torch.bool) if padding_key is None else keys != padding_key
    return Positions(is_key, weights)


def ragged_positions(
    keys: Tensor, offsets: Tensor, with_last_offset: bool, weights: Tensor | None, samples: int, most: int
) -> Positions:
    """Return the positions of bags of keys [N]; or of keys and weights [B * L], with ``NO_KEY`` where none is.

    Args:
        keys: the keys.
        offsets: where each bag of keys [N] begins.
        with_last_offset: whether the offsets end with N.
        weights: of the keys; None: they have none.
        samples: B.
        most: L.
    """
    if keys.shape[0] == samples * most:
        is_key = keys.reshape(samples, most) != NO_KEY
        return Positions(is_key, None if weights is None else weights.reshape(samples, most))
    is_key = torch.arange(most) < lengths_of_bags(keys, offsets, with_last_offset)[:, None]
    if weights is None:
        return Positions(is_key, None)
    padded = weights.new_zeros(samples, most)
    padded[is_key] = weights
    return Positions(is_key, padded)


def lengths_of_bags(keys: Tensor, offsets: Tensor, with_last_offset: bool) -> Tensor:
    """Return how many keys each bag has, int64[B]."""
    if with_last_offset:
        return offsets.diff()
    return torch.cat([offsets, offsets.new_full((1,), keys.shape[0])]).diff()
