"""Processes on one machine: they synchronize through pipes, and exchange arrays through shared memory.

A meeting through gloo wakes several threads one after another, and takes milliseconds next to busy cores. A pipe wakes
the thread that waits, and its end says that a process has ended.
"""

import os
import select
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from training.shared_memory import Outbox


class Neighbours:
    """The processes of a group, which all run on this machine. Not thread-safe."""

    def __init__(
        self, rank: int, outboxes: Sequence[Sequence[Outbox]], readers: Mapping[int, int], writers: Mapping[int, int]
    ) -> None:
        """Take open outboxes and pipes.

        Args:
            rank: of this process.
            outboxes: two of each process.
            readers: of each other process, the file in which its messages come.
            writers: of each other process, the file that takes messages to it.
        """
        self._rank = rank
        self._outboxes = list(outboxes)
        self._writers = writers
        self._readers = readers
        self._polls = {other: select.poll() for other in readers}
        for other, poll in self._polls.items():
            poll.register(readers[other], select.POLLIN)
        self._came: dict[int, bytes] = {}
        self._own: Sequence[NDArray[Any]] = ()
        for fd in [*readers.values(), *writers.values()]:
            weakref.finalize(self, os.close, fd)

    def send(self, message: bytes) -> None:
        """Send every process a message of this meeting. All messages have one length.

        Raises:
            OSError: another process has ended.
        """
        for writer in self._writers.values():
            os.write(writer, message)
        self._came = {self._rank: message}

    def receive(self, seconds: float) -> tuple[list[bytes], list[int]]:
        """Wait for the messages of this meeting. If processes are late, this can be called again.

        Returns:
            the messages that have come, and the processes that have sent none.

        Raises:
            OSError: another process has ended.
        """
        end = time.monotonic() + seconds
        for rank, poll in self._polls.items():
            if rank in self._came or not poll.poll(max(0, 1e3 * (end - time.monotonic()))):
                continue
            self._came[rank] = os.read(self._readers[rank], len(self._came[self._rank]))
            if not self._came[rank]:
                raise ConnectionResetError(f"process {rank} has closed its pipe")
        return list(self._came.values()), [rank for rank in self._readers if rank not in self._came]

    def write(self, to_processes: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Keep the arrays for this process, and write those for the others into this process's outbox."""
        # The two outboxes of a process take turns. A process reads all outboxes before it comes to the next meeting
        # for arrays. That meeting ends when all have come, so all have read an outbox before it is written again.
        self._outboxes.reverse()
        self._own = to_processes[self._rank]
        of_others = [
            parts if rank != self._rank else [part[:0] for part in parts] for rank, parts in enumerate(to_processes)
        ]
        self._outboxes[0][self._rank].write(of_others)

    def read(self) -> list[Sequence[NDArray[Any]]]:
        """Return the P arrays from each process, after a meeting. They are valid until the ``write`` after the next."""
        dtype, own = self._own[0].dtype, self._own
        return [
            own if rank == self._rank else outbox.read(self._rank, dtype)
            for rank, outbox in enumerate(self._outboxes[0])
        ]


def open_neighbours(rank: int, size: int, gather: Callable[[Any], list[Any]]) -> Neighbours | None:
    """Open outboxes and pipes to all processes of a group. All processes call this.

    Args:
        rank: of this process.
        size: the number of processes.
        gather: returns what each process gives it.

    Returns:
        the processes; None if they do not share a machine that has files in memory.
    """
    others = [other for other in range(size) if other != rank]
    mine: list[Outbox] = []
    with suppress(OSError, AttributeError):  # the system may have no files in memory
        mine = [Outbox.create(size) for _ in range(2)]
    pipes = {other: os.pipe() for other in others}
    readers = {other: reader for other, (reader, _) in pipes.items()}
    paths = {other: _path(reader) for other, reader in readers.items()}
    names: list[Any] = gather(([neighbour.name for neighbour in mine], paths))
    outboxes: list[list[Outbox]] = []
    writers: dict[int, int] = {}
    with suppress(OSError, ValueError, IndexError, TypeError):
        for turn in range(2):
            outboxes.append([Outbox.open(boxes[turn], size) for boxes, _ in names])
            outboxes[turn][rank] = mine[turn]
        for other in others:
            writers[other] = os.open(names[other][1][rank], os.O_WRONLY | os.O_NONBLOCK)
    is_open = all(gather(len(writers) == len(others)))
    for _, writer in pipes.values():  # each pipe ends with the process that writes into it
        os.close(writer)
    if is_open:
        return Neighbours(rank, outboxes, readers, writers)
    for fd in [*readers.values(), *writers.values()]:
        os.close(fd)
    return None


def _path(fd: int) -> str:
    """Return the path under which other processes of this machine find an open file of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"
