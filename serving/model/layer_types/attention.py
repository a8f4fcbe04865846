"""Softmax, masks and attention. F queries attend to T keys in H heads of D columns each."""

from collections.abc import Mapping

from serving.errors import ConfigError
from serving.model.layer_types.site import LayerType, Site, Structure, inner, show
from serving.model.records import Shape


def _softmax(site: Site) -> Structure:
    site.columns()
    if "factor" in site.fields:
        site.fields.number("factor")  # HugeCTR exports it, and its kernels ignore it
    if len(site.bottoms) == 2:
        _check_mask(site, *site.bottoms)
    return Structure((site.bottoms[0],))


def _check_mask(site: Site, scores: Shape, mask: Shape) -> None:
    """Check that a mask broadcasts over scores: as many dimensions, each as large or 1."""
    fits = len(mask) == len(scores) and mask[0] == scores[0] and mask[-1] == scores[-1]
    if not fits or any(size not in (1, whole) for size, whole in zip(mask[1:], scores[1:], strict=True)):
        raise site.fail(f"expected a mask that broadcasts to the scores {show(scores)}, got {show(mask)}")


def _sequence_mask(site: Site) -> Structure:
    for shape in site.bottoms:
        if len(shape) != 2 or inner(shape) != (1,) or shape != site.bottoms[0]:
            raise site.fail(f"expected lengths of shape [B, 1], got {show(shape)}")
    old = "max_sequence_len" in site.fields
    if len(site.bottoms) == (2 if old else 1):
        raise site.fail("expected max_sequence_len and one bottom, or max_sequence_len_from and _to and two bottoms")
    if old:
        sizes = (1, site.fields.integer("max_sequence_len"))
        if len(_sequence_keys(site)) > 1:
            raise site.fail("leave the other length keys out", "max_sequence_len")
    else:
        sizes = (site.fields.integer("max_sequence_len_from"), site.fields.integer("max_sequence_len_to"))
    return Structure(((site.bottoms[0][0], 1, *sizes),), {"sizes": sizes})


def _sequence_keys(site: Site) -> list[str]:
    return [key for key in _SEQUENCE_KEYS if key in site.fields]


def _multi_head_attention(site: Site) -> Structure:
    heads = site.fields.integer("num_attention_heads", 1)
    transpose_b = site.fields.boolean("transpose_b", False)
    if len(site.bottoms[0]) == 4:
        return _four_dimensions(site, transpose_b)
    queries, keys, values = _three_tensors(site)
    width, queries_count, keys_count = inner(queries)[1], inner(queries)[0], inner(keys)[0]
    if not width or width % heads:
        raise site.fail(f"expected a divisor of {width}, the columns, got {heads}", "num_attention_heads")
    scores: Shape = (queries[0], heads, queries_count, keys_count)
    params = {"form": "whole", "num_attention_heads": heads}
    if site.top_count == 1:
        if len(site.bottoms) == 4:
            _check_mask(site, scores, site.bottoms[3])
        return Structure((queries,), params)
    if len(site.bottoms) == 4:
        raise site.fail("two tops, scores and values, need three bottoms, got 4")
    split_values: Shape = (values[0], heads, keys_count, width // heads)
    return Structure((scores, split_values), {**params, "form": "scores_and_values"})


def _four_dimensions(site: Site, transpose_b: bool) -> Structure:
    """Read two bottoms whose heads are split: queries and keys, or scores and values."""
    if len(site.bottoms) != 2:
        raise site.fail(f"expected exactly 2 bottoms of four dimensions, got {len(site.bottoms)}")
    if site.top_count != 1:
        raise site.fail(f"expected exactly 1, got {site.top_count}", "top")
    site.expect_dimensions(4)
    left, right = site.bottoms
    if left[:2] != right[:2] or left[3] != right[3 if transpose_b else 2]:
        raise _differ(site, "[B, H, F, D] and [B, H, T, D]" if transpose_b else "[B, H, F, T] and [B, H, T, D]")
    site.columns()
    if transpose_b:
        return Structure(((*left[:3], right[2]),), {"form": "scores"})
    heads, queries_count, _ = inner(left)
    return Structure(((left[0], queries_count, heads * inner(right)[2]),), {"form": "values"})


def _three_tensors(site: Site) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of queries, keys and values whose heads are not split."""
    if len(site.bottoms) < 3 or any(len(shape) != 3 for shape in site.bottoms[:3]):
        raise _differ(site, "queries, keys and values of three dimensions")
    queries, keys, values = site.bottoms[:3]
    if keys != values or queries[0] != keys[0] or queries[2] != keys[2]:
        raise _differ(site, "[B, F, H*D], [B, T, H*D] and [B, T, H*D]")
    return queries, keys, values


def _differ(site: Site, expected: str) -> ConfigError:
    return site.fail(f"expected {expected}, got {', '.join(map(show, site.bottoms))}")


_SEQUENCE_KEYS = ("max_sequence_len", "max_sequence_len_from", "max_sequence_len_to")
TABLE: Mapping[str, LayerType] = {
    "MultiHeadAttention": LayerType(
        _multi_head_attention, ("num_attention_heads", "transpose_b"), bottoms=(2, 4), tops=(1, 2)
    ),
    "SequenceMask": LayerType(_sequence_mask, _SEQUENCE_KEYS, bottoms=(1, 2)),
    "Softmax": LayerType(_softmax, ("factor",), bottoms=(1, 2)),
}
