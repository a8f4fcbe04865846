"""From the gradient of pooled bags to the gradients of rows, through PyTorch's autograd.

Every front end looks up bags with ``PooledBags``. Its backward pass gives the gradients of rows to a receiver. The
receiver keeps them, or turns them into gradients that PyTorch keeps. The receiver of an ``EmbeddingTable`` is a
``TableSink``: it keeps gradients until a step takes them.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import BagLookup, TrainingTable, merge_gradients, sum_row_gradients
from training.embedding.eager import eager
from training.embedding.gradient_rows import GradientRows
from training.embedding.lookups import Floats, Lookups
from training.embedding.table_gradient import TableGradient, gradient_of

#: Bags, and the gradient of their pooled vectors.
RowGradient = tuple[BagLookup, Floats]
#: Take the ``row_gradients`` of lookups, and return what PyTorch gets for each lookup's parameter.
Receiver = Callable[[Sequence[Any]], Sequence[torch.Tensor | None]]

_MOST_KEPT = 32  # gradients of passes before they are summed, so that they do not take more and more memory


class PooledBags(torch.autograd.Function):  # type: ignore[misc]
    """Pooled bags as tensors whose gradients go to a receiver."""

    @staticmethod
    def forward(
        ctx: Any, lookups: Lookups, receiver: Receiver, devices: Sequence[torch.device], *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the bags of each lookup.

        Args:
            ctx: of PyTorch.
            lookups: have the bags.
            receiver: gets the gradients of rows.
            devices: of the bags of each lookup.
            tensors: the parameter of each lookup, and then its weights. None: a lookup has none.
        """
        ctx.set_materialize_grads(False)
        ctx.lookups, ctx.receiver = lookups, receiver
        if lookups.gradients_need_rows:
            ctx.save_for_backward(*tensors)  # so PyTorch raises an error if they have changed since
        return tuple(torch.from_numpy(array).to(device) for array, device in zip(lookups.pooled, devices, strict=True))

    @staticmethod
    @eager
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Give the receiver the gradients of rows, and return those of the weights. Unused bags have none."""
        count = len(gradients)
        weights = ctx.saved_tensors[count:] if ctx.lookups.gradients_need_rows else [None] * count
        needs = ctx.needs_input_grad[3:]
        floats = [None if gradient is None else to_floats(gradient) for gradient in gradients]
        of_parameters: Sequence[torch.Tensor | None] = [None] * count
        if any(needs[:count]):
            of_rows = zip(ctx.lookups.row_gradients(floats), needs[:count], strict=True)
            of_parameters = ctx.receiver([one if is_needed else None for one, is_needed in of_rows])
        of_weights = [
            torch.from_numpy(ctx.lookups.weight_gradients(number, gradient)).to(weights[number])
            if is_needed and gradient is not None
            else None
            for number, (gradient, is_needed) in enumerate(zip(floats, needs[count:], strict=True))
        ]
        return None, None, None, *of_parameters, *of_weights


class TableSink:
    """The gradients of a table's rows, until ``clear``.

    A step reads them as backward passes have left them. They are summed only if somebody reads the sum, which may then
    be changed in place, or after many passes.

    Attributes:
        hooks: are called with the sum of each backward pass, and may return another one.
    """

    _is_shard = False

    def __init__(self) -> None:
        """Begin without gradients."""
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self._arrived: dict[int, list[Any]] = defaultdict(list)  # in backward passes that have not ended
        self._kept: list[RowGradient] = []
        self._summed: TableGradient | None = None  # together with ``_kept`` all gradients

    def __bool__(self) -> bool:
        """Return whether there are gradients."""
        return bool(self._kept) or self._summed is not None

    def receive(self, gradient: Any) -> None:
        """Take a gradient in a backward pass. It counts once the pass gets to the parameter, see ``keep``."""
        self._arrived[backward_pass()].append(gradient)

    def keep(self) -> None:
        """Keep what this backward pass has left. ``torch.autograd.grad`` does not call this."""
        arrived = self._arrived.pop(backward_pass(), [])
        if not arrived or not self.hooks:
            self._keep_all(arrived)
            return
        gradient = self._hooked(self._sum(arrived))
        self.rows()
        self._add(gradient)

    def rows(self) -> TableGradient | None:
        """Return the sum float32[U, D] of the gradients of each row that has one. None: there are no gradients."""
        if self._kept:
            kept, self._kept = self._kept, []
            self._add(self._sum(kept))
        return self._summed

    def replace(self, gradient: TableGradient) -> None:
        """Put another gradient in the place of all."""
        self._kept, self._summed = [], gradient

    def clear(self) -> None:
        """Forget all gradients."""
        self._arrived.clear()
        self._kept, self._summed = [], None

    def gradients(self) -> Sequence[RowGradient]:
        """Return all gradients, for a step."""
        if self._summed is None:
            return self._kept
        self.rows()
        return [_with_lookup(self._summed)]

    def _keep_all(self, gradients: Sequence[RowGradient]) -> None:
        self._kept += gradients
        if len(self._kept) >= _MOST_KEPT:
            self.rows()

    def _hooked(self, gradient: TableGradient) -> TableGradient:
        for hook in list(self.hooks.values()):
            changed = hook(gradient)
            if changed is not None:
                gradient = gradient_of(changed, gradient.rows[0].table, gradient)
        return gradient

    def _add(self, gradient: TableGradient) -> None:
        if self._summed is not None:
            gradient = self._sum([_with_lookup(one) for one in (self._summed, gradient)])
        self._summed = gradient

    def _sum(self, gradients: Sequence[RowGradient]) -> TableGradient:
        lookups, floats = zip(*gradients, strict=True)
        lookup, sums = merge_gradients(lookups, floats)
        assert isinstance(lookup.table, TrainingTable)
        rows = GradientRows(lookup.table, len(sums), lookup, self._is_shard)
        return TableGradient.of(torch.from_numpy(sums), rows)


def sparse_gradients(
    tensors: Sequence[torch.Tensor], gradients: Sequence[RowGradient | None]
) -> list[torch.Tensor | None]:
    """Return each gradient as a sparse gradient of a tensor [V, D], in the order of its rows."""
    given = [gradient for gradient in gradients if gradient is not None]
    sums = iter(sum_row_gradients([lookup for lookup, _ in given], [floats for _, floats in given]))
    return [
        None if one is None else sparse_gradient(*next(sums), tensor)
        for tensor, one in zip(tensors, gradients, strict=True)
    ]


def backward_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1: it is in none."""
    number: int = torch._C._current_graph_task_id()  # PyTorch's register_multi_grad_hook uses it too
    return number


def to_floats(tensor: torch.Tensor) -> Floats:
    """Return a tensor's numbers as float32 in RAM, without a copy if they are there."""
    floats: Floats = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return floats


def _with_lookup(gradient: TableGradient) -> RowGradient:
    [rows] = gradient_of(gradient, gradient.rows[0].table).rows  # torch.utils.swap_tensors may have changed it
    assert rows.lookup is not None  # only those that hooks get have none
    return rows.lookup, to_floats(gradient.plain())


def sparse_gradient(rows: NDArray[np.int64], values: Floats, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of a tensor. The rows are ascending."""
    gradient = torch.sparse_coo_tensor(
        torch.from_numpy(rows)[None], torch.from_numpy(values), like.shape, is_coalesced=True, check_invariants=False
    )
    return gradient.to(like.device)
