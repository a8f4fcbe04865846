"""Layers that subtract a mean and divide by a standard deviation."""

from collections.abc import Mapping

from array_api_compat import array_namespace

from serving.dense.layers.signature import Arrays, LayerFunction, LayerWeights, OwnArithmetic, Params
from serving.dense.primitives import Array, sigmoid


def _batch_norm(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Normalize with the running mean and variance of training; training itself overrides this function.

    Both are used as stored, as in the cuDNN call of HugeCTR's batch_norm_layer.cu. Training decides whether the
    variance is the sample's or the population's (cuDNN's running variance is the sample's).
    """
    xp = array_namespace(weights["var"])
    scale = weights["gamma"] / xp.sqrt(weights["var"] + params["eps"])
    return [(bottoms[0] - weights["mean"]) * scale + weights["beta"]]


def _layer_norm(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Normalize over the last dimension with the population variance, as HugeCTR's layer_norm_layer.cu does."""
    return [_standardize(bottoms[0], -1, params["eps"]) * weights["gamma"] + weights["beta"]]


def _prelu_dice(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """DIN's Dice: a mix of x and ``alpha * x``, weighted by how far x is above its column's mean in this batch.

    A prediction uses the batch's own mean and population variance too, as HugeCTR's prelu_dice_layer.cu does.
    """
    x, alpha = bottoms[0], params["alpha"]
    gate = sigmoid(_standardize(x, 0, params["eps"]), arithmetic)
    return [x * (alpha + (1 - alpha) * gate)]


def _standardize(x: Array, axis: int, epsilon: float) -> Array:
    """Return ``(x - mean) / sqrt(variance + epsilon)`` along ``axis``, with the population variance."""
    xp = array_namespace(x)
    centered = x - xp.mean(x, axis=axis, keepdims=True)
    return centered / xp.sqrt(xp.mean(centered * centered, axis=axis, keepdims=True) + epsilon)


TABLE: Mapping[str, LayerFunction] = {
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    "PReLU_Dice": _prelu_dice,
}
