"""Pooled bags composed of plain PyTorch operations in float64, for comparison."""

import torch


def pool(rows, bags, weights, combiner, max_norm=None):
    """Combine rows [V, D] to one vector per bag; ``bags`` has row numbers, ``weights`` a tensor per bag or None."""
    pooled = []
    for number, bag in enumerate(bags):
        taken = rows[torch.tensor(bag, dtype=torch.int64)]
        if max_norm is not None:
            norms = taken.norm(dim=1, keepdim=True)
            taken = torch.where(norms > max_norm, taken * (max_norm / norms.clamp(min=1e-30)), taken)
        weight = torch.ones(len(bag), dtype=rows.dtype) if weights is None else weights[number]
        total = (weight[:, None] * taken).sum(dim=0)
        divisor = {"sum": torch.ones(()), "mean": weight.sum(), "sqrtn": weight.square().sum().sqrt()}[combiner]
        pooled.append(total / divisor if bag and divisor != 0 else 0 * total)
    return torch.stack(pooled) if pooled else rows.new_zeros((0, rows.shape[1]))


def flat(bags):
    """Return the items of all bags, and the CSR offsets."""
    offsets = [0]
    for bag in bags:
        offsets.append(offsets[-1] + len(bag))
    return [item for bag in bags for item in bag], offsets
