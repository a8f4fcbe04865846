"""Memory through which the processes of one machine send each other arrays."""

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_TOKEN_BYTES = 16


class Outbox:
    """Arrays that one process has for the others, which read them.

    An outbox is a file that only memory holds, and ends with the processes that have it open. It consists of a token
    that no other outbox has, the number P of arrays for each process, their sizes int64[processes, P] and the arrays.
    """

    def __init__(self, fd: int, processes: int, access: int) -> None:
        """Take the open file of an outbox, which this process can read or write.

        Raises:
            OSError, ValueError: the file is not an outbox.
        """
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._processes = processes
        self._access = access
        self._map()

    @classmethod
    def create(cls, processes: int) -> Self:
        """Create an outbox of this process.

        Raises:
            OSError, AttributeError: the system has no files in memory.
        """
        fd = os.memfd_create("hotrow-outbox")
        os.write(fd, secrets.token_bytes(_TOKEN_BYTES) + bytes(8))
        return cls(fd, processes, mmap.ACCESS_WRITE)

    @classmethod
    def open(cls, name: tuple[str, bytes], processes: int) -> Self:
        """Open an outbox of another process to read it.

        Raises:
            OSError, ValueError: that process is on another machine, where the path names another file or none.
        """
        path, token = name
        outbox = cls(os.open(path, os.O_RDONLY | os.O_NONBLOCK), processes, mmap.ACCESS_READ)
        if outbox.name[1] != token:
            raise ValueError(f"{path}: expected the outbox of a process, got another file")
        return outbox

    @property
    def name(self) -> tuple[str, bytes]:
        """Its path for other processes of this machine, and its token."""
        return f"/proc/{os.getpid()}/fd/{self._fd}", self._memory[:_TOKEN_BYTES].tobytes()

    def write(self, to_processes: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Replace the arrays. See ``Processes.exchange``."""
        parts = [part for of_process in to_processes for part in of_process]
        header = np.array([len(to_processes[0]), *(part.size for part in parts)])
        begin = _TOKEN_BYTES + header.nbytes
        end = begin + sum(part.nbytes for part in parts)
        if end > self._memory.size:
            os.ftruncate(self._fd, 2 * end)
            self._map()
        self._memory[_TOKEN_BYTES:begin].view(np.int64)[:] = header
        np.concatenate(parts, out=self._memory[begin:end].view(parts[0].dtype))

    def read(self, process: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """Return the P arrays for a process. They change when the outbox is written."""
        if os.fstat(self._fd).st_size != self._memory.size:
            self._map()
        body = self._memory[_TOKEN_BYTES + 8 :]
        sizes_bytes = 8 * self._processes * int(self._memory[_TOKEN_BYTES:].view(np.int64)[0])
        sizes = body[:sizes_bytes].view(np.int64).reshape(self._processes, -1)
        first = sizes_bytes + int(sizes[:process].sum()) * dtype.itemsize
        ends = sizes[process].cumsum()
        return np.split(body[first : first + int(ends[-1]) * dtype.itemsize].view(dtype), ends[:-1])

    def _map(self) -> None:
        self._memory = np.frombuffer(mmap.mmap(self._fd, 0, access=self._access), np.uint8)
