"""The structure of each dense layer type: its parameters, the shapes it makes, the weights it owns.

One function and one entry of ``LAYER_TYPES`` per type. What a layer computes is in ``serving.dense.layers``.
Names, defaults and weight orders are those of HugeCTR's layer documentation and of its dense model file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.errors import ConfigError
from serving.model.json_fields import Fields, describe
from serving.model.records import Shape

INITIALIZERS = ("Default", "Uniform", "XavierNorm", "XavierUniform", "Zero")


@dataclass(frozen=True, slots=True)
class Site:
    """One layer while it is being read: its JSON object, and what it is connected to."""

    fields: Fields
    bottoms: tuple[Shape, ...]
    top_count: int

    def fail(self, reason: str, key: str = "bottom") -> ConfigError:
        """Return the error that says ``reason`` of this layer's ``key``."""
        return self.fields.error(reason, key)

    def columns(self) -> int:
        """Return the last dimension of the only bottom; there must be at least one column."""
        columns = self.bottoms[0][-1]
        if not columns:
            raise self.fail("the tensor has no columns")
        return columns


@dataclass(frozen=True, slots=True)
class Structure:
    """What a layer turned out to be.

    Attributes:
        tops: the shape of each top.
        params: checked parameters by their JSON names.
        weights: name and shape of each weight, in the order of the dense file.
    """

    tops: tuple[Shape, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class LayerType:
    """One entry of the table.

    Attributes:
        read: the layer's function.
        keys: its members beside ``name``, ``type``, ``bottom`` and ``top``.
        bottoms: how many bottoms, from and to.
        tops: how many tops, from and to.
    """

    read: Callable[[Site], Structure]
    keys: tuple[str, ...] = ()
    bottoms: tuple[int, int] = (1, 1)
    tops: tuple[int, int] = (1, 1)


def _elementwise(site: Site) -> Structure:
    return Structure((site.bottoms[0],))


def _dropout(site: Site) -> Structure:
    rate = site.fields.number("rate", 0.5)
    if not 0 <= rate < 1:
        raise site.fail(f"expected a number from 0 to below 1, got {rate}", "rate")
    return Structure((site.bottoms[0],), {"rate": rate})


def _initializers(fields: Fields) -> dict[str, str]:
    """Training's choices: without effect on a prediction, but kept and spelt right."""
    known = {name: name for name in INITIALIZERS}
    return {key: fields.choice(key, known) for key in ("weight_init", "bias_init") if key in fields}


def _inner_product(site: Site) -> Structure:
    fields = site.fields.object("fc_param", ("num_output", "weight_init", "bias_init"))
    columns, outputs = site.columns(), fields.integer("num_output")
    return Structure(
        tops=((*site.bottoms[0][:-1], outputs),),
        params={"num_output": outputs, **_initializers(fields)},
        weights=(("weight", (columns, outputs)), ("bias", (outputs,))),
    )


def _multi_cross(site: Site) -> Structure:
    fields = site.fields.object("mc_param", ("num_layers", "projection_dim", "weight_init", "bias_init"))
    depth, rank = fields.integer("num_layers"), fields.integer("projection_dim", 0, minimum=0)
    columns = site.columns()
    if len(site.bottoms[0]) != 2:
        raise site.fail(f"expected a tensor of two dimensions, got {show(site.bottoms[0])}")
    weights: list[tuple[str, tuple[int, ...]]] = []
    for level in range(depth):
        if rank:
            weights += [(f"u{level}", (columns, rank)), (f"v{level}", (rank, columns))]
        else:
            weights.append((f"weight{level}", (columns,)))
        weights.append((f"bias{level}", (columns,)))
    params = {"num_layers": depth, "projection_dim": rank, **_initializers(fields)}
    return Structure((site.bottoms[0],), params, tuple(weights))


def _concat(site: Site) -> Structure:
    first = site.bottoms[0]
    axis = site.fields.integer("axis", 1)
    if axis >= len(first):
        raise site.fail(f"expected an axis below {len(first)}, got {axis}", "axis")
    for shape in site.bottoms:
        if len(shape) != len(first) or shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]:
            raise site.fail(f"shapes {show(first)} and {show(shape)} differ beside axis {axis}")
    total = sum(shape[axis] or 0 for shape in site.bottoms)
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
    leading_dim = site.fields.integer("leading_dim")
    time_step = site.fields.integer("time_step", 0, minimum=0)
    per_sample = 1
    for size in site.bottoms[0][1:]:
        per_sample *= size or 0
    if leading_dim * (time_step or 1) != per_sample:
        raise site.fail(
            f"{leading_dim}{f' x {time_step}' if time_step else ''} floats per sample asked for, "
            f"but the bottom {show(site.bottoms[0])} has {per_sample}",
            "leading_dim",
        )
    top: Shape = (None, time_step, leading_dim) if time_step else (None, leading_dim)
    return Structure((top,), {"leading_dim": leading_dim, "time_step": time_step})


def _add(site: Site) -> Structure:
    first = site.bottoms[0]
    for shape in site.bottoms:
        if shape != first:
            raise site.fail(f"shapes {show(first)} and {show(shape)} differ")
    return Structure((first,))


def show(shape: Shape) -> str:
    """Return a shape as messages write it: ``[B, 26, 16]``."""
    return f"[{', '.join('B' if size is None else str(size) for size in shape)}]"


_MANY = 2**31
LAYER_TYPES: Mapping[str, LayerType] = {
    "Add": LayerType(_add, bottoms=(2, _MANY)),
    "Concat": LayerType(_concat, ("axis",), bottoms=(2, _MANY)),
    "Dropout": LayerType(_dropout, ("rate",)),
    "InnerProduct": LayerType(_inner_product, ("fc_param",)),
    "MultiCross": LayerType(_multi_cross, ("mc_param",)),
    "ReLU": LayerType(_elementwise),
    "Reshape": LayerType(_reshape, ("leading_dim", "time_step")),
    "Sigmoid": LayerType(_elementwise),
    "Slice": LayerType(_slice, ("ranges",), tops=(1, _MANY)),
}
