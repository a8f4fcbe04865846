"""Persia's contexts: ``init_backend`` for a data loader, and ``TrainCtx`` for the NN worker."""

from collections import deque
from functools import cache
from threading import Condition
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from training.persia.prelude import PyPersiaBatchData
from training.persia.wire import NOTHING, Cluster, Message, Peer, peers

if TYPE_CHECKING:
    from training.persia.nn_worker import TrainCtx

__all__ = ["Backend", "TrainCtx", "init_backend"]


class Feed:
    """The batches that the data loader has sent and the NN worker has not taken yet."""

    def __init__(self, size: int) -> None:
        """Make room for so many batches."""
        self._size = size
        self._batches: deque[Message] = deque()
        self._first: int | None = None
        self._is_finished = self._is_closed = False
        self._changed = Condition()

    def begin(self, _message: Message) -> Message:
        """Wait until batches are asked for. Return the fact ``first``, the number of the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._first is not None or self._is_closed)
            return Message({}, {"first": self._first or 0})

    def put(self, message: Message) -> Message:
        """Take a batch when there is room. Return the fact ``more``: whether more batches are wanted.

        Facts: ``number`` of the batch, how many arrays ``dense <n>`` and ``target <n>`` it has.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._batches) < self._size or self._is_closed)
            self._batches.append(message)
            self._changed.notify_all()
            return Message({}, {"more": not self._is_closed})

    def finish(self, _message: Message) -> Message:
        """Learn that there are no more batches."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
        return NOTHING

    def open(self, first: int) -> None:
        """Ask the data loader for batches from this number on."""
        with self._changed:
            self._first = first
            self._changed.notify_all()

    def take(self) -> Message | None:
        """Wait for a batch, and return it; None: there is no other."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._is_finished or self._is_closed)
            if self._is_closed or not self._batches:
                return None
            self._changed.notify_all()
            return self._batches.popleft()

    def close(self) -> None:
        """Drop batches from now on, and end every wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Backend:
    """A data loader's way to the other roles. Belongs to one thread."""

    def __init__(self, cluster: Cluster) -> None:
        """Connect to the roles of a run."""
        self._workers = peers("embedding worker", cluster.embedding_workers)
        self._nn_worker = Peer("NN worker", cluster.nn_worker)
        self._number = 0
        self._first: int | None = None
        self._are_more_wanted = True

    def wait(self) -> None:
        """Wait until the NN worker asks for data.

        Raises:
            RoleError: the NN worker is gone.
        """
        if self._first is None:
            self._first = int(self._nn_worker.call("begin").facts["first"])

    def send_data(self, batch: PyPersiaBatchData) -> None:
        """Send the signs of a batch to an embedding worker, and the rest to the NN worker, when its queue has room.

        Batches that the loaded checkpoint has seen are not sent again. Nothing is sent after the NN worker has left its
        ``TrainCtx``.

        Raises:
            RoleError: a feature is missing or unknown, or a role is gone.
        """
        self.wait()
        number, self._number = self._number, self._number + 1
        assert self._first is not None
        if number < self._first or not self._are_more_wanted:
            return
        signs: dict[str, NDArray[Any]] = {}
        for name, (of_feature, row_ptrs) in batch.sparse.items():
            signs[f"signs {name}"], signs[f"row_ptrs {name}"] = of_feature, row_ptrs
        worker = self._workers[number % len(self._workers)]
        worker.call("put", signs, number=number, features=list(batch.sparse))
        rest = {f"dense {n}": np.ascontiguousarray(array) for n, array in enumerate(batch.dense)}
        rest |= {f"target {n}": np.ascontiguousarray(array) for n, array in enumerate(batch.targets)}
        counts = {"dense": len(batch.dense), "targets": len(batch.targets)}
        self._are_more_wanted = self._nn_worker.call("put", rest, number=number, **counts).facts["more"]


@cache
def _backend() -> Backend:
    return Backend(Cluster.from_environment())


def init_backend(init_output: bool = True, wait_server_ready: bool = True) -> Backend:
    """Connect a data loader to the other roles. A process has one backend.

    Args:
        init_output: must be True: the NN worker gets the rest of each batch.
        wait_server_ready: wait until the NN worker asks for data. Otherwise the first ``send_data`` waits.

    Raises:
        ValueError: ``init_output`` is False.
        SessionError: this process is not a role of a run.
        RoleError: the NN worker is gone.
    """
    if not init_output:
        raise ValueError("init_backend: expected init_output = True, got False")
    backend = _backend()
    if wait_server_ready:
        backend.wait()
    return backend


def __getattr__(name: str) -> Any:
    if name != "TrainCtx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training.persia.nn_worker import TrainCtx  # PyTorch takes seconds to import, which a data loader does not need

    return TrainCtx
