"""The primitives as single ONNX operators, for ndonnx arrays while a graph is traced."""

import ndonnx
import numpy as np
import spox.opset.ai.onnx.v21 as op
from spox._future import ValuePropBackend, set_value_prop_backend

from serving.dense.primitives import Array

# Otherwise ndonnx starts a session of ONNX Runtime, with threads of its own, for each constant of the model.
set_value_prop_backend(ValuePropBackend.REFERENCE)


def traced_linear(x: Array, w: Array, b: Array | None) -> Array:
    """See ``primitives.linear``; a Gemm, between two Reshapes if x has more than two dimensions."""
    rows = x.unwrap_spox()
    inputs, outputs = w.shape
    if x.ndim > 2:
        rows = op.reshape(rows, op.const(np.array([-1, inputs], np.int64)))
    product = op.gemm(rows, op.const(w), None if b is None else op.const(b))
    if x.ndim > 2:
        product = op.reshape(product, op.const(np.array([-1, *x.shape[1:-1], outputs], np.int64)))
    return ndonnx.asarray(product)


def traced_matmul(x: Array, y: Array) -> Array:
    """See ``primitives.matmul``."""
    return ndonnx.asarray(op.matmul(x.unwrap_spox(), y.unwrap_spox()))


def traced_below_diagonal(x: Array) -> Array:
    """See ``primitives.below_diagonal``; a Split and a Concat."""
    size = x.shape[1]
    flat = op.reshape(x.unwrap_spox(), op.const(np.array([-1, size * size], np.int64)))
    # The first row has no element below the diagonal. Every other row begins with its elements below the diagonal.
    lengths = [size, *(length for row in range(1, size) for length in (row, size - row))]
    parts = op.split(flat, op.const(np.array(lengths, np.int64)), axis=1)
    return ndonnx.asarray(op.concat(parts[1::2], axis=1))


def traced_row_max(x: Array) -> Array:
    """See ``primitives.row_max``."""
    return ndonnx.asarray(op.reduce_max(x.unwrap_spox(), op.const(np.array([-1], np.int64)), keepdims=True))


def traced_relu(x: Array) -> Array:
    """See ``primitives.relu``."""
    return ndonnx.asarray(op.relu(x.unwrap_spox()))
