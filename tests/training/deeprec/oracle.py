"""The lookup's steps as plain PyTorch operations in float64, for comparison."""

import torch


def join(partitions, strategy):
    """The whole table of its partitions."""
    if strategy == "div":
        return torch.cat(partitions)
    count = len(partitions)
    ids = [torch.arange(number, number + count * len(one), count) for number, one in enumerate(partitions)]
    return torch.cat(partitions)[torch.cat(ids).argsort()]


def look_up(table, rows, ids, count, combiner, weights=None, max_norm=None, prune=False, default_id=None):
    """Prune, fill, unique, gather and combine. ``default_id`` None: rows without an id are not filled."""
    weights = torch.ones(len(ids), dtype=table.dtype) if weights is None else weights
    if prune:
        is_kept = ids >= 0
        if combiner != "sum":
            is_kept &= weights > 0
        rows, ids, weights = rows[is_kept], ids[is_kept], weights[is_kept]
    if default_id is not None:
        empty = torch.tensor([row for row in range(count) if row not in rows.tolist()], dtype=torch.int64)
        rows, ids = torch.cat([rows, empty]), torch.cat([ids, torch.full_like(empty, default_id)])
        weights = torch.cat([weights, torch.ones(len(empty), dtype=table.dtype)])
    unique, inverse = torch.unique(ids, return_inverse=True)
    vectors = table[unique]
    if max_norm is not None:
        norms = vectors.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > max_norm, vectors * (max_norm / norms.clamp(min=1e-30)), vectors)
    zeros = torch.zeros(count, table.shape[1], dtype=table.dtype)
    sums = zeros.index_add(0, rows, weights[:, None] * vectors[inverse])
    if combiner == "sum":
        return sums
    divisors = zeros[:, 0].index_add(0, rows, weights if combiner == "mean" else weights.square())
    divisors = torch.where(divisors == 0, torch.inf, divisors)  # so that such a row becomes 0
    return sums / (divisors if combiner == "mean" else divisors.sqrt())[:, None]
