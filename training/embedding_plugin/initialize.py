"""Begin, in one process."""

from collections.abc import Sequence
from typing import Literal

from training.calls.plugin import state
from training.calls.plugin.embedding import ValueType
from training.processes import Processes


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
        RuntimeError: there are several processes.
    """
    Processes().require_joined("init", "one process with several replicas")
    state.init(visible_gpus, seed, key_type, value_type, batch_size, batch_size_eval)
