"""Embedding tables whose rows are not pooled, for attention over sequences."""

from typing import Any

import numpy as np
import torch

from training.embedding.collection import EmbeddingBagCollection
from training.embedding.eager import eager
from training.embedding.inputs import by_feature, read_feature


class JaggedRows:
    """The rows of a feature, sample by sample, with the methods of TorchRec's ``JaggedTensor``."""

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Keep float32[N, D], and int64[R + 1], where the rows of each sample begin."""
        self._values, self._offsets = values, offsets

    def values(self) -> torch.Tensor:
        """Return all rows, float32[N, D]."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """Return where the rows of each sample begin, int64[R + 1]."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """Return the number of rows of each sample, int64[R]."""
        return self._offsets.diff()

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """Return the first rows of each sample, float32[R, L, D].

        Args:
            desired_length: L; None: the most rows of a sample.
            padding_value: of positions without a row.
        """
        lengths = self.lengths()
        most = max(lengths.tolist(), default=0) if desired_length is None else desired_length
        places = torch.arange(most, device=self._offsets.device)
        rows = torch.cat([self._values, self._values.new_full((1, self._values.shape[1]), padding_value)])
        chosen = torch.where(places < lengths[:, None], self._offsets[:-1, None] + places, len(self._values))
        return rows[chosen]


class EmbeddingCollection(EmbeddingBagCollection):
    """Embedding tables that return the row of each key, as TorchRec's ``EmbeddingCollection`` does.

    It is the sister of ``EmbeddingBagCollection``: tables, optimizers, states and processes are the same.

        tables = EmbeddingCollection({"items": EmbeddingBagConfig(16, features=("item", "seen"))})
        seen = tables({"seen": (keys, offsets)})["seen"]
        rows, lengths = seen.to_padded_dense(50), seen.lengths()  # float32[B, 50, 16], int64[B]
    """

    @eager
    def forward(self, features: Any) -> dict[str, JaggedRows]:
        """Look up the row of each key.

        Args:
            features: see ``EmbeddingBagCollection.forward``.

        Returns:
            the rows of each feature, on the device of its keys.

        Raises:
            KeyError, TypeError, ValueError, IndexError, ReservedKeyError, RuntimeError: see
                ``EmbeddingBagCollection.forward``.
            ValueError: a feature has weights.
        """
        bags = {name: read_feature(name, value) for name, value in by_feature(features).items()}
        for name, of_feature in bags.items():
            if of_feature.weights is not None:
                raise ValueError(f"feature {name!r}: expected keys without weights, because no rows are added up")
        keys = {name: torch.from_numpy(one.keys).to(one.device) for name, one in bags.items()}
        rows = super().forward({name: (one, torch.arange(len(one) + 1)) for name, one in keys.items()})
        found = {}
        for name, one in bags.items():
            row_ptrs = np.arange(one.keys.size + 1) if one.row_ptrs is None else one.row_ptrs
            found[name] = JaggedRows(rows[name], torch.from_numpy(row_ptrs).to(one.device))
        return found
