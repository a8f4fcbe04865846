"""Rows that are not pooled: padded keys, and a stand-in for TorchRec's ``JaggedTensor`` of rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serving.errors import ConfigError
from serving.importers.pytorch.lines import at_line, line_of_call

_ADVICE = "expected to_padded_dense(desired_length), with a number, and lengths() for a mask"


def padded(
    keys: NDArray[np.int64], lengths: NDArray[np.int64], most: int, key: int, at_start: bool = False
) -> NDArray[np.int64]:
    """Return int64[B, L]: the first L keys of each sample, and ``key`` at the other positions.

    Args:
        keys: int64[N], sample by sample.
        lengths: int64[B].
        most: L.
        key: the padding.
        at_start: the padding comes before the keys.
    """
    places = np.arange(keys.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(np.arange(lengths.size), lengths)
    is_kept = places < most
    rows, places, keys = rows[is_kept], places[is_kept], keys[is_kept]
    if at_start:
        places = places + (most - np.minimum(lengths, most))[rows]
    matrix = np.full((lengths.size, most), key, np.int64)
    matrix[rows, places] = keys
    return matrix


class JaggedRows:
    """The rows of a feature. Only padding them makes a lookup, because a network needs a fixed number of positions."""

    def __init__(self, source: str, lengths: Tensor, pad: Callable[[int, float], Tensor]) -> None:
        """Keep what makes float32[B, L, D] of L and the value of positions without a key."""
        self._source, self._lengths, self._pad = source, lengths, pad

    def lengths(self) -> Tensor:
        """Return the number of keys of each sample, int64[B]."""
        return self._lengths

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return float32[B, L, D]."""
        if not isinstance(desired_length, int):
            raise ConfigError(
                self._source, "", f"is padded to the longest in a batch; {_ADVICE}{at_line(line_of_call())}"
            )
        return self._pad(desired_length, padding_value)

    def __getattr__(self, name: str) -> Any:
        """Refuse whatever else TorchRec has."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(self._source, "", f"forward reads .{name} of rows; {_ADVICE}{at_line(line_of_call())}")
