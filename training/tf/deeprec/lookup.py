"""DeepRec's fused lookups in variables of TensorFlow: one native pass forward, and one native pass backward."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from training.arguments import one_of, shown
from training.calls.deeprec import PartitionStrategy, checked_default, refuse_blocknums, require_norm, split
from training.calls.ids import IdRows, Ints, require_ids
from training.tables.config import Combiner
from training.tf.engine import Ids, pool, run
from training.tf.ids import read_ids

FusionVersion = Literal["v1", "v2"]
Array = NDArray[Any]


def fused_embedding_lookup_sparse(
    params: Any,
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
) -> tf.Tensor:
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


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fused_embedding_lookup_sparse_v2(
    params: Any,
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
) -> tf.Tensor:
    """Look up ids, and combine the vectors of each row into one vector.

    A backward pass gives each tensor of ``params`` an ``IndexedSlices``. The weights get a gradient too.

    Args:
        params: the vectors, float32[V, D], whole or as a list of partitions. The ids are 0 to V - 1.
        sp_ids: rows of ids: a ``tf.SparseTensor`` or a ``tf.RaggedTensor``.
        sparse_weights: of the ids, in the same form or float[N].
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
        float32[R, D].

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
    sizes = [int(tensor.shape[0]) for tensor in tensors]
    ids = read_ids(name, sp_ids, sparse_weights)
    default = checked_default(name, default_id, sum(sizes)) if fill_empty_row else None
    given, weights = ids.weights, None

    def prepare(*arrays: Array) -> list[Array]:
        rows = ids.read(*arrays[1:])
        if given is not None and len(arrays[0]) != len(rows.ids):
            expected = f"a weight for each of {len(rows.ids)} ids"
            raise ValueError(f"{name}: expected {expected}, got {len(arrays[0])} weights")
        if prune:
            is_kept = rows.ids >= 0
            if given is not None and combiner != "sum":
                is_kept &= rows.in_order(arrays[0]) > 0
            rows = rows.select(is_kept)
        rows = rows if default is None else rows.filled(default)
        require_ids(name, rows.ids, rows.row_ptrs, sum(sizes))
        of_parts = [
            array
            for part in split(name, rows.ids, rows.row_ptrs, sizes, partition_strategy)
            for array in (part.keys, part.row_ptrs, part.places)
        ]
        places = np.arange(len(rows.ids)) if rows.places is None else rows.places
        return [rows.row_ptrs, places, *of_parts]

    split(name, np.empty(0, np.int64), np.zeros(1, np.int64), sizes, partition_strategy)  # refuses wrong partitions
    nothing = tf.zeros(0) if given is None else given
    answers = run(prepare, [nothing, *ids.tensors], [tf.int64] * (2 + 3 * len(tensors)))
    for answer in answers:
        answer.set_shape([None])
    row_ptrs, places, *of_parts = answers
    if given is not None:
        weights = tf.where(places < 0, 1.0, tf.gather(given, tf.maximum(places, 0)))
    if len(tensors) > 1 and combiner != "sum":  # a partition does not know the weights of a row's other ids
        weights, combiner = _shares(row_ptrs, places, weights, combiner), "sum"
    variables = [_Params(tensor, max_norm) for tensor in tensors]
    parts = []
    for keys, ptrs, some in zip(of_parts[::3], of_parts[1::3], of_parts[2::3], strict=True):
        of_part = None if weights is None else tf.gather(weights, some)
        parts.append(Ids(name, [keys, ptrs], IdRows, of_part))
    return tf.add_n(pool(variables, parts, [combiner] * len(parts), trains=False))


def fused_safe_embedding_lookup_sparse(
    embedding_weights: Any,
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
) -> tf.Tensor:
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


class _Params(NamedTuple):
    """Vectors, as ``engine.InArray``."""

    params: Any
    max_norm: float | None
    has_all_rows: bool = True

    def locate(self, place: str, ids: IdRows, trains: bool) -> Ints:
        return ids.ids


def _checked(name: str, params: Any) -> list[Any]:
    """Return the partitions, or raise an error if they are none of one table."""
    is_list = isinstance(params, Iterable) and not hasattr(params, "shape")
    tensors = [
        one if hasattr(one, "handle") else tf.convert_to_tensor(one) for one in (params if is_list else [params])
    ]
    for tensor in tensors:
        if tensor.dtype != tf.float32:
            raise TypeError(f"{name}: expected vectors as float32 tensors, got {shown(tensor)}")
        sizes: Sequence[Any] = tensor.shape.as_list()
        if len(sizes) != 2 or sizes[0] is None or sizes[1] != tensors[0].shape[-1] or not sizes[1]:
            shapes = ", ".join(str(vectors.shape.as_list()) for vectors in tensors)
            raise ValueError(f"{name}: expected vectors [V, D] with one D of at least 1, got {shapes}")
    if not sum(int(tensor.shape[0]) for tensor in tensors):
        raise ValueError(f"{name}: expected at least one vector, got none")
    return tensors


def _shares(row_ptrs: tf.Tensor, places: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> tf.Tensor:
    """Return weights float32[N] whose weighted sum is the combined vector."""
    counts = row_ptrs[1:] - row_ptrs[:-1]
    row_of = tf.repeat(tf.range(tf.size(counts)), counts)
    own = tf.ones(tf.size(places)) if weights is None else weights
    sums = tf.math.unsorted_segment_sum(own if combiner == "mean" else tf.square(own), row_of, tf.size(counts))
    divisors = tf.where(sums != 0, sums, np.inf)  # so that a row without weight becomes 0
    return own / tf.gather(divisors if combiner == "mean" else tf.sqrt(divisors), row_of)
