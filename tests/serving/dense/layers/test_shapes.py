"""Layers that rearrange and sum, on every array library, against PyTorch in float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.dense.layers.shapes as layers
import serving.model.layer_types.shapes as layer_types
from serving.model.records import Samples

torch = pytest.importorskip("torch")


def concat(draw):
    axis = draw.size(2)
    beside = draw.size()
    count = draw.size(3, least=2)
    shapes = [(draw.size(), beside) if axis == 1 else (beside, draw.size()) for _ in range(count)]
    bottoms = [draw.array(draw.samples, *shape) for shape in shapes]
    return {
        "type": "Concat", "members": {"axis": axis}, "bottoms": bottoms, "oracle": lambda b, w: [torch.cat(b, dim=axis)]
    }  # fmt: skip


def concat_of_rows(draw):
    bottoms = [draw.array(draw.samples, draw.size()) for _ in range(draw.size(3, least=2))]
    return {"type": "Concat", "members": {}, "bottoms": bottoms, "oracle": lambda b, w: [torch.cat(b, dim=1)]}


def slice_layer(draw):
    columns = draw.size()
    starts = [draw.size(columns) - 1 for _ in range(draw.size(3))]
    ranges = [[0, columns], *([start, start + draw.size(columns - start)] for start in starts)]
    shape = (draw.samples, draw.size(), columns) if draw.bool() else (draw.samples, columns)
    return {
        "type": "Slice", "members": {"ranges": ranges}, "bottoms": [draw.array(*shape)], "tops": len(ranges),
        "oracle": lambda b, w: [b[0].narrow(-1, i, j - i) for i, j in ranges],
    }  # fmt: skip


def reshape(draw):
    slots, dim = draw.size(), draw.size()
    members, sizes = draw.choice(
        [
            ({"leading_dim": slots * dim}, (slots * dim,)),
            ({}, (slots * dim,)),
            ({"leading_dim": slots, "time_step": dim}, (dim, slots)),
            ({"leading_dim": slots, "time_step": 0}, (slots,)),
            ({"shape": [-1, dim, slots]}, (dim, slots)),
            ({"shape": [-1, dim]}, (dim,)),
        ]
    )
    bottoms = [draw.array(draw.samples, slots, dim)]
    return {
        "type": "Reshape",
        "members": members,
        "bottoms": bottoms,
        "oracle": lambda b, w: [b[0].reshape(-1, *sizes)],
    }


def reshape_joins_rows(draw):
    times, dim = draw.size(), draw.size()
    return {
        "type": "Reshape", "members": {"leading_dim": times * dim}, "bottoms": [draw.array(draw.samples * times, dim)],
        "rows": [Samples(times)], "oracle": lambda b, w: [b[0].reshape(-1, times * dim)],
    }  # fmt: skip


def reshape_selected(draw):
    slots, dim = draw.size(), draw.size()
    selected = draw.picks(slots)
    return {
        "type": "Reshape", "members": {"selected": selected}, "bottoms": [draw.array(draw.samples, slots, dim)],
        "oracle": lambda b, w: [b[0][:, selected].flatten(1)],
    }  # fmt: skip


def select(draw):
    shape = (draw.samples, *(draw.size() for _ in range(draw.size(3))))
    dim = draw.size(len(shape) - 1)
    index = draw.picks(shape[dim])
    return {
        "type": "Select", "members": {"dim": dim, "index": index}, "bottoms": [draw.array(*shape)],
        "oracle": lambda b, w: [torch.index_select(b[0], dim, torch.tensor(index))],
    }  # fmt: skip


def gather(draw):
    times = draw.size(3)
    indices = draw.picks(draw.samples * times)
    return {
        "type": "Gather", "members": {"indices": indices}, "bottoms": [draw.array(draw.samples * times, draw.size())],
        "rows": [Samples(times)], "oracle": lambda b, w: [b[0][indices]],
    }  # fmt: skip


def scale_columns(draw):
    factor = draw.choice([1, 3, 2.0])
    return {
        "type": "Scale", "members": {"scale_param": {"axis": 0, "factor": factor}},
        "bottoms": [draw.array(draw.samples, draw.size())],
        "oracle": lambda b, w: [b[0].repeat_interleave(int(factor), dim=1)],
    }  # fmt: skip


def scale_rows(draw):
    factor = draw.choice([1, 3, 2.0])
    return {
        "type": "Scale", "members": {"scale_param": {"axis": 1, "factor": factor}},
        "bottoms": [draw.array(draw.samples, draw.size())],
        "oracle": lambda b, w: [b[0].repeat_interleave(int(factor), dim=0)],
    }  # fmt: skip


def fused_reshape_concat(draw):
    slots = draw.size(least=2)
    bottoms = [draw.array(draw.samples, slots, draw.size()) for _ in range(draw.size(3))]

    def oracle(b, w):
        joined = torch.cat(b, dim=2)
        return [joined[:, :-1].flatten(0, 1), joined[:, -1]]

    return {"type": "FusedReshapeConcat", "members": {}, "bottoms": bottoms, "oracle": oracle, "tops": 2}


def fused_reshape_concat_general(draw):
    slots = draw.size()
    bottoms = [draw.array(draw.samples, slots, draw.size()) for _ in range(draw.size(3))]
    oracle = lambda b, w: [torch.cat(b, dim=2).flatten(0, 1)]  # noqa: E731
    return {"type": "FusedReshapeConcatGeneral", "members": {}, "bottoms": bottoms, "oracle": oracle}


def reduce_sum(draw):
    shape = (draw.samples, *(draw.size() for _ in range(draw.size(2))))
    axis = draw.size(len(shape) - 1, least=0)
    return {
        "type": "ReduceSum", "members": {"axis": axis}, "bottoms": [draw.array(*shape)],
        "oracle": lambda b, w: [b[0].sum(dim=axis, keepdim=True)],
    }  # fmt: skip


def reduce_mean(draw):
    shape = (draw.samples, *(draw.size() for _ in range(draw.size(2))))
    axis = draw.size(len(shape) - 1, least=0)
    members = {} if axis == 1 else {"axis": axis}
    return {
        "type": "ReduceMean", "members": members, "bottoms": [draw.array(*shape)],
        "oracle": lambda b, w: [b[0].mean(dim=axis, keepdim=True)],
    }  # fmt: skip


FAMILIES = [
    concat, concat_of_rows, fused_reshape_concat, fused_reshape_concat_general, gather, reduce_mean, reduce_sum,
    reshape, reshape_joins_rows, reshape_selected, scale_columns, scale_rows, select, slice_layer,
]  # fmt: skip


family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@family
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_shape_layers_on_numpy_agree_with_pytorch(family, draw_layer, check_numpy, data):
    check_numpy(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_shape_layers_on_a_device_compute_the_same(family, draw_layer, check_device, data):
    check_device(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_shape_layers_on_torch_compute_the_same_with_correct_gradients(family, draw_layer, check_torch, data):
    check_torch(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_traced_shape_layers_compute_the_same_for_any_batch_size(family, draw_layer, check_traced, data):
    check_traced(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_shape_layers_report_whether_they_mix_samples(family, draw_layer, check_mixing, data):
    check_mixing(draw_layer(family, data))


def test_every_layer_of_the_table_is_read_computed_and_tested(smallest_draw):
    smallest = [family(smallest_draw) for family in FAMILIES]

    assert layers.TABLE.keys() == layer_types.TABLE.keys() == {case["type"] for case in smallest}
