"""The operations that each array library does best in its own way; every layer is built from them and the array API.

An array here is a NumPy array, a torch tensor or an ndonnx array. Neither torch nor ndonnx is imported unless an
array of that library comes in.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

Array: TypeAlias = Any


def linear(x: Array, w: Array, b: Array | None = None) -> Array:
    """Return ``x @ w + b``; every product with a weight goes through here.

    Args:
        x: float[..., I].
        w: float[I, O]; a NumPy array where x is traced.
        b: float[O], or None for 0.

    Returns:
        float[..., O], in memory of its own.
    """
    if _library(x) == "ndonnx":
        # ndonnx wraps matmul in an If, which ONNX Runtime's fusions and int8 quantisation do not look into
        from serving.dense.tracing import traced_linear

        return traced_linear(x, w, b)
    product = x @ w
    if b is not None:
        product += b
    return product


def matmul(x: Array, y: Array) -> Array:
    """Return ``x @ y``, the product of two tensors of which neither is a weight; both have as many dimensions."""
    if _library(x) == "ndonnx":
        from serving.dense.tracing import traced_matmul

        return traced_matmul(x, y)
    return x @ y


def constant(values: np.ndarray[Any, Any], like: Array) -> Array:
    """Return ``values`` as an array of the library and dtype of ``like``."""
    return array_namespace(like).asarray(values, dtype=like.dtype)


def take(x: Array, indices: Sequence[int] | np.ndarray[Any, Any], axis: int) -> Array:
    """Return the elements of ``x`` at ``indices``, known when the graph is read, along ``axis``."""
    xp = array_namespace(x)
    return xp.take(x, xp.asarray(np.asarray(indices, np.int64)), axis=axis)


def below_diagonal(x: Array) -> Array:
    """Return what stands below the diagonals of float[B, N, N], row by row: float[B, N * (N - 1) / 2]; N at least 2."""
    if _library(x) == "ndonnx":
        # a Gather of single columns takes nine times as long as to split them off and join them
        from serving.dense.tracing import traced_below_diagonal

        return traced_below_diagonal(x)
    size = x.shape[1]
    row, column = np.tril_indices(size, -1)
    return take(array_namespace(x).reshape(x, (-1, size * size)), row * size + column, axis=1)


def row_max(x: Array) -> Array:
    """Return the largest of each row, the last dimension, which stays as 1."""
    if _library(x) == "ndonnx":
        # ndonnx looks for empty rows at run time, in an If
        from serving.dense.tracing import traced_row_max

        return traced_row_max(x)
    return array_namespace(x).max(x, axis=-1, keepdims=True)


def relu(x: Array) -> Array:
    """Return ``max(x, 0)``; the gradient at 0 is 0."""
    library = _library(x)
    if library == "ndonnx":
        from serving.dense.tracing import traced_relu

        return traced_relu(x)
    xp = array_namespace(x)
    return xp.relu(x) if library == "torch" else xp.maximum(x, 0)


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, without overflow for any x.

    Not ONNX's own Sigmoid: ONNX Runtime approximates it, and is off by 1e-4 of the value at a probability of 3e-4
    and by several per cent at 1e-7, where ads and recommendations live.
    """
    xp = array_namespace(x)
    # below -87 the result is as good as 0, and exp would overflow in float32
    return 1 / (1 + xp.exp(-xp.maximum(x, xp.asarray(-87.0, dtype=x.dtype))))


def _library(x: Array) -> str:
    return type(x).__module__.partition(".")[0]
