"""Layers that multiply tensors by weights or by other tensors."""

from collections.abc import Mapping

from array_api_compat import array_namespace

from serving.dense.layers.signature import Arrays, LayerFunction, LayerWeights, OwnArithmetic, Params
from serving.dense.primitives import Array, below_diagonal, concat, linear, matmul, relu


def _inner_product(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    return [linear(bottoms[0], weights["weight"], weights["bias"], arithmetic)]


def _fused_inner_product(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """InnerProduct and ReLU; other bottoms and tops are for a backward pass, and each top repeats the first."""
    product = linear(bottoms[0], weights["weight"], weights["bias"], arithmetic)
    top = relu(product) if params["activation"] == "Relu" else product
    return [top] * params["tops"]


def _mlp(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """A chain of InnerProducts; other bottoms and tops are for a backward pass, and each top repeats the first."""
    x = bottoms[0]
    for level, (activation, has_bias) in enumerate(zip(params["activations"], params["biases"], strict=True)):
        x = linear(x, weights[f"weight{level}"], weights[f"bias{level}"] if has_bias else None, arithmetic)
        if activation == "Relu":
            x = relu(x)
    return [x] * params["tops"]


def _multi_cross(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    if params["projection_dim"]:
        return [_cross_matrices(bottoms[0], params["num_layers"], weights, arithmetic)]
    return [_cross_vectors(bottoms[0], params["num_layers"], weights, arithmetic)]


def _cross_vectors(x0: Array, depth: int, weights: LayerWeights, arithmetic: OwnArithmetic) -> Array:
    """DCN's cross network: ``x[l+1] = x0 * (x[l] . w[l]) + x[l] + b[l]``.

    Every x[l] is ``a * x0 + c``. Here a is one number per sample, and c is a constant vector, the sum of the biases so
    far. So one product of x0 with all w is enough, and the loop runs on [B, 1] instead of [B, I].
    """
    xp = array_namespace(weights["bias0"])
    w = concat([xp.reshape(weights[f"weight{level}"], (-1, 1)) for level in range(depth)], 1, arithmetic)
    gains = linear(x0, w, xp.ones_like(w[0, :]), arithmetic)  # [B, depth]: 1 + x0 . w[l]
    a, c = gains[:, :1], weights["bias0"]
    for level in range(1, depth):
        a = a * gains[:, level : level + 1] + xp.sum(c * w[:, level])
        c = c + weights[f"bias{level}"]
    return x0 * a + c


def _cross_matrices(x0: Array, depth: int, weights: LayerWeights, arithmetic: OwnArithmetic) -> Array:
    """DCN v2's low-rank cross network: ``x[l+1] = x0 * (x[l] U[l] V[l] + b[l]) + x[l]``."""
    x = x0
    for level in range(depth):
        projected = linear(x, weights[f"u{level}"], arithmetic=arithmetic)
        x = x0 * linear(projected, weights[f"v{level}"], weights[f"bias{level}"], arithmetic) + x
    return x


def _weight_multiply(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Multiply each number of a row by its column's vector: ``top[s * D + d] = x[s] * w[s, d]``."""
    xp = array_namespace(bottoms[0])
    slots, width = params["weight_dims"]
    return [xp.reshape(xp.reshape(bottoms[0], (-1, slots, 1)) * weights["weight"], (-1, slots * width))]


def _interaction(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """DLRM's interaction: the vector, the dot products of all pairs of vector and embeddings by rows, and one 0."""
    vector, embedding = bottoms
    xp = array_namespace(vector)
    z = concat([xp.reshape(vector, (-1, 1, vector.shape[1])), embedding], 1, arithmetic)  # [B, S + 1, D]
    pairs = below_diagonal(matmul(z, xp.permute_dims(z, (0, 2, 1)), arithmetic), arithmetic)
    return [concat([vector, pairs, xp.zeros_like(pairs[:, :1])], 1, arithmetic)] * params["tops"]


def _fm_order2(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    """Return half of ``(sum of the vectors)**2 - sum of the vectors**2``, the sum of the products of all slot pairs.

    The sign and the factor one half are as in HugeCTR's fm_order2_layer.cu.
    """
    x, width = bottoms[0], params["out_dim"]
    xp = array_namespace(x)
    vectors = xp.reshape(x, (-1, x.shape[1] // width, width))
    total = xp.sum(vectors, axis=1)
    return [0.5 * (total * total - xp.sum(vectors * vectors, axis=1))]


def _matrix_multiply(params: Params, bottoms: Arrays, weights: LayerWeights, arithmetic: OwnArithmetic) -> Arrays:
    left, right = bottoms
    if len(left.shape) == len(right.shape):
        return [matmul(left, right, arithmetic)]
    xp = array_namespace(left)
    n, *sizes = right.shape  # [m, n] x [n, g, h] is [m, g, h]
    return [xp.reshape(matmul(left, xp.reshape(right, (n, -1)), arithmetic), (-1, *sizes))]


TABLE: Mapping[str, LayerFunction] = {
    "FmOrder2": _fm_order2,
    "FusedInnerProduct": _fused_inner_product,
    "InnerProduct": _inner_product,
    "Interaction": _interaction,
    "MLP": _mlp,
    "MatrixMultiply": _matrix_multiply,
    "MultiCross": _multi_cross,
    "Multiply": _weight_multiply,
    "WeightMultiply": _weight_multiply,
}
