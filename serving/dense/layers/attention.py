"""Softmax, masks and attention; F queries attend to T keys in H heads of D columns each."""

import math
from collections.abc import Mapping

import numpy as np
from array_api_compat import array_namespace

from serving.dense.layers.signature import Arrays, LayerFunction, LayerWeights, OwnArithmetic, Params
from serving.dense.primitives import Array, constant, matmul, row_max

_MASKED = 10000.0  # HugeCTR subtracts this from the score of a masked key


def _softmax(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [_probabilities(*bottoms)]


def _probabilities(scores: Array, mask: Array | None = None) -> Array:
    """Return the softmax over the last dimension; values where ``mask`` is 0 become almost 0."""
    xp = array_namespace(scores)
    if mask is not None:
        scores = scores - (1 - mask) * _MASKED
    powers = xp.exp(scores - row_max(scores))
    return powers / xp.sum(powers, axis=-1, keepdims=True)


def _sequence_mask(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Return ``[B, 1, F, T]``: 1 if both positions are inside their sequences, otherwise 0; F is 1 for one bottom.

    A length is truncated to an integer, as in HugeCTR's sequence_mask_layer.cu.
    """
    queries, keys = params["sizes"]
    inside = _inside(bottoms[-1], (1, 1, 1, keys), arithmetic)
    if len(bottoms) == 2:
        inside = inside & _inside(bottoms[0], (1, 1, queries, 1), arithmetic)
    return [array_namespace(bottoms[0]).astype(inside, bottoms[0].dtype)]


def _inside(lengths: Array, shape: tuple[int, ...], arithmetic: OwnArithmetic) -> Array:
    """Return which positions are inside: position i is inside if i < length, truncated to an integer."""
    ends = constant(np.arange(1, math.prod(shape) + 1).reshape(shape), lengths, arithmetic)
    return ends <= array_namespace(lengths).reshape(lengths, (-1, 1, 1, 1))


def _multi_head_attention(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Return ``softmax(Q K / sqrt(D) - 10000 (1 - mask)) V``, or a part of it if the graph has separate layers.

    The parts are those of HugeCTR's multi_head_attention_layer.cu before it had a mask. D is the width of one head.
    """
    if params["form"] == "scores":
        return [_scores(bottoms[0], bottoms[1], arithmetic)]
    if params["form"] == "values":
        return [_merge_heads(matmul(bottoms[0], bottoms[1], arithmetic))]
    q, k, v = (_split_heads(x, params["num_attention_heads"]) for x in bottoms[:3])
    scores = _scores(q, k, arithmetic)
    if params["form"] == "scores_and_values":
        return [scores, v]
    return [_merge_heads(matmul(_probabilities(scores, *bottoms[3:]), v, arithmetic))]


def _scores(q: Array, k: Array, arithmetic: OwnArithmetic) -> Array:
    """Return ``Q K / sqrt(D)``: ``[B, H, F, T]``."""
    return matmul(q, array_namespace(k).permute_dims(k, (0, 1, 3, 2)), arithmetic) * (1 / math.sqrt(q.shape[-1]))


def _split_heads(x: Array, heads: int) -> Array:
    """Return ``[B, T, H * D]`` as ``[B, H, T, D]``."""
    xp = array_namespace(x)
    places, width = x.shape[1:]
    return xp.permute_dims(xp.reshape(x, (-1, places, heads, width // heads)), (0, 2, 1, 3))


def _merge_heads(x: Array) -> Array:
    """Return ``[B, H, T, D]`` as ``[B, T, H * D]``."""
    xp = array_namespace(x)
    heads, places, width = x.shape[1:]
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (-1, places, heads * width))


TABLE: Mapping[str, LayerFunction] = {
    "MultiHeadAttention": _multi_head_attention,
    "SequenceMask": _sequence_mask,
    "Softmax": _softmax,
}
