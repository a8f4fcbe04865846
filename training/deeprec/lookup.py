"""DeepRec's fused lookups in tensors: one native pass forward, and one native pass backward."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from kernels.host import ArrayRows
from training.arguments import one_of, shown
from training.calls.deeprec import (
    PartitionStrategy,
    checked_default,
    refuse_blocknums,
    require_norm,
    split,
)
from training.calls.ids import require_ids
from training.embedding.eager import eager
from training.embedding.gradients import PooledBags, sparse_gradients, to_floats
from training.embedding.inputs import FeatureBags
from training.embedding.lookups import LocalLookups, LookedUpRows
from training.sparse_tensor import read_ids
from training.tables.config import Combiner, EmbeddingBagConfig

FusionVersion = Literal["v1", "v2"]
Params: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def fused_embedding_lookup_sparse(
    params: Params,
    sp_ids: Any,
    sparse_weights: None = None,
    partition_strategy: PartitionStrategy | None = None,
    name: str | None = None,
    combiner: Combiner | None = None,
    max_norm: float | None = None,
    default_id: int | None = None,
    prune_invalid_ids: bool = False,
    fill_empty_row: bool = True,
    blocknums: None = None,
) -> torch.Tensor:
    """Look up ids as ``fused_embedding_lookup_sparse_v2`` does, without weights.

    Args:
        params: see ``fused_embedding_lookup_sparse_v2``, also for the arguments below.
        sp_ids: rows of ids.
        sparse_weights: must be None.
        partition_strategy: "div" or "mod".
        name: of the lookup.
        combiner: how the vectors of a row become one vector.
        max_norm: the largest norm of a vector.
        default_id: the id of rows without an id.
        prune_invalid_ids: what the other function calls ``prune``.
        fill_empty_row: rows without an id get ``default_id``.
        blocknums: must be None.

    Returns:
        float32[R, D].

    Raises:
        ValueError: there are weights, or what the other function raises.
    """
    name = name or "fused_embedding_lookup_sparse"
    if sparse_weights is not None:
        reason = "version v1 has no weights; use fused_embedding_lookup_sparse_v2"
        raise ValueError(f"{name}: expected no sparse_weights: {reason}")
    return fused_embedding_lookup_sparse_v2(
        params,
        sp_ids,
        None,
        partition_strategy,
        name,
        combiner,
        max_norm,
        default_id,
        prune_invalid_ids,
        fill_empty_row,
        blocknums,
    )


def fused_embedding_lookup_sparse_v2(
    params: Params,
    sp_ids: Any,
    sparse_weights: Any = None,
    partition_strategy: PartitionStrategy | None = None,
    name: str | None = None,
    combiner: Combiner | None = None,
    max_norm: float | None = None,
    default_id: int | None = None,
    prune: bool = False,
    fill_empty_row: bool = True,
    blocknums: None = None,
) -> torch.Tensor:
    """Look up ids, and combine the vectors of each row into one vector.

    A backward pass gives each tensor of ``params`` a sparse gradient, and the weights a dense one.

    Args:
        params: the vectors, float32[V, D], whole or as a list of partitions. The ids are 0 to V - 1.
        sp_ids: rows of ids: a ``SparseTensor``, ``(indices, values, dense_shape)`` or a sparse COO tensor of PyTorch.
        sparse_weights: of the ids: a ``SparseTensor`` with their indices, or float[N].
        partition_strategy: which ids are in partition p of n. "div": ranges of ids, one after the other. "mod": ids
            with ``id % n == p``. The first ``V % n`` partitions have one vector more. With one tensor it has no effect.
        name: of the lookup, for messages.
        combiner: "sum", "mean" (the default) or "sqrtn". With weights the sum is weighted. "mean" then divides by the
            sum of the weights, and "sqrtn" by the root of the sum of their squares. If this is 0, the result is 0.
        max_norm: vectors with a larger L2 norm are scaled to it. The gradient follows the scaling.
        default_id: the id of rows without an id. None: id 0.
        prune: ids below 0 are dropped first, and ids with a weight of 0 or less unless ``combiner`` is "sum".
        fill_empty_row: rows without an id get ``default_id`` with weight 1. Otherwise their result is 0.
        blocknums: must be None.

    Returns:
        float32[R, D], on the device of ``params``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range or of another shape, or ``blocknums`` is given.
        IndexError: an id is not in the table.
    """
    name = name or "fused_embedding_lookup_sparse_v2"
    refuse_blocknums(name, blocknums)
    combiner = combiner or "mean"
    one_of(name, "combiner", combiner, get_args(Combiner))
    require_norm(name, max_norm)
    tensors = _checked(name, params)
    rows = sum(map(len, tensors))
    ids = read_ids(name, sp_ids, sparse_weights)
    if prune:
        ids = ids.without_invalid(drops_weights=combiner != "sum")
    bags = ids.bags(checked_default(name, default_id, rows) if fill_empty_row else None)
    assert bags.row_ptrs is not None
    require_ids(name, bags.keys, bags.row_ptrs, rows)
    parts = split(name, bags.keys, bags.row_ptrs, [len(tensor) for tensor in tensors], partition_strategy)
    weights = bags.weights
    if len(parts) > 1 and combiner != "sum":  # a partition does not know the weights of a bag's other ids
        weights, combiner = _shares(bags, combiner), "sum"
    of_parts = [
        FeatureBags(
            part.keys,
            part.row_ptrs,
            None if weights is None else weights if len(parts) == 1 else weights[part.places],
            1,
            bags.shape,
            tensors[0].device,
        )
        for part in parts
    ]
    return _pooled(name, tensors, of_parts, EmbeddingBagConfig(tensors[0].shape[1], combiner, max_norm=max_norm))


def fused_safe_embedding_lookup_sparse(
    embedding_weights: Params,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: Combiner = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: PartitionStrategy = "div",
    max_norm: float | None = None,
    prune: bool = True,
    blocknums: None = None,
    fusion_version: FusionVersion = "v2",
) -> torch.Tensor:
    """Look up ids that may be invalid, and combine the vectors of each row into one vector.

    Args:
        embedding_weights: ``params`` of ``fused_embedding_lookup_sparse_v2``, which explains the arguments.
        sparse_ids: rows of ids.
        sparse_weights: of the ids. Version v1 has none.
        combiner: how the vectors of a row become one vector.
        default_id: the id of rows without an id. None: the result of such a row is 0.
        name: of the lookup.
        partition_strategy: "div" or "mod".
        max_norm: the largest norm of a vector.
        prune: invalid ids are dropped.
        blocknums: must be None.
        fusion_version: "v1" or "v2". Both give the same numbers.

    Returns:
        float32[R, D].

    Raises:
        TypeError: see ``fused_embedding_lookup_sparse_v2``.
        ValueError: see there; or the version is unknown.
        IndexError: an id is not in the table.
    """
    name = name or "fused_safe_embedding_lookup_sparse"
    one_of(name, "fusion_version", fusion_version, get_args(FusionVersion))
    look_up = fused_embedding_lookup_sparse if fusion_version == "v1" else fused_embedding_lookup_sparse_v2
    return look_up(
        embedding_weights,
        sparse_ids,
        sparse_weights,
        partition_strategy,
        name,
        combiner,
        max_norm,
        default_id,
        prune,
        default_id is not None,
        blocknums,
    )


@eager
def _pooled(
    name: str, tensors: Sequence[torch.Tensor], bags: Sequence[FeatureBags], config: EmbeddingBagConfig
) -> torch.Tensor:
    """Return the sum of the pooled bags of each partition."""
    tables = [LookedUpRows(name, config, ArrayRows(to_floats(tensor), name, config.max_norm)) for tensor in tensors]
    lookups = LocalLookups(tables, bags, [False] * len(bags))
    devices, weights = [bag.device for bag in bags], [bag.weights for bag in bags]
    pooled: Sequence[torch.Tensor] = PooledBags.apply(
        lookups, partial(sparse_gradients, tensors), devices, *tensors, *weights
    )
    return pooled[0] if len(pooled) == 1 else torch.stack(tuple(pooled)).sum(dim=0)


def _checked(name: str, params: Params) -> list[torch.Tensor]:
    """Return the partitions, or raise an error if they are none of one table."""
    is_list = isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
    tensors: list[torch.Tensor] = list(params) if is_list else [params]
    for tensor in tensors:
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
        if not is_plain or tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected vectors as float32 tensors, got {shown(tensor)}")
        if tensor.dim() != 2 or tensor.shape[1] != tensors[0].shape[-1] or not tensor.shape[1]:
            shapes = ", ".join(f"{list(vectors.shape)}" for vectors in tensors)
            raise ValueError(f"{name}: expected vectors [V, D] with one D of at least 1, got {shapes}")
    if not sum(map(len, tensors)):
        raise ValueError(f"{name}: expected at least one vector, got none")
    return tensors


def _shares(bags: FeatureBags, combiner: Literal["mean", "sqrtn"]) -> torch.Tensor:
    """Return weights float32[N] whose weighted sum is the combined vector. They differentiate to those of ``bags``."""
    assert bags.row_ptrs is not None
    count = len(bags.row_ptrs) - 1
    bag_of = torch.from_numpy(np.repeat(np.arange(count), np.diff(bags.row_ptrs)))
    weights = torch.ones(len(bag_of)) if bags.weights is None else bags.weights.to("cpu", torch.float32)
    sums = torch.zeros(count).index_add(0, bag_of, weights if combiner == "mean" else weights.square())
    divisors = sums.where(sums != 0, torch.inf)  # so that a bag without weight becomes 0
    return weights / (divisors if combiner == "mean" else divisors.sqrt())[bag_of]
