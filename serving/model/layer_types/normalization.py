"""Layers that center and scale by a mean and a variance."""

from collections.abc import Mapping

from serving.model.layer_types.site import LayerType, Site, Structure, initializers
from serving.model.strict_json import Fields

_INITIALIZERS = ("gamma_init", "beta_init")


def _epsilon(fields: Fields, key: str = "eps") -> float:
    """Return the member ``key``, which keeps a division by the root of a variance finite."""
    epsilon = fields.number(key, 1e-5)
    if not 0 < epsilon < 1:
        raise fields.error(f"expected a number above 0 and below 1, got {epsilon}", key)
    return epsilon


def _batch_norm(site: Site) -> Structure:
    site.expect_dimensions(2)
    columns = site.columns()
    fields = site.fields.object("bn_param", ("factor", "eps", *_INITIALIZERS))
    factor = fields.number("factor", 1.0)
    if not 0 <= factor <= 1:
        raise fields.error(f"expected a number from 0 to 1, got {factor}", "factor")
    return Structure(
        tops=(site.bottoms[0],),
        params={"factor": factor, "eps": _epsilon(fields), **initializers(fields, _INITIALIZERS)},
        weights=(("gamma", (columns,)), ("beta", (columns,))),
        statistics=(("mean", (columns,)), ("var", (columns,))),
    )


def _layer_norm(site: Site) -> Structure:
    columns = site.columns()
    fields = site.fields.object("ln_param", ("eps", *_INITIALIZERS))
    return Structure(
        tops=(site.bottoms[0],),
        params={"eps": _epsilon(fields), **initializers(fields, _INITIALIZERS)},
        weights=(("gamma", (columns,)), ("beta", (columns,))),
    )


def _prelu_dice(site: Site) -> Structure:
    site.expect_dimensions(2)
    # HugeCTR's exporter writes alpha and eps, its loader reads elu_alpha, and hand-written v3.1 files have epsilon
    fields = site.fields.object("prelu_dice_param", ("alpha", "elu_alpha", "eps", "epsilon"))
    alpha = fields.number(_either(fields, "alpha", "elu_alpha"))
    epsilon = _epsilon(fields, _either(fields, "eps", "epsilon"))
    return Structure((site.bottoms[0],), {"alpha": alpha, "eps": epsilon}, mixes_samples=True)


def _either(fields: Fields, name: str, other: str) -> str:
    """Return the name of a member with two names, or ``name`` if the layer has neither."""
    if name in fields and other in fields:
        raise fields.error(f"expected either {name} or {other}", other)
    return other if other in fields else name


TABLE: Mapping[str, LayerType] = {
    "BatchNorm": LayerType(_batch_norm, ("bn_param",)),
    "LayerNorm": LayerType(_layer_norm, ("ln_param",)),
    "PReLU_Dice": LayerType(_prelu_dice, ("prelu_dice_param",)),
}
