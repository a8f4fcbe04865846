"""Layers that join, slice, select and reshape tensors, and layers that reduce a dimension."""

from collections.abc import Mapping

import numpy as np
from array_api_compat import array_namespace

from serving.dense.layers.signature import Arrays, LayerFunction, LayerWeights, OwnArithmetic, Params
from serving.dense.primitives import concat, take


def _concat(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [concat(bottoms, params["axis"], arithmetic)]


def _slice(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    x = bottoms[0]
    whole = (0, x.shape[-1])
    return [x if bounds == whole else x[..., slice(*bounds)] for bounds in params["ranges"]]


def _reshape(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    x = bottoms[0]
    if "selected" in params:
        x, sizes = take(x, params["selected"], 1, arithmetic), (len(params["selected"]) * x.shape[2],)
    else:
        sizes = params["sizes"]
    return [array_namespace(x).reshape(x, (-1, *sizes))]


def _select(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [take(bottoms[0], params["index"], params["dim"], arithmetic)]


def _gather(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [take(bottoms[0], params["indices"], 0, arithmetic)]


def _scale(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Repeat each number of a row (axis 0) or each row (axis 1) ``factor`` times, with the copies side by side.

    The axes look swapped, but HugeCTR's scale_layer.cu does the same.
    """
    x, factor = bottoms[0], params["factor"]
    columns = np.arange(x.shape[1])
    if params["axis"] == 0:
        return [take(x, np.repeat(columns, factor), 1, arithmetic)]
    return [array_namespace(x).reshape(take(x, np.tile(columns, factor), 1, arithmetic), (-1, x.shape[1]))]


def _fused_reshape_concat(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Join the bottoms side by side; return all slots except the last as rows, and the last slot."""
    joined = concat(bottoms, 2, arithmetic)
    return [array_namespace(joined).reshape(joined[:, :-1, :], (-1, joined.shape[2])), joined[:, -1, :]]


def _fused_reshape_concat_general(
    params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic
) -> Arrays:
    """Join the bottoms side by side; return every slot as a row."""
    joined = concat(bottoms, 2, arithmetic)
    return [array_namespace(joined).reshape(joined, (-1, joined.shape[2]))]


def _reduce_sum(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    x = bottoms[0]
    return [array_namespace(x).sum(x, axis=params["axis"], keepdims=True)]


def _reduce_mean(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    x = bottoms[0]
    return [array_namespace(x).mean(x, axis=params["axis"], keepdims=True)]


TABLE: Mapping[str, LayerFunction] = {
    "Concat": _concat,
    "FusedReshapeConcat": _fused_reshape_concat,
    "FusedReshapeConcatGeneral": _fused_reshape_concat_general,
    "Gather": _gather,
    "ReduceMean": _reduce_mean,
    "ReduceSum": _reduce_sum,
    "Reshape": _reshape,
    "Scale": _scale,
    "Select": _select,
    "Slice": _slice,
}
