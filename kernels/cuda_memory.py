"""Memory of GPUs and page-locked host memory: small blocks from CuPy's pools, large blocks from CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from kernels.cuda_streams import CudaStream, raising_device_faults
from kernels.device import Array

_MOST_POOLED_BYTES = 64 << 20  # larger blocks come from CUDA and are freed there


class PinnedBlock:
    """Page-locked memory, which the GPU accesses at the same address. NumPy arrays over it keep it alive."""

    def __init__(self, size_bytes: int) -> None:
        """Take it from CuPy's pool, or from CUDA if it is large."""
        # The pool finds blocks by size and frees none. So sizes are powers of two, or each new size would stay forever.
        pooled_bytes = 1 << max(size_bytes - 1, 0).bit_length()
        if pooled_bytes <= _MOST_POOLED_BYTES:
            self._memory = cupy.cuda.alloc_pinned_memory(pooled_bytes)
        else:
            self._memory = cupy.cuda.PinnedMemory(size_bytes, runtime.hostAllocPortable)
        self.__array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self._memory.ptr, False),
        }


def empty_pinned(index: int, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a new host array over a ``PinnedBlock`` of the GPU ``index``, of unknown content.

    Raises:
        MemoryError: the host has no more to lock.
        DeviceFaultError: work of the GPU has failed.
    """
    sizes, wanted = _sizes(shape), np.dtype(dtype)
    with raising_device_faults(), cupy.cuda.Device(index):
        block: Any = PinnedBlock(math.prod(sizes) * wanted.itemsize)
    array: npt.NDArray[Any] = np.asarray(block).view(wanted).reshape(sizes)
    return array


def empty_array(index: int, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return a new array of the GPU ``index``, of unknown content; during a capture, in the memory of the graph.

    Raises:
        MemoryError: the GPU has no more.
        DeviceFaultError: work of the GPU has failed.
    """
    sizes = _sizes(shape)
    with raising_device_faults(), cupy.cuda.Device(index):
        if math.prod(sizes) * np.dtype(dtype).itemsize <= _MOST_POOLED_BYTES:
            return cupy.empty(sizes, dtype)
        if cupy.cuda.get_current_stream().is_capturing():  # the memory must belong to the graph
            return cupy.empty(sizes, dtype)
        return _empty_of_its_own(sizes, dtype)


def queue_copy(target: int, source: int, size_bytes: int, stream: CudaStream) -> None:
    """Queue a copy between two addresses, of the stream's GPU or of page-locked memory; does not wait.

    Raises:
        DeviceFaultError: work of the GPU has failed.
    """
    if size_bytes:
        with raising_device_faults(), cupy.cuda.Device(stream.index):
            # CUDA finds the direction from the addresses: a device's view of pinned memory is on the host.
            runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream.cupy_stream.ptr)


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(size) for size in shape)


def _empty_of_its_own(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an array whose memory goes back to CUDA when the array is dropped.

    CuPy's pool would cut the next small array out of a large block that is free, and could then never give it back.
    """
    with cupy.cuda.using_allocator():
        try:
            return cupy.empty(shape, dtype)
        except runtime.CUDARuntimeError:  # probably out of memory: the pool may have some
            cupy.get_default_memory_pool().free_all_blocks()
            return cupy.empty(shape, dtype)
