"""From the gradient of pooled bags to the update of rows, through PyTorch's autograd.

Autograd knows a table as a ``TableParameter``, which has no elements. A backward pass leaves the gradients of the
pooled bags with the parameter. An optimizer of ``training.optimizers`` takes them from there, and sums and applies them
in one native call for all tables.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.host import BagLookup
from training.embedding.lookups import Floats, Lookups
from training.embedding.table import EmbeddingTable


class TableParameter(torch.nn.Parameter):  # type: ignore[misc]
    """Stands for a table among the parameters of a module. It has no elements; its rows are in ``table``.

    Attributes:
        table: the rows.
    """

    def __new__(cls, table: EmbeddingTable) -> "TableParameter":
        """Make a parameter without elements."""
        return super().__new__(cls, torch.empty(0))  # type: ignore[no-any-return]

    def __init__(self, table: EmbeddingTable) -> None:
        """Take the rows."""
        self.table = table
        self._gradients: list[tuple[BagLookup, Floats]] = []

    def add(self, lookup: BagLookup, gradient: Floats) -> None:
        """Keep the gradient of pooled bags until a step."""
        self._gradients.append((lookup, gradient))

    def drop(self) -> bool:
        """Forget the gradients if ``zero_grad`` was called since. Return whether there were any."""
        if self.grad is not None or not self._gradients:
            return False
        self._gradients.clear()
        return True

    def take(self) -> list[tuple[BagLookup, Floats]]:
        """Return the gradients of all backward passes since the last step, and forget them."""
        self.drop()
        gradients, self._gradients = self._gradients, []
        return gradients


class PooledBags(torch.autograd.Function):  # type: ignore[misc]
    """Pooled bags as tensors whose gradients go to the parameters of their tables."""

    @staticmethod
    def forward(
        ctx: Any, lookups: Lookups, pooled: Sequence[Floats], devices: Sequence[torch.device], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the bags of each lookup. ``tensors`` are the parameters and then the weights of all lookups."""
        ctx.lookups = lookups
        ctx.parameters, ctx.weights = tensors[: len(pooled)], tensors[len(pooled) :]
        return tuple(torch.from_numpy(array).to(device) for array, device in zip(pooled, devices, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Leave the gradients with the parameters, and return those of the weights."""
        floats = [gradient.to("cpu", torch.float32).contiguous().numpy() for gradient in gradients]
        for parameter, one in zip(ctx.parameters, ctx.lookups.row_gradients(floats), strict=True):
            parameter.add(*one)
        weights = [
            torch.from_numpy(ctx.lookups.weight_gradients(number, floats[number])).to(weight)
            if weight is not None and weight.requires_grad
            else None
            for number, weight in enumerate(ctx.weights)
        ]
        return None, None, None, *(torch.zeros_like(parameter) for parameter in ctx.parameters), *weights
