"""What the engine int8 is measured on, and what the measurement says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEFAULT_TOLERANCE = 0.01
# Columns that are smaller than this share of the largest, or that the calibration leaves at 0, count as this large: a
# later batch may bring them. Of 0.001, 0.003, 0.01 and 0.03 this one has the least mean error on other samples than
# those that columns were balanced on, on most of the graphs that come with hotrow-train.
SMALLEST_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Calibration:
    """Looked-up samples, and how far off an answer to them may be.

    Attributes:
        dense: float32[B, F]; B at least 1.
        embeddings: float32[B, S, D] per embedding layer, in graph order.
        tolerance: the largest difference of a probability that is accepted.
    """

    dense: NDArray[np.float32]
    embeddings: Sequence[NDArray[np.float32]]
    tolerance: float = DEFAULT_TOLERANCE


@dataclass(frozen=True, slots=True)
class Quantization:
    """What 8-bit products did to a network's probabilities on the calibration batch, on this machine.

    Attributes:
        max_error: the largest difference from the float32 network's.
        mean_error: the mean of all differences, without their signs.
        samples: B of the calibration batch.
        quantized: products of matrices that are of integers now.
        products: all products of matrices that the network has.
    """

    max_error: float
    mean_error: float
    samples: int
    quantized: int
    products: int

    def __str__(self) -> str:
        """Return it as logs and messages write it."""
        return (
            f"int8 in {self.quantized} of {self.products} products; on {self.samples} samples a probability is off by "
            f"{self.max_error:.2g} at most, by {self.mean_error:.2g} on average"
        )
