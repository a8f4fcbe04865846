"""What each dense layer computes: one pure function and one entry of ``LAYERS`` per type.

Every function takes the layer's checked parameters, its bottoms and its own weights, and returns its tops. It is
written against the array API, so that the same lines serve NumPy arrays (the reference), torch tensors (training,
with autograd) and ndonnx arrays (the traced ONNX model). No function changes its arguments. Shapes, parameters and
weights were checked by ``serving.model.layer_types``; formulas are those of HugeCTR's layer documentation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from array_api_compat import array_namespace

from serving.dense.primitives import Array, linear, relu, sigmoid

Params: TypeAlias = Mapping[str, Any]
Arrays: TypeAlias = Sequence[Array]
LayerWeights: TypeAlias = Mapping[str, Array]
LayerFunction: TypeAlias = Callable[[Params, Arrays, LayerWeights], Arrays]


def _inner_product(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    return [linear(bottoms[0], weights["weight"], weights["bias"])]


def _multi_cross(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    if params["projection_dim"]:
        return [_cross_matrices(bottoms[0], params["num_layers"], weights)]
    return [_cross_vectors(bottoms[0], params["num_layers"], weights)]


def _cross_vectors(x0: Array, depth: int, weights: LayerWeights) -> Array:
    """DCN's cross network: ``x[l+1] = x0 * (x[l] . w[l]) + x[l] + b[l]``.

    Every x[l] is ``a * x0 + c`` with one number a per sample and a constant vector c, the sum of the biases so far.
    So one product of x0 with all w is enough, and the loop is over [B, 1] instead of [B, I].
    """
    xp = array_namespace(weights["bias0"])
    w = xp.stack([weights[f"weight{level}"] for level in range(depth)], axis=1)
    gains = linear(x0, w, xp.ones_like(w[0, :]))  # [B, depth]: 1 + x0 . w[l]
    a, c = gains[:, :1], weights["bias0"]
    for level in range(1, depth):
        a = a * gains[:, level : level + 1] + xp.sum(c * w[:, level])
        c = c + weights[f"bias{level}"]
    return x0 * a + c


def _cross_matrices(x0: Array, depth: int, weights: LayerWeights) -> Array:
    """DCN v2's cross network of low rank: ``x[l+1] = x0 * (x[l] U[l] V[l] + b[l]) + x[l]``."""
    x = x0
    for level in range(depth):
        projected = linear(x, weights[f"u{level}"])
        x = x0 * linear(projected, weights[f"v{level}"], weights[f"bias{level}"]) + x
    return x


def _relu(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    return [relu(bottoms[0])]


def _sigmoid(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    return [sigmoid(bottoms[0])]


def _dropout(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    """The identity: dropping is training's business, which overrides this function."""
    return bottoms


def _concat(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    return [array_namespace(*bottoms).concat(list(bottoms), axis=params["axis"])]


def _slice(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    x = bottoms[0]
    whole = (0, x.shape[-1])
    return [x if bounds == whole else x[..., slice(*bounds)] for bounds in params["ranges"]]


def _reshape(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    x = bottoms[0]
    sizes = (params["time_step"], params["leading_dim"]) if params["time_step"] else (params["leading_dim"],)
    return [array_namespace(x).reshape(x, (-1, *sizes))]


def _add(params: Params, bottoms: Arrays, weights: LayerWeights) -> Arrays:
    total = bottoms[0]
    for term in bottoms[1:]:
        total = total + term
    return [total]


LAYERS: Mapping[str, LayerFunction] = {
    "Add": _add,
    "Concat": _concat,
    "Dropout": _dropout,
    "InnerProduct": _inner_product,
    "MultiCross": _multi_cross,
    "ReLU": _relu,
    "Reshape": _reshape,
    "Sigmoid": _sigmoid,
    "Slice": _slice,
}
