"""Initialization: ``sok.init``, and the legacy ``sok.Init``."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import keras
import tensorflow as tf

from training.arguments import whole
from training.errors import SessionError
from training.tf.processes import require_one


@dataclass(frozen=True, slots=True)
class Start:
    """What ``init`` has decided.

    Attributes:
        seed: of the first weights.
    """

    seed: int
    _made: Iterator[int] = field(default_factory=count)

    def next_seed(self) -> int:
        """Return a seed for the next variable."""
        return (self.seed + next(self._made)) % 2**63


_start: Start | None = None
_has_batch_size = False


def init() -> None:
    """Begin. First weights depend on ``tf.random.set_seed``. A later call has no effect.

    Raises:
        RuntimeError: there are several processes or replicas, or Keras does not use TensorFlow.
    """
    global _start
    require_one("init")
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(f"init: expected Keras with the backend tensorflow, got {keras.backend.backend()}")
    if _start is None:
        with tf.init_scope():
            seed = tf.random.uniform([], maxval=2**62, dtype=tf.int64)
        _start = Start(int(seed))


def Init(global_batch_size: int, seed: int | None = None) -> str:  # noqa: N802
    """Do what ``init`` does, under the name that programs with layers use.

    Args:
        global_batch_size: the samples of a batch. No memory depends on it.
        seed: of the first weights, at least 0. None: ``tf.random.set_seed`` decides.

    Returns:
        "OK".

    Raises:
        SessionError: ``Init`` was called before.
        TypeError: an argument is of another type.
        ValueError: a number is too small.
        RuntimeError: see ``init``.
    """
    global _start, _has_batch_size
    if _has_batch_size:
        raise SessionError("Init was called before, and a process can call it only once")
    for name, number, least in (("global_batch_size", global_batch_size, 1), ("seed", seed or 0, 0)):
        whole("Init", name, number, least)
    init()
    if seed is not None:
        _start = Start(seed)
    _has_batch_size = True
    return "OK"


def started(call: str) -> Start:
    """Return what ``init`` has decided. ``call`` is for the message."""
    if _start is None:
        raise SessionError(f"{call}: call sok.init first")
    require_one(call)
    return _start
