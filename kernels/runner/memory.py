"""Memory of the runner: blocks of exactly the requested size, so AddressSanitizer catches an access one byte beyond."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES = 256  # the alignment of cudaMalloc

_libc = ctypes.CDLL(None)  # the malloc of this process, perhaps a sanitizer's
_libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.free.restype = None


class Block:
    """One allocation. NumPy arrays over it keep it alive.

    Args:
        size_bytes: may be 0.
        fill: the initial value of every byte.
    """

    def __init__(self, size_bytes: int, fill: int) -> None:
        """See the class.

        Raises:
            MemoryError: the system is out of memory.
        """
        address = ctypes.c_void_p()
        if _libc.posix_memalign(ctypes.byref(address), ALIGNMENT_BYTES, max(size_bytes, 1)) or address.value is None:
            raise MemoryError(f"cannot allocate {size_bytes} bytes for an array of the kernel runner")
        ctypes.memset(address.value, fill, max(size_bytes, 1))
        weakref.finalize(self, _libc.free, address.value)
        self.__array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address.value, False),
        }


class PinnedBlock(Block):
    """The memory of a ``Device.pinned`` array, which its type identifies."""


def allocate(
    block_type: type[Block], shape: int | Sequence[int], dtype: npt.DTypeLike, fill: int
) -> npt.NDArray[np.generic]:
    """Return a new array in its own block."""
    sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    wanted = np.dtype(dtype)
    block: Any = block_type(math.prod(sizes) * wanted.itemsize, fill)
    return np.asarray(block).view(wanted).reshape(sizes)
