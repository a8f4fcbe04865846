"""HugeCTR's embedding plugin (``hugectr_tf_ops_v2``). docs/tensorflow.md lists the differences."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kernels.host import look_up_bags
from training.arguments import shown
from training.calls.plugin import create_embedding, reset, restore, save, state
from training.calls.plugin.embedding import Embedding, ValueType
from training.calls.plugin.state import compressed, divided, found, item_of_replica, replica_number
from training.samples import Bags
from training.tf.engine import run, run_backward
from training.tf.processes import require_one

__all__ = [
    "broadcast_then_convert_to_csr",
    "create_embedding",
    "fprop",
    "fprop_experimental",
    "init",
    "reset",
    "restore",
    "save",
]

Array = NDArray[Any]
_HEADER = 3  # the embedding, the replica, and whether it is a batch of the training


def init(
    visible_gpus: Sequence[int],
    seed: int = 0,
    key_type: Literal["int64", "uint32"] = "int64",
    value_type: ValueType = "float",
    batch_size: int = 1,
    batch_size_eval: int = 1,
) -> None:
    """Begin. Every other call needs this one first, except ``reset``.

    Args:
        visible_gpus: one number for each replica. A replica gets an equal part of each batch. No GPU is used.
        seed: of the first weights. The embeddings draw different weights.
        key_type: "uint32" refuses other keys. Tensors of keys may be int64 for both types.
        value_type: of the vectors that ``fprop`` returns. "half" is float16. Rows are always float32.
        batch_size: the samples of a batch of the training.
        batch_size_eval: the samples of a batch of an evaluation.

    Raises:
        SessionError: ``init`` was called before, without ``reset``.
        TypeError: ``visible_gpus`` is not a list, or a number is not an int.
        ValueError: a value is out of range, or a batch cannot be divided between the replicas.
        RuntimeError: there are several processes, or several replicas of a strategy.
    """
    require_one("init")
    state.init(visible_gpus, seed, key_type, value_type, batch_size, batch_size_eval)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast_then_convert_to_csr(
    embedding_name: str,
    row_indices: Any,
    values: Any,
    T: Sequence[Any],  # noqa: N803
    is_training: bool = True,
) -> list[tf.Tensor]:
    """Divide the keys of a batch between the replicas. Replica r gets the r-th part of the samples.

    Args:
        embedding_name: the embedding that they are for.
        row_indices: int64[N], or [2, N] with columns that do not matter: key i is in slot ``row % slot_num`` of sample
            ``row // slot_num``. Slots without a key have no row index. Any order.
        values: int64[N], the keys. -1 is padding, and is left out.
        T: one item per GPU. What it is does not matter.
        is_training: the batch has ``batch_size`` samples, otherwise ``batch_size_eval``.

    Returns:
        what ``fprop`` takes, one tensor per replica. All batches have tensors of one shape.

    Raises:
        SessionError: ``init`` was not called.
        KeyError: there is no such embedding.
        TypeError: a tensor is of another type, or ``T`` is not a list.
        ValueError: a tensor has another shape, ``T`` has another length, or a slot or a sample has too many keys.
        IndexError: a row index is not in the batch, or a key is not of the key type.
    """
    call = "broadcast_then_convert_to_csr"
    _, plugin, embedding = found(call, embedding_name)
    most, replicas = _most_keys(embedding, plugin.samples(is_training)), plugin.replicas

    def divide(rows: Array, keys: Array) -> list[Array]:
        _, parts = divided(call, embedding_name, rows, keys, T, is_training)
        return [_packed(embedding, number, is_training, bags, most) for number, bags in enumerate(parts)]

    inputs = [tf.convert_to_tensor(row_indices), tf.convert_to_tensor(values)]
    packed = run(divide, inputs, [tf.int64] * replicas)
    for tensor in packed:
        tensor.set_shape([_HEADER + plugin.samples(is_training) * embedding.slots + 1 + most])
    return packed


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fprop(
    embedding_name: str, replica_id: Any, to_each_replica: Any, bp_trigger: Any, is_training: bool = True
) -> tf.Tensor:
    """Look up and combine the keys of one replica's samples.

    A backward pass through the vectors updates the rows. It is one step of the embedding's optimizer. With several
    replicas the step comes when all of them have passed back their gradients.

    If a gradient is infinite or NaN, the embedding skips the step, and warns. Its rows and its optimizer stay as they
    are.

    Args:
        embedding_name: the embedding.
        replica_id: the replica's number, an int or a tensor of one element.
        to_each_replica: what ``broadcast_then_convert_to_csr`` returned, or its item for this replica.
        bp_trigger: a float32 variable with one element. It connects the vectors to the backward pass, and gets a
            gradient of zero.
        is_training: keys get rows, and the vectors have a gradient. Otherwise nothing changes, and a key without a row
            counts as a vector of zeros.

    Returns:
        float32[B, slot_num, D] for the B samples of the replica, or float16. A slot without a key has zeros.

    Raises:
        SessionError: ``init`` was not called.
        KeyError: there is no such embedding.
        TypeError: an argument is of another type.
        ValueError: ``to_each_replica`` is for another replica, embedding or mode; or training has more distinct keys
            than the vocabulary.
        ReservedKeyError: a key is one of the four reserved values.
    """
    place, plugin, embedding = found("fprop", embedding_name)
    replica = replica_number(place, plugin, replica_id)
    keys = item_of_replica(place, plugin, to_each_replica, replica)
    if not isinstance(keys, tf.Tensor) or keys.dtype != tf.int64:
        expected = "to_each_replica as broadcast_then_convert_to_csr returns it"
        raise TypeError(f"{place}: expected {expected}, got {shown(keys)}")
    samples = plugin.samples(is_training)

    def read(packed: Array) -> Bags:
        return _unpacked(place, embedding, replica, is_training, packed, samples)

    return _pool(place, embedding, replica, [keys], read, samples, bp_trigger, is_training)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fprop_experimental(
    embedding_name: str,
    replica_id: Any,
    row_offset: Any,
    values: Any,
    nnz: Any,
    bp_trigger: Any,
    is_training: bool = True,
    input_buffer_reset: bool = False,
) -> tf.Tensor:
    """Do what ``fprop`` does, with the keys of one replica's samples in CSR form.

    Args:
        embedding_name: the embedding.
        replica_id: the replica's number, an int or a tensor of one element.
        row_offset: int64[B * slot_num + 1]: bag r has the keys ``row_offset[r]`` to ``row_offset[r + 1]``.
        values: int64[N], the keys. -1 is padding, and is left out.
        nnz: the number of keys that count. ``values`` may be longer.
        bp_trigger: see ``fprop``.
        is_training: see ``fprop``.
        input_buffer_reset: no effect, because no buffer is kept.

    Returns:
        float32[B, slot_num, D] for the B samples of the replica, or float16.

    Raises:
        SessionError: ``init`` was not called.
        KeyError: there is no such embedding.
        TypeError: an argument is of another type.
        ValueError: a tensor has another shape, offsets do not ascend from 0 to ``nnz``, or there are too many keys.
        IndexError: a key is not of the key type.
        ReservedKeyError: a key is one of the four reserved values.
    """
    place, plugin, embedding = found("fprop_experimental", embedding_name)
    replica = replica_number(place, plugin, replica_id)

    def read(offsets: Array, keys: Array, count: Array) -> Bags:
        [number] = count.reshape(-1)
        return compressed("fprop_experimental", embedding_name, offsets, keys, number, is_training)[1]

    tensors = [tf.convert_to_tensor(value) for value in (row_offset, values, nnz)]
    samples = plugin.samples(is_training)
    return _pool(place, embedding, replica, tensors, read, samples, bp_trigger, is_training)


def _pool(
    place: str,
    embedding: Embedding,
    replica: int,
    tensors: list[tf.Tensor],
    read: Any,
    samples: int,
    bp_trigger: Any,
    is_training: bool,
) -> tf.Tensor:
    """Return the vectors of a replica's samples, whose backward pass moves the rows."""
    trigger = tf.convert_to_tensor(bp_trigger)
    if trigger.dtype != tf.float32 or trigger.shape.num_elements() != 1:
        expected = "bp_trigger as a float32 variable with one element"
        raise TypeError(f"{place}: expected {expected}, got {shown(bp_trigger)}")
    table, shape = embedding.table, (samples, embedding.slots, embedding.table.config.dim)

    def look_up(arrays: Sequence[Array], trains: bool) -> Any:
        bags = read(*arrays)
        if trains:
            embedding.require_room(bags.keys)
        combiner = table.config.combiner
        [answer] = look_up_bags(
            [table.native], [bags.keys], [bags.row_ptrs], [combiner], [None], [bags.slots], [trains]
        )
        return answer

    def forward(*arrays: Array) -> list[Array]:
        return [look_up(arrays, is_training)[1].reshape(shape)]

    def backward(gradient: Array, _: Array, *arrays: Array) -> list[Array]:
        lookup, pooled = look_up(arrays, trains=False)
        embedding.add_gradient(replica, lookup, np.ascontiguousarray(gradient, np.float32).reshape(pooled.shape))
        return [np.zeros((), np.float32)]

    if not is_training:
        [vectors] = run(forward, tensors, [tf.float32])
        return tf.cast(tf.ensure_shape(vectors, shape), _dtype(embedding))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def pooled(trigger: tf.Tensor, *keys: tf.Tensor) -> Any:
        [vectors] = run(forward, keys, [tf.float32])
        vectors.set_shape(shape)

        def gradients(upstream: Any) -> list[Any]:
            # it takes the vectors because it needs the rows that the forward pass has made
            [zero] = run_backward(place, backward, [tf.convert_to_tensor(upstream), vectors, *keys], [tf.float32])
            return [tf.reshape(zero, trigger.shape), *[None] * len(keys)]

        return vectors, gradients

    return tf.cast(pooled(trigger, *tensors), _dtype(embedding))


def _dtype(embedding: Embedding) -> tf.DType:
    return tf.float16 if embedding.value_type == "half" else tf.float32


def _most_keys(embedding: Embedding, samples: int) -> int:
    limits = embedding.limits
    return samples * min(embedding.slots * limits.max_nnz, limits.max_feature_num)


def _packed(embedding: Embedding, replica: int, is_training: bool, bags: Bags, most: int) -> Array:
    """Return one replica's keys as one array, whose size is the same for every batch."""
    rest = np.zeros(most - len(bags.keys), np.int64)
    return np.concatenate([[embedding.number, replica, is_training], bags.row_ptrs, bags.keys, rest])


def _unpacked(place: str, embedding: Embedding, replica: int, is_training: bool, packed: Array, samples: int) -> Bags:
    """Undo ``_packed``, or raise ValueError if the keys are for something else."""
    number, of_replica, of_training = packed[:_HEADER].tolist()
    if number != embedding.number:
        came = "that of another embedding, or from before reset"
        raise ValueError(f"{place}: expected to_each_replica of this embedding, got {came}")
    if (of_replica, bool(of_training)) != (replica, is_training):
        expected = f"to_each_replica for replica {replica} with is_training={is_training}"
        raise ValueError(f"{place}: expected {expected}, got replica {of_replica} with {bool(of_training)}")
    row_ptrs, keys = np.split(packed[_HEADER:], [samples * embedding.slots + 1])
    return Bags(keys[: row_ptrs[-1]], row_ptrs, embedding.slots)
