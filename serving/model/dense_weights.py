"""The arrays a dense network needs beside its graph, by name."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.model.records import Graph, WeightSpec

Weights: TypeAlias = dict[str, NDArray[np.float32]]  # "<layer>.<weight>" -> float32 array of WeightSpec.shape


def weight_key(spec: WeightSpec) -> str:
    """Return a weight's key in ``Weights``."""
    return f"{spec.layer}.{spec.name}"


def check_weights(graph: Graph, weights: Weights) -> None:
    """Check that ``weights`` are exactly the graph's, its statistics among them.

    Raises:
        ValueError: a weight is missing, unknown, of another shape, or not float32.
    """
    expected = {weight_key(spec): spec.shape for spec in graph.stored}
    for key in weights.keys() - expected.keys():
        raise ValueError(f"{key}: the graph has no such weight")
    for key, shape in expected.items():
        if key not in weights:
            raise ValueError(f"{key}: missing")
        array = weights[key]
        if array.shape != shape or array.dtype != np.float32:
            raise ValueError(f"{key}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}")
