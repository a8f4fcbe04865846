"""Set which processes train together: ``sok.init``, and the legacy ``sok.Init``."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.distributed as dist

from training.arguments import whole
from training.errors import SessionError
from training.processes import Processes, start_processes


@dataclass(frozen=True, slots=True)
class Start:
    """What ``init`` has decided.

    Attributes:
        processes: that train together.
        seed: of the first weights.
    """

    processes: Processes
    seed: int
    _made: Iterator[int] = field(default_factory=count)

    def next_seed(self) -> int:
        """Return a seed for the next variable. Every process gets the same."""
        return (self.seed + next(self._made)) % 2**63


_start: Start | None = None


def init(process_group: dist.ProcessGroup | None = None) -> None:
    """Say which processes train together. Every process calls it before it makes variables.

    First weights depend on ``torch.manual_seed``.

    Args:
        process_group: the processes. Its backend sends tensors of the CPU. None: the default group if there is one, or
            else the processes that torchrun started. Without torchrun this process is alone.

    Raises:
        TypeError: ``process_group`` is not a process group, for example because this process is not in it.
    """
    global _start
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"init: expected a process group that this process is in, got {process_group!r}")
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    processes = start_processes() if process_group is None else Processes(process_group)
    _start = Start(processes, torch.initial_seed())


def Init(global_batch_size: int, seed: int | None = None) -> str:  # noqa: N802
    """Do what ``init`` does, under the name that programs with layers use.

    Args:
        global_batch_size: the samples of a batch of all processes. No memory depends on it.
        seed: of the first weights, at least 0. None: that of ``torch.manual_seed``.

    Returns:
        "OK".

    Raises:
        TypeError: an argument is of another type.
        ValueError: the batch cannot be divided between the processes, or a number is too small.
    """
    global _start
    for name, number, least in (("global_batch_size", global_batch_size, 1), ("seed", seed or 0, 0)):
        whole("Init", name, number, least)
    init()
    start = started("Init")
    if global_batch_size % start.processes.size:
        expected = f"global_batch_size as a multiple of {start.processes.size}, the number of processes"
        raise ValueError(f"Init: expected {expected}, got {global_batch_size}")
    if seed is not None:
        _start = Start(start.processes, seed)
    return "OK"


def started(call: str) -> Start:
    """Return what ``init`` has decided. ``call`` is for the message."""
    if _start is None:
        raise SessionError(f"{call}: call sok.init first")
    return _start
