"""Layers that centre and scale by a mean and a variance."""

from collections.abc import Mapping

from array_api_compat import array_namespace

from serving.dense.layers.signature import Arrays, LayerFunction, LayerWeights, OwnArithmetic, Params
from serving.dense.primitives import Array, sigmoid


def _batch_norm(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Mean and variance are those that training kept; training itself overrides this function.

    They are used as they stand in the file, as by the cuDNN call of HugeCTR's batch_norm_layer.cu: whether the variance
    is of the sample or of the population is training's choice (cuDNN's running variance is of the sample).
    """
    xp = array_namespace(weights["var"])
    scale = weights["gamma"] / xp.sqrt(weights["var"] + params["eps"])
    return [(bottoms[0] - weights["mean"]) * scale + weights["beta"]]


def _layer_norm(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Over the last dimension, by the variance of the population: HugeCTR's layer_norm_layer.cu."""
    return [_standardize(bottoms[0], -1, params["eps"]) * weights["gamma"] + weights["beta"]]


def _prelu_dice(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """DIN's Dice: x or ``alpha * x``, mixed by how far x lies above the mean of its column in this batch.

    Also in a prediction the batch's own mean and variance, of the population: HugeCTR's prelu_dice_layer.cu.
    """
    x, alpha = bottoms[0], params["alpha"]
    gate = sigmoid(_standardize(x, 0, params["eps"]), arithmetic)
    return [x * (alpha + (1 - alpha) * gate)]


def _standardize(x: Array, axis: int, epsilon: float) -> Array:
    """Return x less its mean along ``axis``, over the root of its variance (of the population) and ``epsilon``."""
    xp = array_namespace(x)
    centred = x - xp.mean(x, axis=axis, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=axis, keepdims=True) + epsilon)


TABLE: Mapping[str, LayerFunction] = {
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    "PReLU_Dice": _prelu_dice,
}
