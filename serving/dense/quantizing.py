"""Turns float32 products of an ONNX model into products of 8-bit integers. Importing it needs the extra onnx.

The quantization is dynamic: at run time the left side is rounded to 256 steps, with one scale that comes from the
largest value of the batch. Dense features of up to 8 next to embeddings of 0.05 would leave the embeddings two steps.
So columns are balanced by x @ w = (x / s) @ (s * w). This is exact in real numbers, and nearly exact in integers if the
columns of x / s have about the same size. The scales s are SmoothQuant's (Xiao et al. 2022,
https://arxiv.org/abs/2211.10438).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from serving.dense.calibration import SMALLEST_RATIO
from serving.dense.onnx_file import serialized
from serving.dense.runtime import import_runtime, open_session

Array = NDArray[Any]
Floats = NDArray[np.float32]

LEAST_OPSET = 11  # has DynamicQuantizeLinear, the newest operator used here

# How much of the difference between columns moves to the weights. Among 0.65, 0.8 and 0.9 this value has the smallest
# mean error on held-out samples for most of the graphs that come with hotrow train.
_MIGRATION = 0.65


class Product(NamedTuple):
    """One product with a weight: the node called ``name`` makes ``top`` = ``x`` @ ``weight`` + ``bias``.

    ``weight`` is float32[I, O]; ``bias`` is a tensor's name, empty without a bias.
    """

    top: str
    x: str
    weight: Floats
    bias: str


def fold_constants(model: bytes | Path) -> Any:
    """Compute everything that depends on constants alone, so all weights are initializers; return the new model.

    A model that exceeds 2 GiB with the weights from files next to it is a ValueError.
    """
    runtime = import_runtime()
    if isinstance(model, Path):
        model = serialized(onnx.load(model))
    with TemporaryDirectory() as folder:
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder, "folded.onnx"))
        options.log_severity_level = 4
        runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def opset(model: Any) -> int:
    """Return the version of ONNX's operators that a model uses."""
    return max((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=0)


def count_products(model: Any) -> int:
    """Return how many matrix products a model has, with or without a weight."""
    return sum(node.op_type in ("MatMul", "Gemm") for node in model.graph.node)


def weight_products(model: Any) -> list[Product]:
    """Return the products with a weight, in the order of a model whose constants are folded."""
    weights = {initializer.name: initializer for initializer in model.graph.initializer}
    return [product for node in model.graph.node if (product := _product(node, weights))]


def column_scales(model: Any, products: Sequence[Product], feeds: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the divisors of each left side's columns, float32[I] by its name; ``feeds`` is the calibration batch."""
    values = _values(model, {product.x for product in products}, feeds)
    return {
        x: _scales(value, [product.weight for product in products if product.x == x]) for x, value in values.items()
    }


def quantize(model: Any, products: Iterable[Product], scales: Mapping[str, Floats]) -> bytes:
    """Return the model with the given products on 8-bit integers.

    The left side is unsigned and weights are signed, because ONNX Runtime then takes half the time of unsigned weights.
    Weights have one scale per column, which costs 2 % of the time and keeps the error of 7-bit weights near that of
    8-bit weights. Each product becomes the five nodes that ONNX Runtime fuses.
    """
    by_top = {product.top: product for product in products}
    largest = 63 if products_saturate() else 127
    result, is_divided = onnx.ModelProto(), set()
    result.CopyFrom(model)
    result.graph.ClearField("node")
    for node in model.graph.node:
        product = by_top.get(node.output[0])
        if product is None:
            result.graph.node.append(node)
            continue
        if product.x not in is_divided:
            is_divided.add(product.x)
            _append_left_side(result, product.x, scales[product.x])
        _append_product(result, product, product.weight * scales[product.x][:, None], largest)
    content: bytes = result.SerializeToString()
    return content


@cache
def products_saturate() -> bool:
    """Whether this machine clips sums of two 8-bit products to 16 bits.

    x86 without VNNI does. Weights of 7 bits then keep the sums within 16 bits.
    """
    rows, columns = np.full((4, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    types = {"x": onnx.TensorProto.UINT8, "y": onnx.TensorProto.INT32}
    x, y = (helper.make_tensor_value_info(name, kind, None) for name, kind in types.items())
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "probe", [x], [y], [numpy_helper.from_array(columns, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (sums,) = open_session(model.SerializeToString(), 1, "a product of integers").run(None, {"x": rows})
    return bool((sums != 64 * 255 * 127).any())


def _product(node: Any, weights: Mapping[str, Any]) -> Product | None:
    """Return the product that ``node`` computes, or None if it is not a product with a weight."""
    if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights or node.input[0] in weights:
        return None
    weight = numpy_helper.to_array(weights[node.input[1]])
    options = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    is_plain = not options.get("transA") and options.get("alpha", 1) == options.get("beta", 1) == 1
    if weight.ndim != 2 or weight.dtype != np.float32 or not weight.size or not is_plain:
        return None
    if options.get("transB"):
        weight = weight.T
    return Product(node.output[0], node.input[0], weight, node.input[2] if len(node.input) > 2 else "")


def _values(model: Any, tensors: set[str], feeds: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the values of a model's tensors on the calibration batch."""
    values = {name: feeds[name] for name in tensors & feeds.keys()}
    names = sorted(tensors - feeds.keys())
    if names:
        watched = onnx.ModelProto()
        watched.CopyFrom(model)
        watched.graph.ClearField("output")
        watched.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
        answers = open_session(watched.SerializeToString(), 1, "the folded model").run(names, dict(feeds))
        values |= dict(zip(names, answers, strict=True))
    return values


def _scales(x: Floats, weights: Sequence[Floats]) -> Floats:
    """Return the divisors of the columns of ``x``, float32[..., I]; their geometric mean is 1."""
    if not all(np.isfinite(array).all() for array in (x, *weights)):
        return np.ones(x.shape[-1], np.float32)  # no scale helps, and the error will be NaN
    of_x = _sizes(np.abs(x.reshape(-1, x.shape[-1])).max(axis=0))
    of_weights = _sizes(np.abs(np.concatenate(weights, axis=1)).max(axis=1))
    logarithms = _MIGRATION * np.log(of_x) - (1 - _MIGRATION) * np.log(of_weights)
    scales: Floats = np.exp(logarithms - logarithms.mean()).astype(np.float32)
    return scales


def _sizes(largest: Floats) -> NDArray[np.float64]:
    """Return the sizes of columns, with small columns raised towards the largest."""
    sizes = largest.astype(np.float64)
    return np.maximum(sizes, max(SMALLEST_RATIO * sizes.max(), np.finfo(np.float32).tiny))


def _append_left_side(model: Any, x: str, scales: Floats) -> None:
    """Append the nodes that balance ``x`` and round it to 256 steps."""
    balanced, (of_x, scale, zero) = f"{x}/balanced", _names_of_left_side(x)
    inverse = _add_constant(model, f"{x}/inverse_scales", np.reciprocal(scales))
    model.graph.node.append(helper.make_node("Mul", [x, inverse], [balanced]))
    model.graph.node.append(helper.make_node("DynamicQuantizeLinear", [balanced], [of_x, scale, zero]))


def _append_product(model: Any, product: Product, weight: Floats, largest: int) -> None:
    """Append the nodes that multiply integers and return to floats; ``largest`` bounds the weight's integers."""
    steps = np.maximum(np.abs(weight).max(axis=0) / largest, np.finfo(np.float32).tiny).astype(np.float32)
    integers = np.nan_to_num(np.rint(weight / steps)).clip(-largest, largest).astype(np.int8)
    top, (of_x, scale, zero) = product.top, _names_of_left_side(product.x)
    of_weight = _add_constant(model, f"{top}/weight", integers)
    zeros = _add_constant(model, f"{top}/weight_zeros", np.zeros(steps.shape, np.int8))
    of_steps = _add_constant(model, f"{top}/weight_scales", steps)
    last = f"{top}/product" if product.bias else top
    nodes = [
        helper.make_node("MatMulInteger", [of_x, of_weight, zero, zeros], [f"{top}/sums"]),
        helper.make_node("Cast", [f"{top}/sums"], [f"{top}/floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", [scale, of_steps], [f"{top}/scales"]),
        helper.make_node("Mul", [f"{top}/floats", f"{top}/scales"], [last]),
    ]
    if product.bias:
        nodes.append(helper.make_node("Add", [last, product.bias], [top]))
    model.graph.node.extend(nodes)


def _names_of_left_side(x: str) -> tuple[str, str, str]:
    return f"{x}/integers", f"{x}/scale", f"{x}/zero"


def _add_constant(model: Any, name: str, values: Array) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
    return name
