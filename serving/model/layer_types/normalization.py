"""Layers that centre and scale by a mean and a variance."""

from collections.abc import Mapping

from serving.model.json_fields import Fields
from serving.model.layer_types.site import LayerType, Site, Structure, initializers

_INITIALIZERS = ("gamma_init", "beta_init")


def _epsilon(fields: Fields) -> float:
    """Return ``eps``, which keeps a division by the root of a variance finite."""
    epsilon = fields.number("eps", 1e-5)
    if not 0 < epsilon < 1:
        raise fields.error(f"expected a number above 0 and below 1, got {epsilon}", "eps")
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
    fields = site.fields.object("prelu_dice_param", ("alpha", "elu_alpha", "eps"))
    if "alpha" in fields and "elu_alpha" in fields:
        raise fields.error("expected either alpha or elu_alpha", "elu_alpha")
    alpha = fields.number("elu_alpha" if "elu_alpha" in fields else "alpha")
    return Structure((site.bottoms[0],), {"alpha": alpha, "eps": _epsilon(fields)}, mixes_samples=True)


TABLE: Mapping[str, LayerType] = {
    "BatchNorm": LayerType(_batch_norm, ("bn_param",)),
    "LayerNorm": LayerType(_layer_norm, ("ln_param",)),
    "PReLU_Dice": LayerType(_prelu_dice, ("prelu_dice_param",)),
}
