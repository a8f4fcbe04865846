"""Layers that multiply by weights, or multiply tensors."""

from collections.abc import Mapping
from typing import Any

from serving.model.layer_types.site import LayerType, Site, Structure, WeightShapes, initializers, inner, show
from serving.model.records import Samples
from serving.model.strict_json import Fields

_ACTIVATIONS = {"Relu": "Relu", "None": "None"}
_POSITIONS = {name: name for name in ("Head", "Body", "Tail", "Isolated", "None")}
_MIXED_PRECISION = (1, 4)  # mixed precision training adds tensors for its backward pass


def _inner_product(site: Site) -> Structure:
    fields = site.fields.object("fc_param", ("num_output", "weight_init", "bias_init"))
    columns, outputs = site.columns(), fields.integer("num_output")
    return Structure(
        tops=((*site.bottoms[0][:-1], outputs),) * site.top_count,
        params={"num_output": outputs, **initializers(fields)},
        weights=(("weight", (columns, outputs)), ("bias", (outputs,))),
    )


def _fused_inner_product(site: Site) -> Structure:
    structure = _inner_product(site)
    site.fields.choice("position", _POSITIONS, "None")
    activation = site.fields.choice("activation", _ACTIVATIONS, "Relu")
    params = {**structure.params, "activation": activation, "tops": site.top_count}
    return Structure(structure.tops, params, structure.weights)


def _mlp(site: Site) -> Structure:
    keys = ("num_output", "num_outputs", "activation", "activations", "use_bias", "biases", "weight_init", "bias_init")
    fields = site.fields.object("mlp_param", keys)
    outputs = fields.integers("num_outputs")
    params = {
        "num_outputs": outputs,
        "activations": _each(fields, "activations", "activation", len(outputs), _ACTIVATIONS, "Relu"),
        "biases": _each(fields, "biases", "use_bias", len(outputs), {True: True, False: False}, True),
        "tops": site.top_count,
        **initializers(fields),
    }
    weights: list[tuple[str, tuple[int, ...]]] = []
    columns = site.columns()
    for level, size in enumerate(outputs):
        # the file has a bias block even if the layer uses no bias
        weights += [(f"weight{level}", (columns, size)), (f"bias{level}", (size,))]
        columns = size
    return Structure(((*site.bottoms[0][:-1], columns),) * site.top_count, params, tuple(weights))


def _each(fields: Fields, many: str, one: str, count: int, choices: Mapping[Any, Any], default: Any) -> tuple[Any, ...]:
    """Return the choice for each of ``count`` levels, from the list ``many`` or from ``one`` for all levels."""
    if many not in fields:
        return (fields.choice(one, choices, default),) * count
    if one in fields:
        raise fields.error(f"expected either {one} or {many}", many)
    items = fields.items(many)
    if len(items) != count:
        raise fields.error(f"expected {count} items, one per entry of num_outputs, got {len(items)}", many)
    return tuple(fields.check_choice(item, f"{many}[{index}]", choices) for index, item in enumerate(items))


def cross_weights(columns: int, depth: int, rank: int | None) -> WeightShapes:
    """Return the weights of a MultiCross: version 1 without a ``rank``, version 2 with one."""
    weights: list[tuple[str, tuple[int, ...]]] = []
    for level in range(depth):
        if rank:
            weights += [(f"u{level}", (columns, rank)), (f"v{level}", (rank, columns))]
        else:
            weights.append((f"weight{level}", (columns,)))
        weights.append((f"bias{level}", (columns,)))
    return tuple(weights)


def _multi_cross(site: Site) -> Structure:
    fields = site.fields.object("mc_param", ("num_layers", "projection_dim", "weight_init", "bias_init"))
    depth = fields.integer("num_layers")
    # exporters up to v24.06 omit it, so only the dense file's size shows its value
    rank = fields.integer("projection_dim", minimum=0) if "projection_dim" in fields else None
    columns = site.columns()
    site.expect_dimensions(2)
    params = {"num_layers": depth, "projection_dim": rank, **initializers(fields)}
    return Structure((site.bottoms[0],), params, cross_weights(columns, depth, rank))


def _weight_multiply(site: Site) -> Structure:
    site.expect_dimensions(2)
    columns, dims = site.columns(), site.fields.integers("weight_dims")
    if len(dims) != 2:
        raise site.fail(f"expected two sizes, slots and vector, got {len(dims)}", "weight_dims")
    if dims[0] != columns:
        raise site.fail(f"{dims[0]} slots, but the bottom {show(site.bottoms[0])} has {columns} columns", "weight_dims")
    top = (site.bottoms[0][0], dims[0] * dims[1])
    params = {"weight_dims": dims, **initializers(site.fields, ("weight_init",))}
    return Structure((top,), params, (("weight", dims),))


def _interaction(site: Site) -> Structure:
    vector, embedding = site.bottoms
    if len(vector) != 2 or len(embedding) != 3 or vector != (embedding[0], embedding[2]):
        shapes = f"{show(vector)} and {show(embedding)}"
        raise site.fail(f"expected [B, D] and [B, S, D], a vector and an embedding with the same columns, got {shapes}")
    slots, width = inner(embedding)
    pairs = slots * (slots + 1) // 2
    return Structure(((vector[0], width + pairs + 1),) * site.top_count, {"tops": site.top_count})


def _fm_order2(site: Site) -> Structure:
    site.expect_dimensions(2)
    columns, width = site.columns(), site.fields.integer("out_dim")
    if columns % width:
        raise site.fail(f"expected a divisor of {columns}, the bottom's columns, got {width}", "out_dim")
    return Structure(((site.bottoms[0][0], width),), {"out_dim": width})


def _matrix_multiply(site: Site) -> Structure:
    left, right = site.bottoms
    site.expect_dimensions(2, 3, 4)
    shapes = f"{show(left)} and {show(right)}"
    if len(left) == 2 and len(right) in (2, 3):
        if isinstance(right[0], Samples):
            raise site.fail(f"{shapes} fit only for one number of samples: the second's first dimension must be fixed")
        fits, top = left[1] == right[0], (left[0], *right[1:])
    elif len(left) == len(right):
        fits, top = left[:-2] == right[:-2] and left[-1] == right[-2], (*left[:-1], right[-1])
    else:
        raise site.fail(f"expected as many dimensions, or two and three, got {shapes}")
    if not fits:
        raise site.fail(f"expected [..., m, n] and [..., n, k], got {shapes}")
    return Structure((top,))


TABLE: Mapping[str, LayerType] = {
    "FmOrder2": LayerType(_fm_order2, ("out_dim",)),
    "FusedInnerProduct": LayerType(
        _fused_inner_product, ("fc_param", "position", "activation"), _MIXED_PRECISION, _MIXED_PRECISION
    ),
    "InnerProduct": LayerType(_inner_product, ("fc_param",)),
    "Interaction": LayerType(_interaction, bottoms=(2, 2), tops=(1, 2)),
    "MLP": LayerType(_mlp, ("mlp_param",), _MIXED_PRECISION, _MIXED_PRECISION),
    "MatrixMultiply": LayerType(_matrix_multiply, bottoms=(2, 2)),
    "MultiCross": LayerType(_multi_cross, ("mc_param",)),
    "Multiply": LayerType(_weight_multiply, ("weight_dims", "weight_init")),
    "WeightMultiply": LayerType(_weight_multiply, ("weight_dims", "weight_init")),
}
