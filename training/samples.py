"""Training data in memory: samples with one key per slot, and the bags that a table looks up."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Bags:
    """The keys of one table for B samples of S slots, any number of keys per slot.

    Attributes:
        keys: int64[N], sample-major: sample 0's slot 0, slot 1, ..., then sample 1's.
        row_ptrs: int64[B * S + 1], CSR offsets of the bags; starts at 0, ends at N.
    """

    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int64]

    @classmethod
    def one_key_each(cls, keys: NDArray[np.int64]) -> Self:
        """Make the bags of a table whose every slot has exactly one key: ``keys`` is int64[B, S]."""
        return cls(keys=keys.reshape(-1), row_ptrs=np.arange(keys.size + 1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Samples:
    """B labelled samples with exactly one key in each slot, as Criteo's data has.

    Attributes:
        labels: float32[B], each 0.0 or 1.0.
        dense: float32[B, F].
        keys: int64[B, S]; no key occurs in two slots.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    keys: NDArray[np.int64]

    def __len__(self) -> int:
        """B."""
        return int(self.labels.shape[0])

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Self:
        """Select samples by slice (a view) or by int64 positions (a copy)."""
        return type(self)(self.labels[rows], self.dense[rows], self.keys[rows])

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Put samples one after another; ``parts`` must not be empty."""
        return cls(
            labels=np.concatenate([part.labels for part in parts]),
            dense=np.concatenate([part.dense for part in parts]),
            keys=np.concatenate([part.keys for part in parts]),
        )
