"""The Horovod calls of SOK's documentation, for the one process in which TensorFlow trains: import it as ``hvd``."""

from collections.abc import Iterable
from typing import Any

from training.tf.processes import require_one


def init() -> None:
    """Begin.

    Raises:
        RuntimeError: there are several processes.
    """
    require_one("hvd.init")


def size() -> int:
    """Return the number of processes."""
    return 1


def rank() -> int:
    """Return the number of this process."""
    return 0


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return 0


def allreduce(tensor: Any, *arguments: Any, **named: Any) -> Any:
    """Return the mean over all processes: the tensor."""
    return tensor


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Do nothing, because no other process has variables."""
