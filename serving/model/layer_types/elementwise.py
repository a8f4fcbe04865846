"""Layers that keep a tensor's shape and work on one element at a time."""

from collections.abc import Mapping

from serving.model.layer_types.site import MANY, LayerType, Site, Structure


def _same(site: Site) -> Structure:
    return Structure((site.bottoms[0],))


def _dropout(site: Site) -> Structure:
    rate = site.fields.number("rate", 0.5)
    if not 0 <= rate < 1:
        raise site.fail(f"expected a number from 0 to below 1, got {rate}", "rate")
    return Structure((site.bottoms[0],), {"rate": rate})


def _elu(site: Site) -> Structure:
    return Structure((site.bottoms[0],), {"alpha": site.fields.object("elu_param", ("alpha",)).number("alpha")})


def _denormalize(site: Site) -> Structure:
    columns = site.columns()
    mean = site.fields.numbers("mean", columns) if "mean" in site.fields else (0.0,) * columns
    std = site.fields.numbers("std", columns) if "std" in site.fields else (1.0,) * columns
    if min(std) <= 0:
        raise site.fail(f"expected numbers above 0, got {min(std):g}", "std")
    return Structure((site.bottoms[0],), {"mean": mean, "std": std})


def _of_equal_shapes(site: Site) -> Structure:
    site.expect_equal()
    return Structure((site.bottoms[0],))


TABLE: Mapping[str, LayerType] = {
    "Add": LayerType(_of_equal_shapes, bottoms=(2, MANY)),
    "Cast": LayerType(_same),
    "Denormalize": LayerType(_denormalize, ("mean", "std")),  # Hotrow's own
    "DotProduct": LayerType(_of_equal_shapes, bottoms=(2, MANY)),  # the older name of ElementwiseMultiply
    "Dropout": LayerType(_dropout, ("rate",)),
    "ELU": LayerType(_elu, ("elu_param",)),
    "ElementwiseMultiply": LayerType(_of_equal_shapes, bottoms=(2, MANY)),
    "ReLU": LayerType(_same),
    "Sigmoid": LayerType(_same),
    "Sub": LayerType(_of_equal_shapes, bottoms=(2, 2)),
}
