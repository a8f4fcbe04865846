"""Triton's system shared memory extension: regions of POSIX shared memory that clients of this machine register."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import RequestError

_FOLDER = Path("/dev/shm")
#: Each region is an open file in each worker.
MOST_REGIONS = 256


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Where a tensor is: a region, and bytes of it."""

    region: str
    offset: int
    size_bytes: int


class _Memory:
    """An open file of POSIX shared memory; closed with the last reference to this object."""

    def __init__(self, key: str) -> None:
        """Open it, if it is a regular file; OSError if it cannot be opened."""
        self.path = _FOLDER / key.removeprefix("/")
        if not stat.S_ISREG(os.stat(self.path, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # another file has its name now
            raise OSError(errno.EINVAL, "not a regular file")

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was never opened
            os.close(self._descriptor)

    def size_bytes(self) -> int:
        """Return its size now.

        Raises:
            RequestError: another file has its name now, so the client works with other memory.
        """
        now = os.fstat(self._descriptor)
        with suppress(OSError):  # without a name, processes that have it open still share it
            named = os.stat(self.path, follow_symlinks=False)
            if (named.st_dev, named.st_ino) != (now.st_dev, now.st_ino):
                raise RequestError("its memory was replaced; unregister the region and register it again")
        return now.st_size

    def read(self, begin: int, size_bytes: int) -> bytes:
        """Return bytes from ``begin`` on; fewer bytes if the memory ends. OSError if it cannot be read."""
        return os.pread(self._descriptor, size_bytes, begin)

    def write(self, begin: int, data: bytes) -> None:
        """Write ``data`` at ``begin``; OSError if there is no room for all of it."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, begin)
            rest, begin = rest[written:], begin + written


@dataclass(frozen=True, slots=True)
class _Region:
    """A registered region: the name of its POSIX shared memory, its bytes from ``offset`` on, and the open file."""

    key: str
    offset: int
    size_bytes: int
    memory: _Memory


class SharedMemory:
    """The registered regions. Every method may be called from any thread.

    Tensors are copied, because a client may write to the memory at any time. The memory is read as a file and is not
    mapped: a client that makes it smaller would otherwise kill the server.
    """

    def __init__(self) -> None:
        """Start without regions."""
        self._lock = threading.Lock()  # guards changes of the regions; never held while bytes are copied
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Open the POSIX shared memory ``key``, such as ``"/input"``, as the region ``name``.

        Raises:
            RequestError: the name is taken, there are ``MOST_REGIONS`` already, or there is no such memory, or it is
                smaller than the region.
        """
        where = f"shared memory region {name[:64]!r}"
        file = key.removeprefix("/")
        if not file or "/" in file or "\0" in file or file in (".", ".."):
            raise RequestError(f"{where}: key: expected the name of a POSIX shared memory, got {key[:64]!r}")
        if offset < 0 or size_bytes < 1:
            raise RequestError(f"{where}: expected offset >= 0 and byte_size >= 1, got {offset} and {size_bytes}")
        with self._lock:
            if name in self._regions:
                raise RequestError(f"{where}: already registered")
            if len(self._regions) >= MOST_REGIONS:
                raise RequestError(f"{where}: {MOST_REGIONS} regions are registered; the server accepts no more")
            try:
                memory = _Memory(key)
                has = memory.size_bytes()
            except OSError as err:
                raise RequestError(f"{where}: key {key[:64]!r}: cannot be opened: {err.strerror}") from err
            if offset + size_bytes > has:
                raise RequestError(f"{where}: needs {offset + size_bytes:,} bytes, but {key[:64]!r} has {has:,}")
            self._regions[name] = _Region(key, offset, size_bytes, memory)

    def unregister(self, name: str = "") -> None:
        """Close a region, or all regions, after running copies; an unknown name is no error, as in Triton."""
        with self._lock:
            for known in [name] if name else list(self._regions):
                self._regions.pop(known, None)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Return Triton's status objects of a region, or of all regions.

        Raises:
            RequestError: no region has this name.
        """
        with self._lock:
            if name and name not in self._regions:
                raise _unknown(name)
            return [
                {"name": known, "key": region.key, "offset": region.offset, "byte_size": region.size_bytes}
                for known, region in sorted(self._regions.items())
                if name in ("", known)
            ]

    def read(self, part: RegionPart) -> bytes:
        """Return a copy of a part.

        Raises:
            RequestError: no region has this name, it has not so many bytes, or its memory has changed.
        """
        with _about(part.region):
            begin, memory = self._place(part)
            data = memory.read(begin, part.size_bytes)
            if len(data) < part.size_bytes:
                raise RequestError("its memory was made smaller")
        return data

    def write(self, part: RegionPart, data: bytes) -> RegionPart:
        """Write to the beginning of a part, and return the part that was written.

        Raises:
            RequestError: no region has this name, the part is too small, its memory has changed, or the system has no
                room for it. Nothing is written, or a part of ``data``.
        """
        if len(data) > part.size_bytes:
            raise RequestError(f"needs {len(data):,} bytes, but shared_memory_byte_size is {part.size_bytes:,}")
        with _about(part.region):
            begin, memory = self._place(part)
            memory.write(begin, data)
        return RegionPart(part.region, part.offset, len(data))

    def _place(self, part: RegionPart) -> tuple[int, _Memory]:
        """Return where in its memory a part begins, and the memory."""
        region = self._regions.get(part.region)
        if region is None:
            raise RequestError("not registered")
        if part.offset + part.size_bytes > region.size_bytes:
            span = f"bytes {part.offset:,} to {part.offset + part.size_bytes:,}"
            raise RequestError(f"{span} are not within its {region.size_bytes:,} bytes")
        begin = region.offset + part.offset
        if begin + part.size_bytes > region.memory.size_bytes():
            raise RequestError("its memory was made smaller")
        return begin, region.memory


@contextmanager
def located(place: str) -> Iterator[None]:
    """Add the tensor's place to errors about its region."""
    try:
        yield
    except RequestError as err:
        raise RequestError(f"{place}: {err}") from err


@contextmanager
def _about(region: str) -> Iterator[None]:
    """Name the region in errors, also in those of the system."""
    try:
        yield
    except RequestError as err:
        raise RequestError(f"shared memory region {region[:64]!r}: {err}") from err
    except OSError as err:
        raise RequestError(f"shared memory region {region[:64]!r}: {err.strerror}") from err


def _unknown(name: str) -> RequestError:
    return RequestError(f"shared memory region {name[:64]!r}: not registered")


def no_cuda_shared_memory(name: str) -> RequestError:
    """The error for a client that registers CUDA shared memory."""
    reason = "CUDA shared memory is not supported; use system shared memory"
    return RequestError(f"shared memory region {name[:64]!r}: {reason}")
