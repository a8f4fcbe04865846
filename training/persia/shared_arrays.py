"""Arrays that roles hand to each other without a copy through a socket: they are in memory that both roles map.

A sender has a pool of segments, which are files that only memory holds. It copies the arrays of a message into a free
segment. The receiver reads them there. When the receiver has dropped the last of them, it marks the segment as free.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.errors import SessionError

_USED, _FREE = 1, 0
_ALIGNMENT = 64
Bytes = NDArray[np.uint8]
#: Where arrays are: the process that has the segment, its number there, and its size in bytes.
Place = tuple[int, int, int]


def aligned(size: int) -> int:
    """Return where the next array begins."""
    return size + -size % _ALIGNMENT


class Sender:
    """The segments of this process. The first byte of a segment says whether it is used."""

    def __init__(self) -> None:
        """Begin without segments."""
        self._lock = Lock()
        self._segments: dict[int, Bytes] = {}

    def write(self, arrays: Sequence[NDArray[Any]]) -> Place:
        """Copy arrays into a free segment."""
        size = _ALIGNMENT + sum(aligned(array.nbytes) for array in arrays)
        fd, memory = self._take(size)
        begin = _ALIGNMENT
        for array in arrays:
            room = memory[begin : begin + array.nbytes]
            np.copyto(room.view(array.dtype).reshape(array.shape), array)
            begin += aligned(array.nbytes)
        return os.getpid(), fd, size

    def _take(self, size: int) -> tuple[int, Bytes]:
        """Return a segment that nobody reads, and mark it as used."""
        with self._lock:
            free = [fd for fd, memory in self._segments.items() if memory[0] == _FREE]
            # a small message leaves the large segments to large messages
            fitting = [fd for fd in free if len(self._segments[fd]) >= size]
            if fitting:
                fd = min(fitting, key=lambda fd: len(self._segments[fd]))
            else:
                fd = free[0] if free else os.memfd_create("hotrow-persia")
                os.ftruncate(fd, size)
                self._segments[fd] = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            memory = self._segments[fd]
            memory[0] = _USED
        return fd, memory


class Receiver:
    """The segments of other processes that this process has mapped."""

    def __init__(self) -> None:
        """Begin without segments."""
        self._lock = Lock()
        self._maps: dict[tuple[int, int], mmap.mmap] = {}

    def read(self, place: Place) -> Bytes:
        """Return the bytes of a segment. When the last array in them is gone, the sender may use the segment again.

        Raises:
            SessionError: the segment cannot be mapped.
        """
        pid, fd, size = place
        with self._lock:
            held = self._maps.get((pid, fd))
            if held is None or len(held) < size:
                held = self._maps[pid, fd] = _mapped(pid, fd)
        memory = np.frombuffer(held, np.uint8)  # arrays in it keep this object, and not the map
        weakref.finalize(memory, _release, held).atexit = False
        return memory[:size]


def _mapped(pid: int, fd: int) -> mmap.mmap:
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            return mmap.mmap(own, 0)
        finally:
            os.close(own)
    except (OSError, ValueError) as err:
        raise SessionError(f"cannot map the memory of process {pid}: {err}") from err


def _release(held: mmap.mmap) -> None:
    held[0] = _FREE


SENDER, RECEIVER = Sender(), Receiver()
