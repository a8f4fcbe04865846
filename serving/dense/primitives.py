"""The operations that each array library does best in its own way; layers use them and the array API.

An array here is a NumPy array, a torch tensor, an ndonnx array or a device array. torch and ndonnx are imported only
for arrays of these libraries.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from array_api_compat import array_namespace

Array: TypeAlias = Any


class Arithmetic(Protocol):
    """Multiplies matrices and holds constants in place of the array library.

    On a GPU products may have lower precision, and constants stay on the device instead of being copied for each call.
    """

    def product(self, x: Array, y: Array) -> Array:
        """Return ``x @ y``, float32[..., M, N], in memory of its own.

        Args:
            x: float32[..., M, K].
            y: float32[..., K, N], or [K, N] for all matrices of x.
        """

    def constant(self, values: np.ndarray[Any, Any]) -> Array:
        """Return an array with these values; callers must not change it."""

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return the arrays side by side along ``axis``, in memory of its own."""


def linear(x: Array, w: Array, b: Array | None = None, arithmetic: Arithmetic | None = None) -> Array:
    """Return ``x @ w + b``; every product with a weight goes through here.

    Args:
        x: float[..., I].
        w: float[I, O]; a NumPy array if x is traced.
        b: float[O], or None for 0.
        arithmetic: None: the library's own.

    Returns:
        float[..., O], in memory of its own.
    """
    if _library(x) == "ndonnx":
        # ndonnx wraps matmul in an If; ONNX Runtime's fusions and the int8 quantization do not look inside an If.
        from serving.dense.tracing import traced_linear

        return traced_linear(x, w, b)
    product = _product(x, w, arithmetic)
    if b is not None:
        product += b
    return product


def matmul(x: Array, y: Array, arithmetic: Arithmetic | None) -> Array:
    """Return ``x @ y`` for two tensors that are not weights and have the same number of dimensions."""
    if _library(x) == "ndonnx":
        from serving.dense.tracing import traced_matmul

        return traced_matmul(x, y)
    return _product(x, y, arithmetic)


def constant(values: np.ndarray[Any, Any], like: Array, arithmetic: Arithmetic | None) -> Array:
    """Return ``values`` as an array of the library and dtype of ``like``."""
    if arithmetic is not None:
        return arithmetic.constant(values.astype(like.dtype))
    return array_namespace(like).asarray(values, dtype=like.dtype)


def concat(arrays: Sequence[Array], axis: int, arithmetic: Arithmetic | None) -> Array:
    """Return the arrays side by side along ``axis``."""
    if arithmetic is not None:
        return arithmetic.concat(arrays, axis)
    return array_namespace(*arrays).concat(list(arrays), axis=axis)


def take(x: Array, indices: Sequence[int] | np.ndarray[Any, Any], axis: int, arithmetic: Arithmetic | None) -> Array:
    """Return the elements of ``x`` at ``indices`` along ``axis``; ``indices`` are known when the graph is read."""
    xp = array_namespace(x)
    places = np.asarray(indices, np.int64)
    return xp.take(x, xp.asarray(places) if arithmetic is None else arithmetic.constant(places), axis=axis)


def below_diagonal(x: Array, arithmetic: Arithmetic | None) -> Array:
    """Return the elements below the diagonals of float[B, N, N] by rows: float[B, N * (N - 1) / 2]; N is at least 2."""
    if _library(x) == "ndonnx":
        # A Gather of single columns takes nine times as long as a Split and a Concat.
        from serving.dense.tracing import traced_below_diagonal

        return traced_below_diagonal(x)
    size = x.shape[1]
    row, column = np.tril_indices(size, -1)
    return take(array_namespace(x).reshape(x, (-1, size * size)), row * size + column, 1, arithmetic)


def row_max(x: Array) -> Array:
    """Return the largest element of each row; the last dimension becomes 1."""
    if _library(x) == "ndonnx":
        # ndonnx checks for empty rows at run time, in an If.
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


def sigmoid(x: Array, arithmetic: Arithmetic | None = None) -> Array:
    """Return ``1 / (1 + exp(-x))``, without overflow for any x.

    This does not use ONNX's Sigmoid, because ONNX Runtime approximates it. The relative error is 1e-4 at a probability
    of 3e-4 and several per cent at 1e-7, and ads and recommendations have such probabilities.
    """
    xp = array_namespace(x)
    # Below -87 the result is nearly 0, and exp would overflow in float32.
    return 1 / (1 + xp.exp(-xp.maximum(x, constant(np.asarray(-87.0), x, arithmetic))))


def _product(x: Array, y: Array, arithmetic: Arithmetic | None) -> Array:
    return x @ y if arithmetic is None else arithmetic.product(x, y)


def _library(x: Array) -> str:
    return type(x).__module__.partition(".")[0]
