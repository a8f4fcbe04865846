"""Softmax, masks and attention, on every array library, against PyTorch in float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.dense.layers.attention as layers
import serving.model.layer_types.attention as layer_types

torch = pytest.importorskip("torch")
attend = torch.nn.functional.scaled_dot_product_attention


def softmax(draw):
    x = 3 * draw.array(draw.samples, *(draw.size() for _ in range(draw.size(3))))
    members = draw.choice([{}, {"factor": 1.0}])
    return {"type": "Softmax", "members": members, "bottoms": [x], "oracle": lambda b, w: [torch.softmax(b[0], dim=-1)]}


def some_mask(draw, queries, keys):
    """Draw a mask of zeros and ones, at least one 1 per row, for one query or all."""
    mask = draw.rng.integers(0, 2, (draw.samples, 1, draw.choice([1, queries]), keys)).astype(float)
    mask[..., 0] = 1
    return mask


def masked_softmax(draw):
    heads, queries, keys = draw.size(3), draw.size(), draw.size()
    x = draw.array(draw.samples, heads, queries, keys)
    return {
        "type": "Softmax", "members": {"factor": 0.5}, "bottoms": [x, some_mask(draw, queries, keys)],
        "oracle": lambda b, w: [torch.softmax(b[0] - (1 - b[1]) * 10000, dim=-1)],
    }  # fmt: skip


def sequence_mask(draw):
    length = draw.size()
    x = draw.rng.integers(0, length + 2, (draw.samples, 1)) + draw.choice([0.0, 0.5])
    return {
        "type": "SequenceMask", "members": {"max_sequence_len": length}, "bottoms": [x],
        "oracle": lambda b, w: [(torch.arange(length) < b[0].long()).double()[:, None, None]],
    }  # fmt: skip


def sequence_mask_of_two(draw):
    sizes = draw.size(), draw.size()
    bottoms = [draw.rng.integers(0, size + 2, (draw.samples, 1)).astype(float) for size in sizes]

    def oracle(b, w):
        inside = [(torch.arange(size) < lengths).double() for size, lengths in zip(sizes, b, strict=True)]
        return [torch.einsum("bf,bt->bft", *inside)[:, None]]

    members = {"max_sequence_len_from": sizes[0], "max_sequence_len_to": sizes[1]}
    return {"type": "SequenceMask", "members": members, "bottoms": bottoms, "oracle": oracle}


def split(x, heads):
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def queries_keys_values(draw):
    heads, queries, keys, width = draw.size(3), draw.size(), draw.size(), draw.size()
    shapes = [(draw.samples, places, heads * width) for places in (queries, keys, keys)]
    return heads, queries, keys, [draw.array(*shape) for shape in shapes]


def attention(draw):
    heads, queries, keys, bottoms = queries_keys_values(draw)
    if draw.bool():
        bottoms.append(some_mask(draw, queries, keys))

    def oracle(b, w):
        mask = (b[3] - 1) * 10000 if len(b) == 4 else None
        return [attend(*(split(x, heads) for x in b[:3]), attn_mask=mask).transpose(1, 2).flatten(2)]

    members = {"num_attention_heads": heads}
    return {"type": "MultiHeadAttention", "members": members, "bottoms": bottoms, "oracle": oracle}


def attention_scores_and_values(draw):
    heads, _, _, bottoms = queries_keys_values(draw)

    def oracle(b, w):
        q, k, v = (split(x, heads) for x in b)
        return [q @ k.transpose(2, 3) / q.shape[3] ** 0.5, v]

    members = {"num_attention_heads": heads, "transpose_b": True}
    return {"type": "MultiHeadAttention", "members": members, "bottoms": bottoms, "oracle": oracle, "tops": 2}


def attention_scores(draw):
    heads, width = draw.size(3), draw.size()
    bottoms = [draw.array(draw.samples, heads, places, width) for places in (draw.size(), draw.size())]
    return {
        "type": "MultiHeadAttention", "members": {"transpose_b": True}, "bottoms": bottoms,
        "oracle": lambda b, w: [torch.einsum("bhfd,bhtd->bhft", *b) / width**0.5],
    }  # fmt: skip


def attention_values(draw):
    heads, queries, keys, width = draw.size(3), draw.size(), draw.size(), draw.size()
    bottoms = [draw.array(draw.samples, heads, queries, keys), draw.array(draw.samples, heads, keys, width)]
    return {
        "type": "MultiHeadAttention", "members": {"transpose_b": False}, "bottoms": bottoms,
        "oracle": lambda b, w: [torch.einsum("bhft,bhtd->bfhd", *b).flatten(2)],
    }  # fmt: skip


FAMILIES = [
    attention, attention_scores, attention_scores_and_values, attention_values, masked_softmax, sequence_mask,
    sequence_mask_of_two, softmax,
]  # fmt: skip


family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


@family
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_attention_layers_on_numpy_agree_with_pytorch(family, draw_layer, check_numpy, data):
    check_numpy(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_attention_layers_on_a_device_compute_the_same(family, draw_layer, check_device, data):
    check_device(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_attention_layers_on_torch_compute_the_same_with_correct_gradients(family, draw_layer, check_torch, data):
    check_torch(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_traced_attention_layers_compute_the_same_for_any_batch_size(family, draw_layer, check_traced, data):
    check_traced(draw_layer(family, data))


@family
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_attention_layers_report_whether_they_mix_samples(family, draw_layer, check_mixing, data):
    check_mixing(draw_layer(family, data))


def test_every_layer_of_the_table_is_read_computed_and_tested(smallest_draw):
    smallest = [family(smallest_draw) for family in FAMILIES]

    assert layers.TABLE.keys() == layer_types.TABLE.keys() == {case["type"] for case in smallest}
