"""First values of the dense weights: HugeCTR's initializers, by its names."""

import math
from collections.abc import Callable

import torch

from serving.model.dense_file import weight_key
from serving.model.graph import Graph, Layer, WeightSpec

_TRUNCATED_STD = 0.8796256610342398  # the standard deviation of a unit normal truncated at two


def initial_weights(graph: Graph, seed: int) -> dict[str, torch.Tensor]:
    """Draw every weight of the dense network, by ``"<layer>.<weight>"`` in dense-file order.

    A layer's ``weight_init``, ``bias_init``, ``gamma_init`` and ``beta_init`` are used. The default of weights is
    XavierNorm, and XavierUniform in MultiCross, as in HugeCTR. The default of gamma is one, and of biases and betas
    zero. (HugeCTR draws an InnerProduct's bias from a normal distribution. Every other framework starts from zero.)
    """
    generator = torch.Generator().manual_seed(seed)
    layers = {layer.name: layer for layer in graph.layers}
    weights = {}
    for spec in graph.weights:
        draw, fan_in, fan_out = _initializer(layers[spec.layer], spec)
        weights[weight_key(spec)] = draw(spec.shape, fan_in, fan_out, generator).requires_grad_()
    return weights


def initial_statistics(graph: Graph) -> dict[str, torch.Tensor]:
    """Return the statistics of BatchNorm layers before the first batch: mean 0, variance 1."""
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
