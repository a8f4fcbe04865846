"""Training in TensorFlow is in one process with one replica."""

import os

import tensorflow as tf

#: How many processes a launcher has started: horovodrun, Open MPI, other MPIs, and torchrun.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
_ADVICE = "PyTorch's training.sok trains in several processes, which torchrun starts"


def require_one(call: str) -> None:
    """Refuse several processes or replicas, each of which would train rows of its own.

    Raises:
        RuntimeError: there are several.
    """
    for name in _SIZES:
        if os.environ.get(name, "1") not in ("", "1"):
            raise RuntimeError(f"{call}: expected one process, got {name}={os.environ[name]}; {_ADVICE}")
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise RuntimeError(f"{call}: expected one replica, whose lookups use all cores, got {replicas}; {_ADVICE}")
