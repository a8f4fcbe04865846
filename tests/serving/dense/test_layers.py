"""Every layer on every array library, against PyTorch's own operators in float64."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.dense.layers import LAYERS
from serving.dense.primitives import linear, relu, sigmoid
from serving.model.layer_types import LAYER_TYPES

torch = pytest.importorskip("torch")


@dataclass
class Case:
    """One layer with its parameters, its bottoms and weights (float64), and what PyTorch makes of them."""

    type: str
    params: dict
    bottoms: list
    oracle: object
    weights: dict = field(default_factory=dict)

    def expected(self):
        tops = self.oracle(
            [torch.tensor(b) for b in self.bottoms], {k: torch.tensor(w) for k, w in self.weights.items()}
        )
        return [top.numpy() for top in tops]


class _Draw:
    """Sizes that Hypothesis chooses, filled with normal values."""

    def __init__(self, draw):
        self._draw = draw
        self._rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def size(self, most=6):
        return self._draw(st.integers(1, most))

    def bool(self):
        return self._draw(st.booleans())

    def array(self, *shape):
        return self._rng.standard_normal(shape)


def inner_product(draw):
    x = draw.array(draw.size(), draw.size(), draw.size()) if draw.bool() else draw.array(draw.size(), draw.size())
    outputs = draw.size()
    weights = {"weight": draw.array(x.shape[-1], outputs), "bias": draw.array(outputs)}
    return Case(
        "InnerProduct",
        {"num_output": outputs},
        [x],
        lambda b, w: [torch.nn.functional.linear(b[0], w["weight"].T, w["bias"])],
        weights,
    )


def multi_cross_vectors(draw):
    depth, columns = draw.size(4), draw.size()
    weights = {f"{name}{i}": draw.array(columns) for i in range(depth) for name in ("weight", "bias")}

    def oracle(bottoms, w):
        x = x0 = bottoms[0]
        for i in range(depth):
            x = x0 * torch.mv(x, w[f"weight{i}"])[:, None] + x + w[f"bias{i}"]
        return [x]

    params = {"num_layers": depth, "projection_dim": 0}
    return Case("MultiCross", params, [draw.array(draw.size(), columns)], oracle, weights)


def multi_cross_matrices(draw):
    depth, columns, rank = draw.size(3), draw.size(), draw.size()
    weights = {}
    for i in range(depth):
        weights |= {
            f"u{i}": 0.3 * draw.array(columns, rank),
            f"v{i}": 0.3 * draw.array(rank, columns),
            f"bias{i}": draw.array(columns),
        }

    def oracle(bottoms, w):
        x = x0 = bottoms[0]
        for i in range(depth):
            x = torch.addcmul(x, x0, torch.linalg.multi_dot([x, w[f"u{i}"], w[f"v{i}"]]) + w[f"bias{i}"])
        return [x]

    params = {"num_layers": depth, "projection_dim": rank}
    return Case("MultiCross", params, [draw.array(draw.size(), columns)], oracle, weights)


def relu_layer(draw):
    return Case("ReLU", {}, [draw.array(draw.size(), draw.size())], lambda b, w: [torch.relu(b[0])])


def sigmoid_layer(draw):
    return Case("Sigmoid", {}, [5 * draw.array(draw.size(), draw.size())], lambda b, w: [torch.sigmoid(b[0])])


def dropout(draw):
    return Case("Dropout", {"rate": 0.5}, [draw.array(draw.size(), draw.size())], lambda b, w: [b[0]])


def concat(draw):
    samples, middle, axis = draw.size(), draw.size(), 1 + draw.bool()
    shapes = [
        (samples, draw.size(), middle) if axis == 1 else (samples, middle, draw.size()) for _ in range(1 + draw.size(2))
    ]
    bottoms = [draw.array(*shape) for shape in shapes]
    return Case("Concat", {"axis": axis}, bottoms, lambda b, w: [torch.cat(b, dim=axis)])


def slice_layer(draw):
    columns = draw.size()
    starts = [draw.size(columns) - 1 for _ in range(draw.size(3))]
    ranges = ((0, columns), *((start, start + draw.size(columns - start)) for start in starts))
    x = draw.array(draw.size(), columns)
    return Case("Slice", {"ranges": ranges}, [x], lambda b, w: [b[0].narrow(1, i, j - i) for i, j in ranges])


def reshape(draw):
    slots, dim = draw.size(), draw.size()
    x = draw.array(draw.size(), slots, dim)
    if draw.bool():
        return Case("Reshape", {"leading_dim": slots * dim, "time_step": 0}, [x], lambda b, w: [b[0].flatten(1)])
    params = {"leading_dim": slots, "time_step": dim}
    return Case("Reshape", params, [x], lambda b, w: [b[0].flatten(1).unflatten(1, (dim, slots))])


def add(draw):
    shape = (draw.size(), draw.size())
    bottoms = [draw.array(*shape) for _ in range(1 + draw.size(3))]
    return Case("Add", {}, bottoms, lambda b, w: [torch.stack(b).sum(dim=0)])


FAMILIES = [
    add, concat, dropout, inner_product, multi_cross_matrices, multi_cross_vectors, relu_layer, reshape, sigmoid_layer,
    slice_layer,
]  # fmt: skip
family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
SEEDS = st.data()


def cast(case, convert):
    return [convert(b) for b in case.bottoms], {key: convert(w) for key, w in case.weights.items()}


def test_every_layer_of_the_table_is_computed_and_tested():
    smallest = [family(_Draw(lambda strategy: 1)) for family in FAMILIES]

    assert LAYERS.keys() == LAYER_TYPES.keys() == {case.type for case in smallest}


@family
@settings(deadline=None, max_examples=40)
@given(data=SEEDS)
def test_numpy_computes_what_pytorch_computes(family, data):
    case = family(_Draw(data.draw))
    bottoms, weights = cast(case, lambda array: array.astype(np.float32))
    before = [array.copy() for array in (*bottoms, *weights.values())]

    tops = LAYERS[case.type](case.params, bottoms, weights)

    for top, expected in zip(tops, case.expected(), strict=True):
        assert top.dtype == np.float32
        # float32 of sums of at most some hundred terms of size 1 to 100
        np.testing.assert_allclose(top, expected, rtol=1e-4, atol=1e-4)
    for array, copy in zip((*bottoms, *weights.values()), before, strict=True):
        assert np.array_equal(array, copy)


@family
@settings(deadline=None, max_examples=15)
@given(data=SEEDS)
def test_torch_tensors_give_the_same_and_their_gradients_are_right(family, data):
    case = family(_Draw(data.draw))
    bottoms, weights = cast(case, lambda array: torch.tensor(array, requires_grad=True))

    def run(*tensors):
        own = dict(zip(weights, tensors[len(bottoms) :], strict=True))
        return tuple(LAYERS[case.type](case.params, list(tensors[: len(bottoms)]), own))

    for top, expected in zip(run(*bottoms, *weights.values()), case.expected(), strict=True):
        np.testing.assert_allclose(top.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(run, (*bottoms, *weights.values()))


@family
@settings(deadline=None, max_examples=8)
@given(data=SEEDS)
def test_a_traced_layer_gives_the_same_for_any_number_of_samples(family, data):
    ndonnx = pytest.importorskip("ndonnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    case = family(_Draw(data.draw))
    bottoms, weights = cast(case, lambda array: array.astype(np.float32))
    inputs = {f"x{i}": ndonnx.argument(shape=("B", *b.shape[1:]), dtype=ndonnx.float32) for i, b in enumerate(bottoms)}

    tops = LAYERS[case.type](case.params, list(inputs.values()), weights)
    model = ndonnx.build(inputs, {f"y{i}": top for i, top in enumerate(tops)})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    got = session.run(None, dict(zip(inputs, bottoms, strict=True)))

    assert not {"If", "MatMul"} & {node.op_type for node in model.graph.node}
    for top, expected in zip(got, case.expected(), strict=True):
        np.testing.assert_allclose(top, expected, rtol=1e-4, atol=1e-4)


def test_the_cross_layer_gives_the_documented_numbers():
    params = {"num_layers": 2, "projection_dim": 0}
    w, b = np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.0, -0.5])
    x = np.array([[1.0, 2.0, 3.0]])

    first = LAYERS["MultiCross"]({**params, "num_layers": 1}, [x], {"weight0": w, "bias0": b})[0]
    second = LAYERS["MultiCross"](params, [x], {"weight0": w, "bias0": b, "weight1": w, "bias1": b})[0]

    np.testing.assert_allclose(first, [[2.9, 4.8, 6.7]], rtol=1e-14)
    np.testing.assert_allclose(second, [[6.66, 11.32, 15.98]], rtol=1e-14)


def test_the_low_rank_cross_layer_gives_the_documented_numbers():
    weights = {
        "u0": np.array([[1.0], [0.0], [2.0]]),
        "v0": np.array([[0.5, 1.0, -1.0]]),
        "bias0": np.array([0.5, 0.0, -0.5]),
    }

    top = LAYERS["MultiCross"]({"num_layers": 1, "projection_dim": 1}, [np.array([[1.0, 2.0, 3.0]])], weights)[0]

    assert top.tolist() == [[5.0, 16.0, -19.5]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_takes_any_number(dtype):
    x = np.array([-1e30, -1000, -88, 0, 88, 1000, 1e30], dtype)

    y = sigmoid(x)

    assert y.dtype == dtype
    np.testing.assert_allclose(y, [0, 0, 0, 0.5, 1, 1, 1], atol=1e-37)


def test_the_gradient_of_relu_at_zero_is_zero():
    x = torch.zeros(3, requires_grad=True)

    relu(x).sum().backward()

    assert x.grad.tolist() == [0, 0, 0]


def test_a_product_without_a_bias_is_the_product():
    assert linear(np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]])).tolist() == [[11.0]]


def test_an_overlapping_slice_copies_nothing_it_need_not():
    x = np.zeros((2, 3))

    whole, part = LAYERS["Slice"]({"ranges": ((0, 3), (1, 2))}, [x], {})

    assert whole is x
    assert part.shape == (2, 1)
