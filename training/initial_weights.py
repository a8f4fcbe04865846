"""First values of the dense weights: HugeCTR's initialisers, by its names."""

import math
from collections.abc import Callable

import torch

from serving.model.dense_file import weight_key
from serving.model.graph import Graph, Layer, WeightSpec

_TRUNCATED_STD = 0.8796256610342398  # standard deviation of a unit normal cut off at two


def initial_weights(graph: Graph, seed: int) -> dict[str, torch.Tensor]:
    """Draw every weight of the dense network.

    A layer's ``weight_init``, ``bias_init``, ``gamma_init`` and ``beta_init`` are obeyed. Without them weights are
    XavierNorm, in MultiCross XavierUniform, as in HugeCTR, factors (gamma) are one, and biases and betas are zero.
    (HugeCTR draws an InnerProduct's bias from a normal distribution; zero is what every other framework starts from,
    and nothing is lost by it.)

    Returns:
        ``"<layer>.<weight>"`` to a float32 leaf that wants a gradient, in dense-file order.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = {layer.name: layer for layer in graph.layers}
    weights = {}
    for spec in graph.weights:
        draw, fan_in, fan_out = _initializer(layers[spec.layer], spec)
        weights[weight_key(spec)] = draw(spec.shape, fan_in, fan_out, generator).requires_grad_()
    return weights


def initial_statistics(graph: Graph) -> dict[str, torch.Tensor]:
    """Return what BatchNorm layers remember before they have seen a batch: mean 0, variance 1."""
    return {
        weight_key(spec): torch.ones(spec.shape) if spec.name == "var" else torch.zeros(spec.shape)
        for spec in graph.statistics
    }


_Draw = Callable[[tuple[int, ...], int, int, torch.Generator], torch.Tensor]


def _initializer(layer: Layer, spec: WeightSpec) -> tuple[_Draw, int, int]:
    for start, default in (("bias", "Zero"), ("beta", "Zero"), ("gamma", "One")):
        if spec.name.startswith(start):
            name = layer.params.get(f"{start}_init", "Default")
            return _DRAWS[default if name == "Default" else name], 0, spec.shape[-1]
    name = layer.params.get("weight_init", "Default")
    if name == "Default":
        name = "XavierUniform" if layer.type == "MultiCross" else "XavierNorm"
    return _DRAWS[name], spec.shape[0], spec.shape[-1]


def _zero(shape: tuple[int, ...], fan_in: int, fan_out: int, generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(shape)


def _one(shape: tuple[int, ...], fan_in: int, fan_out: int, generator: torch.Generator) -> torch.Tensor:
    return torch.ones(shape)


def _uniform(shape: tuple[int, ...], fan_in: int, fan_out: int, generator: torch.Generator) -> torch.Tensor:
    limit = 1 / (fan_in + fan_out)
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)


def _xavier_uniform(shape: tuple[int, ...], fan_in: int, fan_out: int, generator: torch.Generator) -> torch.Tensor:
    limit = math.sqrt(6 / (fan_in + fan_out))
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)


def _xavier_normal(shape: tuple[int, ...], fan_in: int, fan_out: int, generator: torch.Generator) -> torch.Tensor:
    std = math.sqrt(2 / (fan_in + fan_out)) / _TRUNCATED_STD
    return torch.nn.init.trunc_normal_(torch.empty(shape), 0, std, -2 * std, 2 * std, generator=generator)


_DRAWS: dict[str, _Draw] = {
    "One": _one,
    "Uniform": _uniform,
    "XavierNorm": _xavier_normal,
    "XavierUniform": _xavier_uniform,
    "Zero": _zero,
}
