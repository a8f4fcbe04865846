"""The samples on which the engine int8 is measured, and the result of the measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.option_values import DEFAULT_TOLERANCE

# Columns below this part of the largest column, or at 0 in the calibration, count as this large, because a later batch
# may have larger values there. Among 0.001, 0.003, 0.01 and 0.03, 0.01 has the smallest mean error on held-out samples
# for most of the graphs that come with hotrow train.
SMALLEST_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Calibration:
    """Looked-up samples, and the error that their answers may have.

    Attributes:
        dense: float32[B, F]; B at least 1.
        embeddings: float32[B, S, D] per embedding layer, in graph order.
        tolerance: the largest error of a probability to accept; of a regression, in standard deviations of its label.
    """

    dense: NDArray[np.float32]
    embeddings: Sequence[NDArray[np.float32]]
    tolerance: float = DEFAULT_TOLERANCE


@dataclass(frozen=True, slots=True)
class Quantization:
    """The error of a network's answers with 8-bit products, on the calibration batch and on this machine.

    The errors of a regression are in standard deviations of its label.

    Attributes:
        max_error: the largest absolute difference from the float32 network.
        mean_error: the mean absolute difference from the float32 network.
        samples: B of the calibration batch.
        quantized: how many matrix products use integers now.
        products: how many matrix products the network has.
        has_scores: whether the network is a regression.
    """

    max_error: float
    mean_error: float
    samples: int
    quantized: int
    products: int
    has_scores: bool = False

    def __str__(self) -> str:
        """Return the text for logs and messages."""
        answer, unit = ("a score", " standard deviations of its label") if self.has_scores else ("a probability", "")
        return (
            f"int8 in {self.quantized} of {self.products} products; on {self.samples} samples {answer} is off by "
            f"{self.max_error:.2g}{unit} at most, by {self.mean_error:.2g} on average"
        )
