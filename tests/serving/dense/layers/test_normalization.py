"""Normalization layers on every array library, against PyTorch in float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.dense.layers.normalization as layers
import serving.model.layer_types.normalization as layer_types

torch = pytest.importorskip("torch")
F = torch.nn.functional


def batch_norm(draw):
    eps = draw.choice([1e-5, 1e-3])
    return {
        "type": "BatchNorm", "members": {"bn_param": {"factor": 0.9, "eps": eps}},
        "bottoms": [draw.array(draw.samples, draw.size())],
        "oracle": lambda b, w: [F.batch_norm(b[0], w["mean"], w["var"], w["gamma"], w["beta"], eps=eps)],
    }  # fmt: skip


def layer_norm(draw):
    x = draw.array(draw.samples, *(draw.size(least=2) for _ in range(draw.size(3))))
    return {
        "type": "LayerNorm", "members": {"ln_param": {"eps": 1e-3}}, "bottoms": [x],
        "oracle": lambda b, w: [F.layer_norm(b[0], x.shape[-1:], w["gamma"], w["beta"], eps=1e-3)],
    }  # fmt: skip


def prelu_dice(draw):
    alpha = draw.choice([0.2, 1.5])
    alpha_key, eps_key = draw.choice(["alpha", "elu_alpha"]), draw.choice(["eps", "epsilon"])

    def oracle(b, w):
        x = b[0]
        gate = torch.sigmoid((x - x.mean(dim=0)) / torch.sqrt(x.var(dim=0, correction=0) + 1e-3))
        return [gate * x + (1 - gate) * alpha * x]

    members = {"prelu_dice_param": {alpha_key: alpha, eps_key: 1e-3}}
    return {
        "type": "PReLU_Dice",
        "members": members,
        "bottoms": [draw.array(draw.samples, draw.size())],
        "oracle": oracle,
    }


FAMILIES = [batch_norm, layer_norm, prelu_dice]


family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@family
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_normalizations_on_numpy_agree_with_pytorch(family, draw_layer, check_numpy, data):
    check_numpy(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_normalizations_on_a_device_compute_the_same(family, draw_layer, check_device, data):
    check_device(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_normalizations_on_torch_compute_the_same_with_correct_gradients(family, draw_layer, check_torch, data):
    check_torch(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_traced_normalizations_compute_the_same_for_any_batch_size(family, draw_layer, check_traced, data):
    check_traced(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_normalizations_report_whether_they_mix_samples(family, draw_layer, check_mixing, data):
    check_mixing(draw_layer(family, data))


def test_every_layer_of_the_table_is_read_computed_and_tested(smallest_draw):
    smallest = [family(smallest_draw) for family in FAMILIES]

    assert layers.TABLE.keys() == layer_types.TABLE.keys() == {case["type"] for case in smallest}
