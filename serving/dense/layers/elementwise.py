"""Layers that compute each element on its own and keep the tensor's shape."""

from collections.abc import Mapping

import numpy as np
from array_api_compat import array_namespace

from serving.dense.layers.signature import Arrays, LayerFunction, LayerWeights, OwnArithmetic, Params
from serving.dense.primitives import constant, relu, sigmoid


def _relu(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [relu(bottoms[0])]


def _sigmoid(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [sigmoid(bottoms[0], arithmetic)]


def _elu(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    x = bottoms[0]
    xp = array_namespace(x)
    # -relu(-x) is x for negative x; for positive x it is 0, so exp cannot overflow.
    return [xp.where(x < 0, params["alpha"] * xp.expm1(-relu(-x)), x)]


def _dropout(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Return the input unchanged; training overrides this function."""
    return bottoms


def _cast(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Return the input unchanged: the layer casts to or from float16, and everything here is float32."""
    return bottoms


def _denormalize(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    x = bottoms[0]
    std, mean = (constant(np.asarray(params[name]), x, arithmetic) for name in ("std", "mean"))
    return [x * std + mean]


def _add(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    total = bottoms[0]
    for term in bottoms[1:]:
        total = total + term
    return [total]


def _sub(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [bottoms[0] - bottoms[1]]


def _elementwise_multiply(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    product = bottoms[0]
    for factor in bottoms[1:]:
        product = product * factor
    return [product]


TABLE: Mapping[str, LayerFunction] = {
    "Add": _add,
    "Cast": _cast,
    "Denormalize": _denormalize,
    "DotProduct": _elementwise_multiply,  # HugeCTR's DotProduct does not sum, despite its name
    "Dropout": _dropout,
    "ELU": _elu,
    "ElementwiseMultiply": _elementwise_multiply,
    "ReLU": _relu,
    "Sigmoid": _sigmoid,
    "Sub": _sub,
}
