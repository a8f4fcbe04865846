"""A mapped file without an open descriptor: a model may have more files than a process may open."""

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.model.regular_file import open_regular

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path, dtype: str | np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the file's first bytes as a read-only array. It is mapped until the array and its views are gone.

    Unlike ``numpy.memmap``, whose ``mmap`` keeps a descriptor.

    Raises:
        OSError: the file cannot be opened or mapped, or is not a regular file.
        ValueError: the file is shorter than the array, or the array is empty.
    """
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with open_regular(path) as file:
        descriptor = file.fileno()
        found = os.fstat(descriptor).st_size
        if not 0 < size_bytes <= found:
            raise ValueError(f"{path}: expected at least {size_bytes:,} bytes, found {found:,}")
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_byte * size_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    array: NDArray[Any] = np.frombuffer(memoryview(memory), dtype).reshape(shape)
    array.flags.writeable = False
    return array
