"""Clip gradients by their norm over several processes."""

import math
from collections.abc import Iterable

import torch

from training.embedding.parameter import TableParameter


@torch.no_grad()  # type: ignore[untyped-decorator]
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    The norms of tables whose rows are spread over processes are added up over the processes. Every process calls this
    with the same tables. The gradients of other parameters must be the same in all processes, as in
    ``DistributedDataParallel``.

    Args:
        parameters: with gradients, or None as their gradient.
        max_norm: the largest norm.
        norm_type: p of the p-norm, a number above 0.

    Returns:
        the norm of all gradients before.

    Raises:
        ValueError: ``norm_type`` is out of range.
    """
    if not 0 < norm_type < math.inf:
        raise ValueError(f"norm_type: expected a number above 0, got {norm_type}")
    every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    shards = [
        parameter for parameter in every if isinstance(parameter, TableParameter) and parameter.processes.size > 1
    ]
    others = [parameter for parameter in every if not any(parameter is shard for shard in shards)]
    total = torch.nn.utils.get_total_norm([other.grad for other in others if other.grad is not None], norm_type)
    if hasattr(total, "full_tensor"):  # of fully_shard
        total = total.full_tensor()
    total = total**norm_type
    for shard in shards:
        rows = shard.sink.rows()
        norm = torch.zeros(()) if rows is None else torch.linalg.vector_norm(rows.plain(), norm_type)
        total = total + shard.processes.total("norms", norm**norm_type).to(total.device)
    norm = total ** (1 / norm_type)
    for parameters in (shards, others):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
