"""Elementwise layers on every array library, against PyTorch in float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.dense.layers.elementwise as layers
import serving.model.layer_types.elementwise as layer_types
from serving.dense.primitives import relu

torch = pytest.importorskip("torch")


def some(draw, count=1):
    """Draw tensors of the same shape, with two or three dimensions."""
    shape = (draw.samples, *(draw.size() for _ in range(draw.size(2))))
    return [2 * draw.array(*shape) for _ in range(count)]


def add(draw):
    bottoms = some(draw, draw.size(4, least=2))
    return {"type": "Add", "members": {}, "bottoms": bottoms, "oracle": lambda b, w: [torch.stack(b).sum(dim=0)]}


def cast(draw):
    return {"type": "Cast", "members": {}, "bottoms": some(draw), "oracle": lambda b, w: b}


def denormalize(draw):
    (bottom,) = some(draw)
    mean, std = ([draw.choice([low, 0.25, 3.0]) for _ in range(bottom.shape[-1])] for low in (-5.0, 0.5))
    return {
        "type": "Denormalize", "members": {"mean": mean, "std": std}, "bottoms": [bottom],
        "oracle": lambda b, w: [b[0] * b[0].new_tensor(std) + b[0].new_tensor(mean)],
    }  # fmt: skip


def dropout(draw):
    return {"type": "Dropout", "members": {"rate": 0.5}, "bottoms": some(draw), "oracle": lambda b, w: b}


def elementwise_multiply(draw):
    bottoms = some(draw, draw.size(4, least=2))
    return {
        "type": "ElementwiseMultiply", "members": {}, "bottoms": bottoms,
        "oracle": lambda b, w: [torch.stack(b).prod(dim=0)],
    }  # fmt: skip


def dot_product(draw):
    return {**elementwise_multiply(draw), "type": "DotProduct"}


def elu(draw):
    alpha = draw.choice([0.5, 1.0, 2])
    return {
        "type": "ELU", "members": {"elu_param": {"alpha": alpha}}, "bottoms": some(draw),
        "oracle": lambda b, w: [torch.nn.functional.elu(b[0], alpha)],
    }  # fmt: skip


def relu_layer(draw):
    return {"type": "ReLU", "members": {}, "bottoms": some(draw), "oracle": lambda b, w: [torch.relu(b[0])]}


def sigmoid_layer(draw):
    return {"type": "Sigmoid", "members": {}, "bottoms": some(draw), "oracle": lambda b, w: [torch.sigmoid(b[0])]}


def sub(draw):
    return {"type": "Sub", "members": {}, "bottoms": some(draw, 2), "oracle": lambda b, w: [torch.sub(*b)]}


FAMILIES = [add, cast, denormalize, dot_product, dropout, elementwise_multiply, elu, relu_layer, sigmoid_layer, sub]


family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@family
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_elementwise_layers_on_numpy_agree_with_pytorch(family, draw_layer, check_numpy, data):
    check_numpy(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_elementwise_layers_on_a_device_compute_the_same(family, draw_layer, check_device, data):
    check_device(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_elementwise_layers_on_torch_compute_the_same_with_correct_gradients(family, draw_layer, check_torch, data):
    check_torch(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_traced_elementwise_layers_compute_the_same_for_any_batch_size(family, draw_layer, check_traced, data):
    check_traced(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_elementwise_layers_report_whether_they_mix_samples(family, draw_layer, check_mixing, data):
    check_mixing(draw_layer(family, data))


def test_every_layer_of_the_table_is_read_computed_and_tested(smallest_draw):
    smallest = [family(smallest_draw) for family in FAMILIES]

    assert layers.TABLE.keys() == layer_types.TABLE.keys() == {case["type"] for case in smallest}


def test_the_gradient_of_relu_at_zero_is_zero():
    x = torch.zeros(3, requires_grad=True)

    relu(x).sum().backward()

    assert x.grad.tolist() == [0, 0, 0]
