"""Triton's system shared memory extension: regions of POSIX shared memory that clients of this machine register."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import RequestError

_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Where a tensor is: a region, and bytes of it."""

    region: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Region:
    """A registered region: the name of its POSIX shared memory, its bytes from ``offset`` on, and an open file."""

    key: str
    offset: int
    size_bytes: int
    descriptor: int


class SharedMemory:
    """The registered regions. Every method may be called from any thread.

    Tensors are copied, because a client may write to the memory at any time. The memory is read as a file and is not
    mapped: a client that makes it smaller would otherwise kill the server.
    """

    def __init__(self) -> None:
        """Start without regions."""
        self._lock = threading.Lock()  # held while bytes are copied, so no file is closed meanwhile
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Open the POSIX shared memory ``key``, such as ``"/input"``, as the region ``name``.

        Raises:
            RequestError: the name is taken, or there is no such memory, or it is smaller than the region.
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
            try:
                descriptor = os.open(_FOLDER / file, os.O_RDWR | os.O_NOFOLLOW)
            except OSError as err:
                raise RequestError(f"{where}: key {key[:64]!r}: cannot be opened: {err.strerror}") from err
            has = os.fstat(descriptor).st_size
            if offset + size_bytes > has:
                os.close(descriptor)
                raise RequestError(f"{where}: needs {offset + size_bytes:,} bytes, but {key[:64]!r} has {has:,}")
            self._regions[name] = _Region(key, offset, size_bytes, descriptor)

    def unregister(self, name: str = "") -> None:
        """Close a region, or all regions; an unknown name is no error, as in Triton."""
        with self._lock:
            for known in [name] if name else list(self._regions):
                region = self._regions.pop(known, None)
                if region is not None:
                    os.close(region.descriptor)

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
            RequestError: no region has this name, or it has not so many bytes.
        """
        with self._lock:
            begin, region = self._place(part)
            data = os.pread(region.descriptor, part.size_bytes, begin)
        if len(data) < part.size_bytes:
            raise RequestError(f"shared memory region {part.region[:64]!r}: its memory was made smaller")
        return data

    def write(self, part: RegionPart, data: bytes) -> RegionPart:
        """Write to the beginning of a part, and return the part that was written.

        Raises:
            RequestError: no region has this name, or the part is too small.
        """
        if len(data) > part.size_bytes:
            raise RequestError(f"needs {len(data):,} bytes, but shared_memory_byte_size is {part.size_bytes:,}")
        with self._lock:
            begin, region = self._place(part)
            os.pwrite(region.descriptor, data, begin)
        return RegionPart(part.region, part.offset, len(data))

    def _place(self, part: RegionPart) -> tuple[int, _Region]:
        """Return where in its memory a part begins, and its region."""
        region = self._regions.get(part.region)
        if region is None:
            raise _unknown(part.region)
        if part.offset + part.size_bytes > region.size_bytes:
            span = f"bytes {part.offset:,} to {part.offset + part.size_bytes:,}"
            reason = f"{span} are not within its {region.size_bytes:,} bytes"
            raise RequestError(f"shared memory region {part.region[:64]!r}: {reason}")
        return region.offset + part.offset, region


@contextmanager
def located(place: str) -> Iterator[None]:
    """Add the tensor's place to errors about its region."""
    try:
        yield
    except RequestError as err:
        raise RequestError(f"{place}: {err}") from err


def _unknown(name: str) -> RequestError:
    return RequestError(f"shared memory region {name[:64]!r}: not registered")


def no_cuda_shared_memory(name: str) -> RequestError:
    """The error for a client that registers CUDA shared memory."""
    reason = "CUDA shared memory is not supported; use system shared memory"
    return RequestError(f"shared memory region {name[:64]!r}: {reason}")
