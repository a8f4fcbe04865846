"""The processes of one training, which torchrun starts: one process, or a process group of ``torch.distributed``.

Every process calls the same methods in the same order. An exception in one process ends the others: their next call
fails when that process has exited. An exchange has a title, so processes that are at different places notice it.
"""

import atexit
import hashlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from training.neighbours import Neighbours, open_neighbours

Value = TypeVar("Value")
Ints = NDArray[np.int64]

_log = logging.getLogger(__name__)
_groups = itertools.count()
#: Of each process group that has exchanged something; None: its processes do not share a machine.
_neighbours: WeakKeyDictionary[dist.ProcessGroup, Neighbours | None] = WeakKeyDictionary()
_SIGN_S, _SILENCE_S = 1, 10


class _Total(torch.autograd.Function):  # type: ignore[misc]
    """The sum of a tensor over all processes. Each process's loss depends on it, so gradients are added up too."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, title: str, add_up: Callable[[str, torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.title, ctx.add_up = title, add_up
        total = tensor.clone()
        add_up(title, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Total.forward(ctx, gradient, f"backward pass of {ctx.title}", ctx.add_up), None, None


class Processes:
    """A group of processes, and the place of this process in the group.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take a process group that can send tensors of the CPU; None: this process alone."""
        # PyTorch aborts a process that still refers to its first group when the interpreter ends.
        self._is_world = group is not None and group is dist.group.WORLD
        self._group = None if self._is_world else group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._number = next(_groups) if self.size > 1 else 0  # every process makes its groups in the same order
        self._titles: Counter[str] = Counter()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None: this process is alone."""
        return dist.group.WORLD if self._is_world else self._group

    @property
    def is_first(self) -> bool:
        """Whether this process reports and writes for all."""
        return self.rank == 0

    def require_joined(self, place: str, expected: str) -> None:
        """Refuse to train rows in this process alone while ``torch.distributed`` runs several.

        Raises:
            RuntimeError: no process group was given, although there are several processes.
        """
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            came = f"{dist.get_world_size()} processes, each of which would train rows of its own"
            raise RuntimeError(f"{place}: expected {expected}, got {came}")

    def refuse_join(self, place: str) -> None:
        """Refuse a forward pass under ``DistributedDataParallel.join``.

        Raises:
            RuntimeError: a process whose data have ended would leave the others alone with their rows.
        """
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and wrapper._join_config.enable:
            expected = "expected the same number of batches in every process, some of them empty"
            raise RuntimeError(f"{place}: DistributedDataParallel.join() does not reach the rows; {expected}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Processes":
        """Return the same processes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to pickle what another process could not use."""
        if self.group is not None:
            raise TypeError("tables with a process_group cannot be pickled: save their state_dict()")
        return Processes, ()

    def share_of(self, items: int) -> slice:
        """Return the consecutive items out of so many that are this process's; there may be none."""
        return slice(items * self.rank // self.size, items * (self.rank + 1) // self.size)

    def total(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all processes. Its gradient is added up too. ``what`` names the tensor in errors."""
        return tensor if self.size == 1 else _Total.apply(tensor, self.numbered(f"sum of {what}"), self._add_up)

    def start_average(self, what: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to average tensors over all processes. Return a function that waits and puts the means in them."""
        if self.size == 1 or not tensors:
            return lambda: None
        title = self.numbered(f"mean of {what}")
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sent = dist.all_reduce(flat, group=self._group, async_op=True)

        def finish() -> None:
            self._finish(sent, title)
            flat.div_(self.size)
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.reshape(tensor.shape))

        return finish

    def wait(self, title: str) -> None:
        """Wait until every process has reached the place that ``title`` names."""
        if self.size > 1:
            self._meet(title)

    def from_first(self, title: str, value: Value) -> Value:
        """Return the first process's value, which can be pickled."""
        if self.size == 1:
            return value
        self._meet(title)
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def to_first(self, title: str, items: Iterator[Value]) -> Iterator[Value]:
        """Yield the items of every process in the first process, one process after the other. Elsewhere yield none.

        Every process must use up the iterator. The items can be pickled, and are sent one at a time.
        """
        self.wait(title)
        if self.is_first:
            yield from items
        for source in range(1, self.size):
            if self.rank not in (0, source):
                continue
            more: Value | None = None
            while True:
                values = [next(items, None)] if self.rank == source else [more]
                if self.rank == source:
                    dist.send_object_list(values, group=self.group, group_dst=0)
                else:
                    dist.recv_object_list(values, group=self.group, group_src=source)
                if values[0] is None:
                    break
                if self.is_first:
                    yield values[0]

    def numbered(self, act: str) -> str:
        """Return an act with its number, for the title of an exchange: ``lookup 3``."""
        self._titles[act] += 1
        return f"{act} {self._titles[act]}"

    def exchange(
        self, title: str, to_processes: Sequence[Sequence[NDArray[Any]]], received: Ints | None = None
    ) -> list[Sequence[NDArray[Any]]]:
        """Send arrays to every process, and return the arrays from process 0, from process 1, and so on.

        A process that is silent for 10 seconds is logged.

        Args:
            title: what the arrays are.
            to_processes: for each process, P one-dimensional arrays. All have one dtype.
            received: int64[processes, P], the sizes of the arrays that come; None: unknown.

        Returns:
            the P arrays from each process. They are valid until the exchange after the next.

        Raises:
            RuntimeError: another process sends arrays with another title, has ended, or was silent for the time-out of
                the process group.
        """
        if self.size == 1:
            return list(to_processes)
        if self.group not in _neighbours:
            self._meet(title)
            _neighbours[self.group] = open_neighbours(self.rank, self.size, self._gather)
        neighbours = _neighbours[self.group]
        if neighbours is None:
            self._meet(title)
            return self._exchange_messages(title, to_processes, received)
        neighbours.write(to_processes)
        self._meet(title)
        return neighbours.read()

    def _add_up(self, title: str, tensor: torch.Tensor) -> None:
        self._meet(title)
        self._finish(dist.all_reduce(tensor, group=self._group, async_op=True), title)

    def _meet(self, title: str) -> None:
        """Wait until every process is here. Raise an error in every process if one has another title."""
        digest = hashlib.blake2b(f"{self._number} {title}".encode(), digest_size=8).digest()
        neighbours = _neighbours.get(self.group)
        digests = self._digests(digest, title) if neighbours is None else self._swap(neighbours, digest, title)
        if set(digests) == {digest}:
            return
        came: list[tuple[str, int]] = self._gather((title, self._number))
        other = next(rank for rank, one in enumerate(came) if one != came[0])
        shown = [f"{one} in process {rank}" for rank, (one, _) in ((0, came[0]), (other, came[other]))]
        if came[0][1] != came[other][1]:
            shown[1] += ", which are tables of another collection"
        raise RuntimeError(f"expected the same lookups and steps in every process, got {shown[0]} and {shown[1]}")

    def _swap(self, neighbours: Neighbours, digest: bytes, title: str) -> list[bytes]:
        try:
            neighbours.send(digest)
            digests, late = neighbours.receive(_SILENCE_S)
            if late:
                self._warn_of_silence(title, late)
                assert self.group is not None
                seconds = self.group.get_group_store().timeout.total_seconds() - _SILENCE_S
                digests, late = neighbours.receive(seconds)
        except OSError as err:
            raise RuntimeError(f"{title}: another process has ended: {err}") from err
        if late:
            raise RuntimeError(f"{title}: process {_joined(late)} did not arrive for {seconds + _SILENCE_S:g} s")
        return digests

    def _digests(self, digest: bytes, title: str) -> list[bytes]:
        digests = torch.empty(self.size, dtype=torch.int64)
        mine = torch.from_numpy(np.frombuffer(digest, np.int64).copy())
        self._finish(dist.all_gather(list(digests.split(1)), mine, group=self._group, async_op=True), title)
        return [one.tobytes() for one in digests.numpy()]

    def _warn_of_silence(self, title: str, late: Sequence[int]) -> None:
        _log.warning("%s: process %d has waited %d s for process %s", title, self.rank, _SILENCE_S, _joined(late))

    def _finish(self, sent: dist.Work, title: str) -> None:
        """Wait until every process has sent what belongs to a title. After a second, leave a sign of this process."""
        silent: list[int] = []
        try:
            if self._is_done(sent, _SIGN_S):
                return
            assert self.group is not None
            store = self.group.get_group_store()
            signs = [f"hotrow/{self._number}/{rank}" for rank in range(self.size)]
            store.set(signs[self.rank], title)
            if self._is_done(sent, _SILENCE_S - _SIGN_S):
                return
            came = [store.check([sign]) and store.get(sign).decode() == title for sign in signs]
            silent = [rank for rank, has_come in enumerate(came) if not has_come]
            if silent:
                self._warn_of_silence(title, silent)
            sent.wait()
        except RuntimeError as err:  # of PyTorch, or of its store
            missing = f"process {_joined(silent)} did not arrive" if silent else "another process has ended"
            raise RuntimeError(f"{title}: {missing}: {err}") from err

    def _is_done(self, sent: dist.Work, seconds: float) -> bool:
        try:
            sent.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if sent.is_completed():
                raise
            return False
        return True

    def _gather(self, value: Any) -> list[Any]:
        """Return what each process gives, which can be pickled."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _exchange_messages(
        self, title: str, to_processes: Sequence[Sequence[NDArray[Any]]], received: Ints | None
    ) -> list[Sequence[NDArray[Any]]]:
        sent = np.array([[part.size for part in of_process] for of_process in to_processes])
        if received is None:
            sizes = torch.empty_like(torch.from_numpy(sent))
            counts = torch.from_numpy(sent.copy())
            self._finish(dist.all_to_all_single(sizes, counts, group=self._group, async_op=True), title)
            received = sizes.numpy()
        parts = [part for of_process in to_processes for part in of_process]
        # PyTorch owns the memory: a thread of gloo frees it, and must not need the interpreter for that at its end.
        dtype = torch.from_numpy(parts[0]).dtype
        flat, out = torch.empty(sent.sum(), dtype=dtype), torch.empty(received.sum(), dtype=dtype)
        np.concatenate(parts, out=flat.numpy())
        splits = received.sum(axis=1).tolist(), sent.sum(axis=1).tolist()
        self._finish(dist.all_to_all_single(out, flat, *splits, group=self._group, async_op=True), title)
        came = np.split(out.numpy(), received.reshape(-1).cumsum()[:-1])
        return [came[first : first + received.shape[1]] for first in range(0, len(came), received.shape[1])]


def _joined(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def start_processes() -> Processes:
    """Join the processes that torchrun started, or be alone without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave)  # gloo's threads must not outlive the interpreter
    return Processes(dist.group.WORLD)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
