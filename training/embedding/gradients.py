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
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        self._gradients: list[tuple[BagLookup, Floats]] = []  # their marks are in ``grad``
        self._returned: list[tuple[BagLookup, Floats]] = []  # ``torch.autograd`` has their marks
        self._marks_before = 0.0
        self.register_post_accumulate_grad_hook(TableParameter._keep)

    def add(self, lookup: BagLookup, gradient: Floats) -> torch.Tensor:
        """Take the gradient of pooled bags in a backward pass, and return its mark."""
        self._marks_before = self._marks()
        self._returned.append((lookup, gradient))
        return torch.full_like(self, _MARK if np.isfinite(gradient.sum()) else math.nan)  # ``GradScaler`` looks for NaN

    def drop(self) -> None:
        """Forget gradients that ``zero_grad`` has dropped."""
        if not self._marks():
            self._gradients.clear()
            self._returned.clear()

    def take(self) -> tuple[list[tuple[BagLookup, Floats]], float]:
        """Return the gradients since the last step, and the factor by which PyTorch has scaled them. Forget them.

        Raises:
            RuntimeError: ``grad`` was set to something else than the result of one call of ``torch.autograd.grad``.
        """
        marks, gradients, returned = self._marks(), self._gradients, self._returned
        self._gradients, self._returned, self.grad = [], [], None
        if not marks:
            return [], 1.0
        if not gradients and marks == len(returned):
            gradients = returned
        if not gradients:
            raise RuntimeError(f"table {self.table.name!r}: expected a gradient that backward() has left")
        scale = marks / len(gradients)
        return gradients, scale if math.isfinite(scale) else 1.0

    def _marks(self) -> float:
        return 0.0 if self.grad is None else float(self.grad) / _MARK

    def _keep(self) -> None:
        """Keep the gradients whose marks ``backward`` has just added to ``grad``."""
        if not self._returned:  # something else has a gradient, such as ``0 * parameter.sum()``
            return
        if not self._marks_before:
            self._gradients.clear()
        added = self._marks() - self._marks_before
        count = round(added) if math.isfinite(added) else len(self._returned)
        self._gradients += self._returned[len(self._returned) - count :]
        self._returned.clear()


def _refuse_tables(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    """Refuse a step that would not move the rows."""
    if getattr(optimizer, "steps_tables", False):
        return
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if isinstance(parameter, TableParameter) and parameter.grad is not None:
            came = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise TypeError(f"table {parameter.table.name!r}: expected an optimizer of training.optimizers, got {came}")


register_optimizer_step_pre_hook(_refuse_tables)


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
        marks: list[torch.Tensor | None] = [None] * len(floats)
        if any(needs[: len(floats)]):
            for number, of_rows in enumerate(ctx.lookups.row_gradients(floats)):
                if needs[number] and of_rows is not None:
                    marks[number] = ctx.parameters[number].add(*of_rows)
        weights = [
            torch.from_numpy(ctx.lookups.weight_gradients(number, gradient)).to(weight)
            if weight is not None and weight.requires_grad and gradient is not None
            else None
            for number, (weight, gradient) in enumerate(zip(ctx.weights, floats, strict=True))
        ]
        return None, None, None, *marks, *weights
