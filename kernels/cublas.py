"""Matrix products on a GPU through the C interface of cuBLAS.

CuPy has cuBLAS too, but does not call it while a graph is captured, and TF32 is a setting of its whole process. Here
each stream has its own handle and workspace, as cuBLAS requires for capturing ("CUDA Graphs Support" in its
documentation), and each call chooses its arithmetic.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.device import Array
from kernels.errors import DeviceFaultError, DeviceUnavailableError

WORKSPACE_BYTES = 32 << 20
"""The workspace that the documentation of cuBLAS recommends for GPUs from compute capability 9.0 on."""

_NORMAL, _TRANSPOSED = 0, 1  # cublasOperation_t
_FLOAT32, _FLOAT16 = 0, 2  # cudaDataType_t
_COMPUTE_FLOAT32, _COMPUTE_TF32 = 68, 77  # cublasComputeType_t: both sum in float32
_DEFAULT_ALGORITHM = -1  # cublasGemmAlgo_t


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix, or a batch of matrices, in cuBLAS's order: by columns.

    Attributes:
        array: its memory, kept until the product is queued.
        operation: whether cuBLAS must transpose the matrix that it reads.
        leading: numbers from one column that it reads to the next.
        stride: numbers from one matrix to the next; 0 if all are the same.
    """

    array: Array
    operation: int
    leading: int
    stride: int


def factor(xp: Any, matrices: Array) -> Factor:
    """Return float[..., M, N] as a factor, copied if neither its rows nor its columns are contiguous.

    Contiguous rows are the transposed matrix if they are read by columns. So cuBLAS gets the transposed matrices, and
    all products are computed as ``(x @ y).T = y.T @ x.T``.
    """
    rows, columns = matrices.shape[-2:]
    stride = rows * columns if matrices.ndim > 2 else 0
    if matrices.flags.c_contiguous:
        return Factor(matrices, _NORMAL, max(columns, 1), stride)
    if matrices.swapaxes(-1, -2).flags.c_contiguous:
        return Factor(matrices, _TRANSPOSED, max(rows, 1), stride)
    return Factor(xp.ascontiguousarray(matrices), _NORMAL, max(columns, 1), stride)


class Cublas:
    """A handle of cuBLAS and its workspace, for the work of one stream. A lock lets one thread use it at a time.

    A captured product keeps using the workspace. So its graph must be launched on the handle's stream, or on a stream
    that is ordered with it.

    Handles are never destroyed: destroying a handle waits for all work of the GPU and breaks a graph that another
    thread captures there. A new stream takes over an unused handle. A handle that has failed is never used again.
    """

    def __init__(self, library: Any, workspace: Array, idle: deque[ctypes.c_void_p]) -> None:
        """Take a handle of the current GPU, or make one.

        Args:
            library: cuBLAS's C interface, of ``load_library``.
            workspace: uint8[``WORKSPACE_BYTES``].
            idle: the unused handles of this GPU, shared by all its ``Cublas`` objects.

        Raises:
            DeviceFaultError: cuBLAS refuses.
        """
        self._library = library
        self._workspace = workspace
        self._lock = threading.Lock()
        self._idle = idle
        self._is_sound = True
        self._handle: ctypes.c_void_p | None = None
        with suppress(IndexError):  # no check before: another thread may take the last handle
            self._handle = idle.pop()
        if self._handle is None:
            handle = ctypes.c_void_p()
            self._call("cublasCreate_v2", ctypes.byref(handle))
            self._handle = handle

    def __del__(self) -> None:
        """Put the handle back for the next stream."""
        if self._handle is not None and self._is_sound:
            self._idle.append(self._handle)

    def multiply(self, xp: Any, x: Array, y: Array, out: Array, stream_address: int, is_tf32: bool) -> None:
        """Queue ``out = x @ y``, summed in float32.

        Args:
            xp: the array namespace.
            x: float32 or float16[..., M, K].
            y: of the same type, [..., K, N], or [K, N] for all matrices of x. Neither has a dimension of 0.
            out: float32[..., M, N], C-contiguous.
            stream_address: of the CUDA stream.
            is_tf32: float32 factors may be rounded to TF32, which has 10 bits of mantissa.

        Raises:
            DeviceFaultError: cuBLAS reports an error.
        """
        if y.ndim == 2 and x.ndim > 2:  # as one tall matrix
            x, out = xp.ascontiguousarray(x).reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        if x.ndim > 3:
            x, y, out = (array.reshape(-1, *array.shape[-2:]) for array in (x, y, out))
        left, right = factor(xp, x), factor(xp, y)
        kind = _FLOAT16 if x.dtype == np.float16 else _FLOAT32
        rows, depth = x.shape[-2:]
        columns = y.shape[-1]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        with self._lock:
            self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream_address))
            # setting the stream removes the workspace
            workspace = ctypes.c_void_p(self._workspace.data.ptr)
            self._call("cublasSetWorkspace_v2", self._handle, workspace, ctypes.c_size_t(self._workspace.nbytes))
            self._call(
                "cublasGemmStridedBatchedEx",
                self._handle,
                *(ctypes.c_int(number) for number in (right.operation, left.operation, columns, rows, depth)),
                ctypes.byref(one),
                *_described(right, kind),
                *_described(left, kind),
                ctypes.byref(zero),
                *_described(Factor(out, _NORMAL, columns, rows * columns), _FLOAT32),
                ctypes.c_int(math.prod(x.shape[:-2])),
                ctypes.c_int(_COMPUTE_TF32 if is_tf32 else _COMPUTE_FLOAT32),
                ctypes.c_int(_DEFAULT_ALGORITHM),
            )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            self._is_sound = False
            raise DeviceFaultError(f"{name}: cuBLAS status {status}")


def load_library(cuda_version: int) -> Any:
    """Return cuBLAS's C interface.

    Args:
        cuda_version: the major one, 12 or 13.

    Raises:
        DeviceUnavailableError: the library was not found.
    """
    name = f"libcublas.so.{cuda_version}"
    try:
        return ctypes.CDLL(name)
    except OSError as err:
        raise DeviceUnavailableError(
            f"{name} is not found: matrix products need it. Install the CUDA toolkit, "
            f"or pip install 'hotrow[cuda{cuda_version}]' ({err})"
        ) from err


def _described(factor: Factor, kind: int) -> tuple[Any, ...]:
    address = ctypes.c_void_p(factor.array.data.ptr)
    return address, ctypes.c_int(kind), ctypes.c_int(factor.leading), ctypes.c_longlong(factor.stride)
