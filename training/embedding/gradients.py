"""From the gradient of pooled bags to the update of rows, through PyTorch's autograd.

Autograd knows a table as a ``TableParameter``. A backward pass leaves the gradients of the pooled bags with the
parameter. An optimizer of ``training.optimizers`` takes them from there, and sums and applies them in one native call
for all tables.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from kernels.host import BagLookup
from training.embedding.lookups import Floats, Lookups
from training.embedding.table import EmbeddingTable

_MARK = 2.0**-60  # so small that it changes no norm of gradients, and exact in every sum and product


class TableParameter(torch.nn.Parameter):  # type: ignore[misc]
    """Stands for a table among the parameters of a module. It has one element; the rows are in ``table``.

    Its ``grad`` has a mark for each gradient that a backward pass has left here. So PyTorch's functions on gradients
    reach the table: ``zero_grad`` drops its gradients, and ``GradScaler`` and ``clip_grad_norm_`` scale them.

    Attributes:
        table: the rows.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Make a parameter with one element, which is 0."""
        return super().__new__(cls, torch.zeros(1))  # type: ignore[no-any-return]

    def __init__(self, table: EmbeddingTable) -> None:
        """Take the rows."""
        self.table = table
        self._gradients: list[tuple[BagLookup, Floats]] = []

    def add(self, lookup: BagLookup, gradient: Floats) -> None:
        """Keep the gradient of pooled bags until a step."""
        if not self._is_marked():
            self._gradients.clear()
            self.grad = torch.zeros_like(self)
        self.grad += _MARK if np.isfinite(gradient.sum()) else math.nan  # ``GradScaler`` looks for NaN
        self._gradients.append((lookup, gradient))

    def drop(self) -> bool:
        """Forget gradients that ``zero_grad`` has dropped. Return whether there were any."""
        if self._is_marked() or not self._gradients:
            return False
        self._gradients.clear()
        return True

    def take(self) -> tuple[list[tuple[BagLookup, Floats]], float]:
        """Return the gradients since the last step, and the factor by which PyTorch has scaled them. Forget them."""
        self.drop()
        gradients, self._gradients = self._gradients, []
        scale = float(self.grad) / (_MARK * len(gradients)) if gradients else 1.0
        self.grad = None
        return gradients, scale if math.isfinite(scale) else 1.0

    def _is_marked(self) -> bool:
        return self.grad is not None and bool(self.grad.any())


class PooledBags(torch.autograd.Function):  # type: ignore[misc]
    """Pooled bags as tensors whose gradients go to the parameters of their tables."""

    @staticmethod
    def forward(
        ctx: Any, lookups: Lookups, pooled: Sequence[Floats], devices: Sequence[torch.device], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the bags of each lookup.

        ``tensors`` are the parameters and then the weights of all lookups; None: a lookup has none.
        """
        ctx.set_materialize_grads(False)
        ctx.lookups = lookups
        ctx.parameters, ctx.weights = tensors[: len(pooled)], tensors[len(pooled) :]
        return tuple(torch.from_numpy(array).to(device) for array, device in zip(pooled, devices, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Leave the gradients with the parameters, and return those of the weights. Bags without use have none."""
        floats = [
            None if gradient is None else gradient.to("cpu", torch.float32).contiguous().numpy()
            for gradient in gradients
        ]
        needs = ctx.needs_input_grad[3:]
        if any(needs[: len(floats)]):
            for number, of_rows in enumerate(ctx.lookups.row_gradients(floats)):
                if needs[number] and of_rows is not None:
                    ctx.parameters[number].add(*of_rows)
        zeros = [torch.zeros_like(one) if needs[number] else None for number, one in enumerate(ctx.parameters)]
        weights = [
            torch.from_numpy(ctx.lookups.weight_gradients(number, gradient)).to(weight)
            if weight is not None and weight.requires_grad and gradient is not None
            else None
            for number, (weight, gradient) in enumerate(zip(ctx.weights, floats, strict=True))
        ]
        return None, None, None, *zeros, *weights
