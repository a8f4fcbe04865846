"""Layers that multiply, on every array library, against PyTorch in float64."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.dense.layers.products as layers
import serving.model.layer_types.products as layer_types
from serving.model.records import B

torch = pytest.importorskip("torch")
F = torch.nn.functional


def rows(draw):
    """Draw a tensor with two or three dimensions."""
    return draw.array(draw.samples, *(draw.size() for _ in range(draw.size(2))))


def inner_product(draw):
    return {
        "type": "InnerProduct", "members": {"fc_param": {"num_output": draw.size()}}, "bottoms": [rows(draw)],
        "oracle": lambda b, w: [F.linear(b[0], w["weight"].T, w["bias"])],
    }  # fmt: skip


def fused_inner_product(draw):
    activation, tops = draw.choice(["Relu", "None", None]), draw.choice([1, 4])
    members = {"fc_param": {"num_output": draw.size()}, **({"activation": activation} if activation else {})}

    def oracle(b, w):
        y = F.linear(b[0], w["weight"].T, w["bias"])
        return [y if activation == "None" else torch.relu(y)] * tops

    return {"type": "FusedInnerProduct", "members": members, "bottoms": [rows(draw)], "oracle": oracle, "tops": tops}


def mlp(draw):
    outputs = [draw.size() for _ in range(draw.size(3))]
    activations = [draw.choice(["Relu", "None"]) for _ in outputs]
    biases = [draw.bool() for _ in outputs]
    if draw.bool():
        param = {"num_outputs": outputs, "activations": activations, "biases": biases}
    else:
        activations, biases = activations[:1] * len(outputs), biases[:1] * len(outputs)
        param = {"num_outputs": outputs, "num_output": 1, "activation": activations[0], "use_bias": biases[0]}

    def oracle(b, w):
        x = b[0]
        for i, (activation, bias) in enumerate(zip(activations, biases, strict=True)):
            x = F.linear(x, w[f"weight{i}"].T, w[f"bias{i}"] if bias else None)
            x = torch.relu(x) if activation == "Relu" else x
        return [x]

    return {"type": "MLP", "members": {"mlp_param": param}, "bottoms": [rows(draw)], "oracle": oracle}


def multi_cross_vectors(draw):
    depth = draw.size(4)

    def oracle(b, w):
        x = x0 = b[0]
        for i in range(depth):
            x = x0 * torch.mv(x, w[f"weight{i}"])[:, None] + x + w[f"bias{i}"]
        return [x]

    bottoms = [draw.array(draw.samples, draw.size())]
    return {"type": "MultiCross", "members": {"mc_param": {"num_layers": depth}}, "bottoms": bottoms, "oracle": oracle}


def multi_cross_matrices(draw):
    depth, rank = draw.size(3), draw.size()
    members = {"mc_param": {"num_layers": depth, "projection_dim": rank}}

    def oracle(b, w):
        x = x0 = b[0]
        for i in range(depth):
            x = torch.addcmul(x, x0, torch.linalg.multi_dot([x, w[f"u{i}"], w[f"v{i}"]]) + w[f"bias{i}"])
        return [x]

    bottoms = [draw.array(draw.samples, draw.size())]
    return {"type": "MultiCross", "members": members, "bottoms": bottoms, "oracle": oracle}


def weight_multiply(draw):
    slots, width = draw.size(), draw.size()
    return {
        "type": draw.choice(["WeightMultiply", "Multiply"]), "members": {"weight_dims": [slots, width]},
        "bottoms": [draw.array(draw.samples, slots)],
        "oracle": lambda b, w: [torch.einsum("bs,sd->bsd", b[0], w["weight"]).flatten(1)],
    }  # fmt: skip


def multiply(draw):
    return {**weight_multiply(draw), "type": "Multiply"}


def interaction(draw):
    slots, width, tops = draw.size(), draw.size(), draw.size(2)

    def oracle(b, w):
        z = torch.cat([b[0][:, None], b[1]], dim=1)
        pairs = [(z[:, j] * z[:, i]).sum(dim=1) for j in range(1, slots + 1) for i in range(j)]
        return [torch.cat([b[0], torch.stack([*pairs, torch.zeros_like(pairs[0])], dim=1)], dim=1)] * tops

    bottoms = [draw.array(draw.samples, width), draw.array(draw.samples, slots, width)]
    return {"type": "Interaction", "members": {}, "bottoms": bottoms, "oracle": oracle, "tops": tops}


def fm_order2(draw):
    slots, width = draw.size(), draw.size()

    def oracle(b, w):
        vectors = b[0].unflatten(1, (slots, width)).unbind(dim=1)
        pairs = [x * y for x, y in itertools.combinations(vectors, 2)]
        return [torch.stack([torch.zeros_like(vectors[0]), *pairs]).sum(dim=0)]

    bottoms = [draw.array(draw.samples, slots * width)]
    return {"type": "FmOrder2", "members": {"out_dim": width}, "bottoms": bottoms, "oracle": oracle}


def matrix_multiply(draw):
    outer = [draw.samples, draw.size()][: draw.size(2)]
    m, n, k = draw.size(), draw.size(), draw.size()
    bottoms = [draw.array(*outer, m, n), draw.array(*outer, n, k)]
    return {"type": "MatrixMultiply", "members": {}, "bottoms": bottoms, "oracle": lambda b, w: [torch.matmul(*b)]}


def matrix_multiply_by_fixed_rows(draw):
    n, sizes = draw.size(), [draw.size() for _ in range(draw.size(2))]
    return {
        "type": "MatrixMultiply", "members": {}, "bottoms": [draw.array(draw.samples, n), draw.array(n, *sizes)],
        "rows": [B, n], "oracle": lambda b, w: [torch.tensordot(b[0], b[1], dims=1)],
    }  # fmt: skip


FAMILIES = [
    fm_order2, fused_inner_product, inner_product, interaction, matrix_multiply, matrix_multiply_by_fixed_rows, mlp,
    multi_cross_matrices, multi_cross_vectors, multiply, weight_multiply,
]  # fmt: skip


family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@family
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_products_on_numpy_agree_with_pytorch(family, draw_layer, check_numpy, data):
    check_numpy(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_products_on_a_device_compute_the_same(family, draw_layer, check_device, data):
    check_device(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_products_on_torch_compute_the_same_with_correct_gradients(family, draw_layer, check_torch, data):
    check_torch(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_traced_products_compute_the_same_for_any_batch_size(family, draw_layer, check_traced, data):
    check_traced(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_products_report_whether_they_mix_samples(family, draw_layer, check_mixing, data):
    check_mixing(draw_layer(family, data))


def test_every_layer_of_the_table_is_read_computed_and_tested(smallest_draw):
    smallest = [family(smallest_draw) for family in FAMILIES]

    assert layers.TABLE.keys() == layer_types.TABLE.keys() == {case["type"] for case in smallest}
