"""HugeCTR's regularizers of the dense weights (v3.0 to v24.06, l1_regularizer.cu and l2_regularizer.cu)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Regularizer:
    """A term of the loss that keeps weights small.

    Attributes:
        kind: "L1" adds ``factor / B * sum(|w|)`` for a batch of B samples, "L2" ``factor / (2 B) * sum(w^2)``.
        factor: ``lambda`` of the document, at least 0.
    """

    kind: Literal["L1", "L2"]
    factor: float

    def term(self, weights: Iterable[torch.Tensor], samples: int) -> torch.Tensor:
        """Return the term of these weights for a batch."""
        if self.kind == "L1":
            return sum((weight.abs().sum() for weight in weights), torch.zeros(())) * (self.factor / samples)
        return sum((weight.square().sum() for weight in weights), torch.zeros(())) * (self.factor / (2 * samples))
