"""Layers against numbers calculated by hand; these tests only need NumPy."""

import numpy as np
import pytest

from serving.dense.layers import LAYERS
from serving.dense.primitives import linear, sigmoid
from serving.model.layer_types import LAYER_TYPES


def test_every_layer_that_can_be_read_can_be_computed():
    assert LAYERS.keys() == LAYER_TYPES.keys()


def test_the_cross_layer_gives_the_documented_numbers(run_layer):
    w, b, x = [0.1, 0.2, 0.3], [0.5, 0.0, -0.5], [[1.0, 2.0, 3.0]]

    (first,) = run_layer("MultiCross", {"mc_param": {"num_layers": 1}}, [x], weight0=w, bias0=b)
    (second,) = run_layer("MultiCross", {"mc_param": {"num_layers": 2}}, [x], weight0=w, bias0=b, weight1=w, bias1=b)

    np.testing.assert_allclose(first, [[2.9, 4.8, 6.7]], rtol=1e-14)
    np.testing.assert_allclose(second, [[6.66, 11.32, 15.98]], rtol=1e-14)


def test_the_low_rank_cross_layer_gives_the_documented_numbers(run_layer):
    (top,) = run_layer(
        "MultiCross",
        {"mc_param": {"num_layers": 1, "projection_dim": 1}},
        [[[1.0, 2.0, 3.0]]],
        u0=[[1], [0], [2]],
        v0=[[0.5, 1, -1]],
        bias0=[0.5, 0, -0.5],
    )

    assert top == [[5.0, 16.0, -19.5]]


def test_the_interaction_gives_the_documented_numbers(run_layer):
    assert run_layer("Interaction", {}, [[[1, 2]], [[[3, 4], [5, 6]]]]) == [[[1, 2, 11, 17, 39, 0]]]


def test_the_factorization_machine_gives_the_documented_numbers(run_layer):
    assert run_layer("FmOrder2", {"out_dim": 2}, [[[1, 2, 3, 4, 5, 6]]]) == [[[23, 44]]]


def test_a_weight_multiply_scales_a_vector_per_column(run_layer):
    (top,) = run_layer("WeightMultiply", {"weight_dims": [2, 3]}, [[[2, 3]]], weight=[[1, 2, 3], [4, 5, 6]])

    assert top == [[2, 4, 6, 12, 15, 18]]


def test_a_product_works_without_a_bias():
    assert linear(np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]])).tolist() == [[11.0]]


def test_scaling_repeats_numbers_or_rows(run_layer):
    x = [[1, 2], [3, 4]]

    assert run_layer("Scale", {"scale_param": {"axis": 0, "factor": 2}}, [x]) == [[[1, 1, 2, 2], [3, 3, 4, 4]]]
    assert run_layer("Scale", {"scale_param": {"axis": 1, "factor": 2}}, [x]) == [[[1, 2], [1, 2], [3, 4], [3, 4]]]


def test_an_overlapping_slice_makes_no_needless_copy():
    x = np.zeros((2, 3))

    whole, part = LAYERS["Slice"]({"ranges": ((0, 3), (1, 2))}, [x], {}, None)

    assert whole is x
    assert part.shape == (2, 1)


def test_softmax_does_not_overflow(run_layer):
    assert run_layer("Softmax", {}, [[[1e30, 0, -1e30]]]) == [[[1, 0, 0]]]


def test_elu_does_not_overflow(run_layer):
    assert run_layer("ELU", {"elu_param": {"alpha": 2}}, [[[-1e30, -1000, 0, 1000, 1e30]]]) == [
        [[-2, -2, 0, 1000, 1e30]]
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_does_not_overflow(dtype):
    x = np.array([-1e30, -1000, -88, 0, 88, 1000, 1e30], dtype)

    y = sigmoid(x)

    assert y.dtype == dtype
    np.testing.assert_allclose(y, [0, 0, 0, 0.5, 1, 1, 1], atol=1e-37)


def test_fused_reshape_concat_separates_the_last_slot(run_layer):
    x, y = [[[1, 2], [3, 4], [5, 6]]], [[[7], [8], [9]]]

    assert run_layer("FusedReshapeConcatGeneral", {}, [x, y]) == [[[1, 2, 7], [3, 4, 8], [5, 6, 9]]]
    assert run_layer("FusedReshapeConcat", {}, [x, y], tops=2) == [[[1, 2, 7], [3, 4, 8]], [[5, 6, 9]]]


def test_a_batch_norm_uses_the_statistics_it_is_given(run_layer):
    (top,) = run_layer(
        "BatchNorm",
        {"bn_param": {"factor": 0.9, "eps": 0.25}},
        [[[1, 2], [3, 4]]],
        gamma=[2, 3],
        beta=[10, 20],
        mean=[1, 0],
        var=[0.75, 3.75],
    )

    assert top == [[10, 23], [14, 26]]


def test_dice_bends_below_the_mean_of_the_batch(run_layer):
    (top,) = run_layer("PReLU_Dice", {"prelu_dice_param": {"alpha": 0.5, "eps": 1e-8}}, [[[-3.0], [3.0]]])

    gate = 1 / (1 + np.exp(-1))  # one standard deviation above the mean
    np.testing.assert_allclose(top, [[-3 * (1 - gate) - 1.5 * gate], [3 * gate + 1.5 * (1 - gate)]], rtol=1e-7)


def test_a_mask_is_one_inside_both_sequences(run_layer):
    members = {"max_sequence_len_from": 2, "max_sequence_len_to": 3}

    assert run_layer("SequenceMask", {"max_sequence_len": 3}, [[[2]]]) == [[[[[1, 1, 0]]]]]
    assert run_layer("SequenceMask", members, [[[1]], [[2]]]) == [[[[[1, 1, 0], [0, 0, 0]]]]]


def test_attention_ignores_masked_keys(run_layer):
    q, k, v = [[[0, 0]]], [[[1, 1], [1, 1], [1, 1]]], [[[1, 2], [3, 4], [50, 60]]]

    (top,) = run_layer("MultiHeadAttention", {"num_attention_heads": 2}, [q, k, v, [[[[1, 1, 0]]]]])

    assert top == [[[2, 3]]]
