"""Divide batches between replicas, and run the forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from training.arguments import shown
from training.calls.plugin.embedding import Embedding
from training.calls.plugin.state import compressed, divided, found, item_of_replica, replica_number
from training.embedding.eager import eager
from training.embedding.gradients import PooledBags, RowGradient
from training.embedding.inputs import read_feature
from training.embedding.lookups import LocalLookups
from training.samples import Bags

_DTYPES = {"float": torch.float32, "half": torch.float16}


@dataclass(frozen=True, slots=True)
class ReplicaKeys:
    """One replica's part of a batch. ``broadcast_then_convert_to_csr`` makes it, and ``fprop`` takes it.

    Attributes:
        embedding: the embedding that it is for.
        replica: the replica's number.
        is_training: whether it is a batch of the training.
        bags: the keys.
    """

    embedding: Embedding
    replica: int
    is_training: bool
    bags: Bags


def broadcast_then_convert_to_csr(
    embedding_name: str,
    row_indices: Any,
    values: Any,
    T: Sequence[Any],  # noqa: N803
    is_training: bool = True,
) -> list[ReplicaKeys]:
    """Divide the keys of a batch between the replicas. Replica r gets the r-th part of the samples.

    Args:
        embedding_name: the embedding that they are for.
        row_indices: int64[N], or [2, N] with columns that do not matter: key i is in slot ``row % slot_num`` of sample
            ``row // slot_num``. Slots without a key have no row index. Any order.
        values: int64[N], the keys. -1 is padding, and is left out.
        T: one item per GPU. What it is does not matter.
        is_training: the batch has ``batch_size`` samples, otherwise ``batch_size_eval``.

    Returns:
        what ``fprop`` takes, one item per replica.

    Raises:
        SessionError: ``init`` was not called.
        KeyError: there is no such embedding.
        TypeError: a tensor is of another type, or ``T`` is not a list.
        ValueError: a tensor has another shape, ``T`` has another length, or a slot or a sample has too many keys.
        IndexError: a row index is not in the batch, or a key is not of the key type.
    """
    embedding, parts = divided("broadcast_then_convert_to_csr", embedding_name, row_indices, values, T, is_training)
    return [ReplicaKeys(embedding, replica, is_training, bags) for replica, bags in enumerate(parts)]


def fprop(
    embedding_name: str,
    replica_id: Any,
    to_each_replica: Any,
    bp_trigger: torch.Tensor,
    is_training: bool = True,
) -> torch.Tensor:
    """Look up and combine the keys of one replica's samples.

    A backward pass through the vectors updates the rows. It is one step of the embedding's optimizer. With several
    replicas the step comes when all of them have passed back their gradients.

    If a gradient is infinite or NaN, the embedding skips the step, and warns. Its rows and its optimizer stay as they
    are.

    Args:
        embedding_name: the embedding.
        replica_id: the replica's number, an int or a tensor of one element.
        to_each_replica: what ``broadcast_then_convert_to_csr`` returned, or its item for this replica.
        bp_trigger: a float32 parameter with one element. It connects the vectors to the backward pass, and gets a
            gradient of zero. The vectors are on its device.
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
    if not isinstance(keys, ReplicaKeys):
        expected = "to_each_replica as broadcast_then_convert_to_csr returns it"
        raise TypeError(f"{place}: expected {expected}, got {shown(keys)}")
    if keys.embedding is not embedding:
        came = f"that of {keys.embedding.table.name!r}, or from before reset"
        raise ValueError(f"{place}: expected to_each_replica of this embedding, got {came}")
    if (keys.replica, keys.is_training) != (replica, is_training):
        expected = f"to_each_replica for replica {replica} with is_training={is_training}"
        raise ValueError(f"{place}: expected {expected}, got replica {keys.replica} with {keys.is_training}")
    return _look_up(embedding, keys.bags, replica, _trigger(place, bp_trigger, is_training), is_training)


def fprop_experimental(
    embedding_name: str,
    replica_id: Any,
    row_offset: Any,
    values: Any,
    nnz: Any,
    bp_trigger: torch.Tensor,
    is_training: bool = True,
    input_buffer_reset: bool = False,
) -> torch.Tensor:
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
    embedding, bags = compressed("fprop_experimental", embedding_name, row_offset, values, nnz, is_training)
    return _look_up(embedding, bags, replica, _trigger(place, bp_trigger, is_training), is_training)


@eager
def _look_up(
    embedding: Embedding, bags: Bags, replica: int, bp_trigger: torch.Tensor, is_training: bool
) -> torch.Tensor:
    """Return the vectors [B, S, D] of a replica's samples, on the device of ``bp_trigger``."""
    table = embedding.table
    if is_training:
        embedding.require_room(bags.keys)
    lookups = LocalLookups([table], [read_feature(table.name, bags)], [is_training])
    trigger = bp_trigger if is_training else bp_trigger.detach()  # without a gradient, nothing is trained
    receiver = partial(_receive, embedding, replica, bp_trigger)
    [vectors] = PooledBags.apply(lookups, receiver, [bp_trigger.device], trigger, None)
    shape = (len(bags), embedding.slots, table.config.dim)
    answer: torch.Tensor = vectors.to(_DTYPES[embedding.value_type]).reshape(shape)
    return answer


def _receive(
    embedding: Embedding, replica: int, bp_trigger: torch.Tensor, gradients: Sequence[RowGradient | None]
) -> list[torch.Tensor | None]:
    """Take the gradient of a replica's bags. The gradient of ``bp_trigger`` is zero."""
    [gradient] = gradients
    if gradient is not None:
        embedding.add_gradient(replica, *gradient)
    return [torch.zeros_like(bp_trigger)]


def _trigger(place: str, bp_trigger: Any, is_training: bool) -> torch.Tensor:
    if not isinstance(bp_trigger, torch.Tensor) or bp_trigger.dtype != torch.float32 or bp_trigger.numel() != 1:
        expected = "bp_trigger as a float32 tensor with one element"
        raise TypeError(f"{place}: expected {expected}, got {shown(bp_trigger)}")
    if is_training and not bp_trigger.requires_grad:
        raise ValueError(f"{place}: expected bp_trigger to require a gradient, or the embedding would never learn")
    return bp_trigger
