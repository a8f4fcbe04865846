"""Layers that join, cut, pick and rearrange tensors, and layers that sum along a dimension."""

import math
from collections.abc import Mapping

from serving.model.layer_types.site import MANY, LayerType, Site, Structure, inner, show
from serving.model.records import Samples, Shape, Size
from serving.model.strict_json import describe


def _concat(site: Site) -> Structure:
    first = site.bottoms[0]
    axis = site.fields.integer("axis", 1)
    if axis >= len(first):
        raise site.fail(f"expected an axis below {len(first)}, got {axis}", "axis")
    total = 0
    for shape in site.bottoms:
        if len(shape) != len(first) or shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]:
            raise site.fail(f"shapes {show(first)} and {show(shape)} differ outside axis {axis}")
        total += inner(shape)[axis - 1]
    return Structure(((*first[:axis], total, *first[axis + 1 :]),), {"axis": axis})


def _slice(site: Site) -> Structure:
    columns, ranges = site.columns(), site.fields.value("ranges")
    if not isinstance(ranges, list) or len(ranges) != site.top_count:
        got = len(ranges) if isinstance(ranges, list) else describe(ranges)
        raise site.fail(f"expected a list of {site.top_count} ranges, one per top, got {got}", "ranges")
    for index, bounds in enumerate(ranges):
        key = f"ranges[{index}]"
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise site.fail(f"expected [begin, end], got {describe(bounds)}", key)
        begin, end = (site.fields.check_integer(bound, f"{key}[{side}]", 0) for side, bound in enumerate(bounds))
        if not begin < end <= columns:
            raise site.fail(f"expected begin < end <= {columns}, the bottom's columns, got [{begin}, {end}]", key)
    return Structure(
        tops=tuple((*site.bottoms[0][:-1], end - begin) for begin, end in ranges),
        params={"ranges": tuple((begin, end) for begin, end in ranges)},
    )


def _reshape(site: Site) -> Structure:
    forms = [key for key in ("selected", "shape", "leading_dim") if key in site.fields]
    if len(forms) > 1 or ("time_step" in site.fields and forms != ["leading_dim"]):
        place = forms[-1] if forms else "leading_dim"
        raise site.fail("expected leading_dim, with or without time_step, or selected, or shape", place)
    if "selected" in site.fields:
        return _reshape_selected(site)
    if "shape" in site.fields:
        return _reshape_shape(site)
    # without leading_dim every row is flattened, as in HugeCTR v3.1's reader of hand-written files
    leading_dim = site.fields.integer("leading_dim", math.prod(inner(site.bottoms[0])))
    time_step = site.fields.integer("time_step", 0, minimum=0)
    sizes = (time_step, leading_dim) if time_step else (leading_dim,)
    return _reshape_to(site, sizes, "leading_dim")


def _reshape_selected(site: Site) -> Structure:
    site.expect_dimensions(3)
    slots, width = inner(site.bottoms[0])
    selected = _picked(site, "selected", slots, "slots")
    return Structure(((site.bottoms[0][0], len(selected) * width),), {"selected": selected})


def _reshape_shape(site: Site) -> Structure:
    first, *sizes = site.fields.integers("shape", minimum=-1)
    if first != -1 or not sizes or min(sizes) < 1:
        raise site.fail(f"expected -1, then sizes from 1, got {[first, *sizes]}", "shape")
    return _reshape_to(site, tuple(sizes), "shape")


def _reshape_to(site: Site, sizes: tuple[int, ...], key: str) -> Structure:
    """Keep all floats in order, and replace the dimensions after the first with ``sizes``."""
    bottom = site.bottoms[0]
    rows = _rows(bottom[0], math.prod(inner(bottom)), math.prod(sizes))
    if rows is None:
        asked, floats = " x ".join(map(str, sizes)), math.prod(inner(bottom))
        raise site.fail(
            f"the bottom {show(bottom)} has {floats} floats per row, which cannot be divided into rows of {asked}",
            key,
        )
    return Structure(((rows, *sizes),), {"sizes": sizes})


def _rows(rows: Size, floats: int, floats_asked: int) -> Size | None:
    """Return how many rows of ``floats_asked`` make up ``rows`` of ``floats``; None if that fails for some B."""
    total = (rows.times if isinstance(rows, Samples) else rows) * floats
    if not total or total % floats_asked:
        return None
    return Samples(total // floats_asked) if isinstance(rows, Samples) else total // floats_asked


def _picked(site: Site, key: str, count: int, what: str) -> tuple[int, ...]:
    """Return the list ``key`` of numbers below ``count``."""
    picked = site.fields.integers(key, minimum=0)
    if max(picked) >= count:
        raise site.fail(f"expected numbers below {count}, the bottom's {what}, got {max(picked)}", key)
    return picked


def _select(site: Site) -> Structure:
    bottom = site.bottoms[0]
    dim = site.fields.integer("dim")
    if dim >= len(bottom):
        raise site.fail(f"expected a dimension below {len(bottom)}, got {dim}", "dim")
    index = _picked(site, "index", inner(bottom)[dim - 1], f"size in dimension {dim}")
    return Structure(((*bottom[:dim], len(index), *bottom[dim + 1 :]),), {"dim": dim, "index": index})


def _gather(site: Site) -> Structure:
    bottom, rows = site.bottoms[0], site.bottoms[0][0]
    if not isinstance(rows, Samples):
        indices = _picked(site, "indices", rows, "rows")
        return Structure(((len(indices), *bottom[1:]),), {"indices": indices})
    indices = site.fields.integers("indices", minimum=0)
    return Structure(
        tops=((len(indices), *bottom[1:]),),
        params={"indices": indices},
        least_samples=max(indices) // rows.times + 1,
        mixes_samples=True,
    )


def _scale(site: Site) -> Structure:
    site.expect_dimensions(2)
    fields = site.fields.object("scale_param", ("axis", "factor"))
    # axis 0 means columns and axis 1 rows, as in HugeCTR
    axis, factor = fields.choice("axis", {0: 0, 1: 1}), fields.count("factor")
    rows, columns = site.bottoms[0][0], site.columns()
    top: Shape = (rows, columns * factor) if axis == 0 else (rows * factor, columns)
    return Structure((top,), {"axis": axis, "factor": factor})


def _joined(site: Site) -> tuple[Size, int, int]:
    """Return rows, slots and columns of the bottoms side by side."""
    site.expect_dimensions(3)
    first = site.bottoms[0]
    for shape in site.bottoms:
        if shape[:2] != first[:2]:
            raise site.fail(f"shapes {show(first)} and {show(shape)} differ outside axis 2")
    slots, _ = inner(first)
    return first[0], slots, sum(inner(shape)[1] for shape in site.bottoms)


def _fused_reshape_concat(site: Site) -> Structure:
    rows, slots, columns = _joined(site)
    if slots < 2:
        raise site.fail(f"expected at least two slots: the last slot and others, got {show(site.bottoms[0])}")
    return Structure(((rows * (slots - 1), columns), (rows, columns)))


def _fused_reshape_concat_general(site: Site) -> Structure:
    rows, slots, columns = _joined(site)
    return Structure(((rows * slots, columns),))


def _reduce(site: Site) -> Structure:
    bottom = site.bottoms[0]
    axis = site.fields.integer("axis", 1, minimum=0)
    if axis >= len(bottom):
        raise site.fail(f"expected an axis below {len(bottom)}, got {axis}", "axis")
    if bottom[axis] == 0:
        raise site.fail("the tensor has no columns")
    top = (*bottom[:axis], 1, *bottom[axis + 1 :])
    return Structure((top,), {"axis": axis}, mixes_samples=axis == 0)


TABLE: Mapping[str, LayerType] = {
    "Concat": LayerType(_concat, ("axis",), bottoms=(2, MANY)),
    "FusedReshapeConcat": LayerType(_fused_reshape_concat, bottoms=(1, MANY), tops=(2, 2)),
    "FusedReshapeConcatGeneral": LayerType(_fused_reshape_concat_general, bottoms=(1, MANY)),
    "Gather": LayerType(_gather, ("indices",)),
    "ReduceMean": LayerType(_reduce, ("axis",)),
    "ReduceSum": LayerType(_reduce, ("axis",)),
    "Reshape": LayerType(_reshape, ("leading_dim", "time_step", "selected", "shape")),
    "Scale": LayerType(_scale, ("scale_param",)),
    "Select": LayerType(_select, ("dim", "index")),
    "Slice": LayerType(_slice, ("ranges",), tops=(1, MANY)),
}
