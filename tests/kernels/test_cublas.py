"""The arguments of products for cuBLAS, against a stub that interprets them as cuBLAS's documentation says."""

import ctypes
import gc
from collections import deque
from itertools import count
from threading import Barrier, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.cublas import Cublas, load_library
from kernels.errors import DeviceFaultError, DeviceUnavailableError

TYPES = {0: np.float32, 2: np.float16}


class Memory:
    """A pointer like that of CuPy's arrays."""

    def __init__(self, array):
        self.ptr = array.ctypes.data


class HostArray(np.ndarray):
    """A host array with CuPy's interface for its address."""

    @property
    def data(self):
        return Memory(self)


class Library:
    """The functions of cuBLAS that Hotrow uses, on host memory."""

    def __init__(self, status=0):
        self.status, self.calls, self.types, self.made, self.used = status, [], [], [], []
        self.handles = count(7)

    def cublasCreate_v2(self, handle):  # noqa: N802 - the library's names
        handle._obj.value = next(self.handles)
        self.made.append(handle._obj.value)
        return self.status

    def cublasSetStream_v2(self, handle, stream):  # noqa: N802
        self.used.append(handle.value)
        self.calls.append(("stream", stream.value))
        return 0

    def cublasSetWorkspace_v2(self, handle, address, size):  # noqa: N802
        self.calls.append(("workspace", size.value))
        return 0

    def cublasGemmStridedBatchedEx(self, handle, *arguments):  # noqa: N802
        values = [getattr(a, "_obj", a).value for a in arguments]
        op_a, op_b, m, n, k, alpha, *rest = values
        (a, a_type, lda, a_step), (b, b_type, ldb, b_step), beta = rest[:4], rest[4:8], rest[8]
        c, c_type, ldc, c_step, matrices, compute, _ = rest[9:]
        assert (alpha, beta, c_type) == (1, 0, 0)
        self.types.append((a_type, b_type, compute))

        def matrix(address, kind, leading, step, number, rows, columns):
            """A column-major matrix in memory."""
            item = np.dtype(TYPES[kind]).itemsize
            size = leading * (columns - 1) + rows
            raw = (ctypes.c_char * (size * item)).from_address(address + number * step * item)
            strides = (item, leading * item)
            return np.lib.stride_tricks.as_strided(np.frombuffer(raw, TYPES[kind]), (rows, columns), strides)

        for number in range(matrices):
            left = matrix(a, a_type, lda, a_step, number, *((k, m) if op_a else (m, k)))
            right = matrix(b, b_type, ldb, b_step, number, *((n, k) if op_b else (k, n)))
            product = (left.T if op_a else left).astype(np.float32) @ (right.T if op_b else right).astype(np.float32)
            matrix(c, c_type, ldc, c_step, number, m, n)[...] = product
        return self.status


def host(array):
    return array.view(HostArray)


NAMESPACE = SimpleNamespace(ascontiguousarray=lambda array: host(np.ascontiguousarray(array)))


def cublas(library, idle=None, size=1):
    return Cublas(library, host(np.empty(size, np.uint8)), deque() if idle is None else idle)


def multiply(by, dtype=np.float32, is_tf32=False, stream=0):
    one = host(np.ones((1, 1), dtype))
    by.multiply(NAMESPACE, one, one, host(np.empty((1, 1), np.float32)), stream, is_tf32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", ["rows", "columns", "neither"])
@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [((3, 5), (5, 2)), ((1, 5), (5, 1)), ((4, 3, 5), (5, 2)), ((4, 3, 5), (4, 5, 2)), ((2, 3, 4, 5), (2, 3, 5, 6))],
)
def test_cublas_gets_the_right_arguments(dtype, layout, x_shape, y_shape):
    rng = np.random.default_rng(5)
    library = Library()
    factors = []
    for shape in (x_shape, y_shape):
        array = rng.integers(-9, 9, shape).astype(dtype)
        if layout == "columns":
            array = np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
        elif layout == "neither":
            array = np.repeat(np.repeat(array, 2, axis=-1), 2, axis=-2)[..., ::2, ::2]
        factors.append(host(array))
    out = host(np.full((*x_shape[:-1], y_shape[-1]), np.nan, np.float32))

    cublas(library, size=16).multiply(NAMESPACE, *factors, out, 99, is_tf32=False)

    assert np.array_equal(out, np.matmul(*(np.asarray(f, np.float32) for f in factors)))
    assert library.calls[:2] == [("stream", 99), ("workspace", 16)]


@pytest.mark.parametrize(
    ("dtype", "is_tf32", "types"),
    [(np.float32, False, (0, 0, 68)), (np.float32, True, (0, 0, 77)), (np.float16, False, (2, 2, 68))],
)
def test_sums_are_float32_and_tf32_is_used_only_on_request(dtype, is_tf32, types):
    library = Library()

    multiply(cublas(library), dtype, is_tf32)

    assert library.types == [types]


def test_a_new_stream_reuses_a_handle_with_its_own_workspace():
    library, idle = Library(), deque()

    first = cublas(library, idle, size=1)
    second = cublas(library, idle, size=2)
    multiply(first, stream=5)
    del first
    third = cublas(library, idle, size=3)
    multiply(second)
    multiply(third, stream=6)

    assert library.made == [7, 8]
    assert library.used == [7, 8, 7]
    assert library.calls[-2:] == [("stream", 6), ("workspace", 3)]


def test_a_handle_is_not_reused_while_a_graph_holds_it():
    library, idle = Library(), deque()
    stream = cublas(library, idle)
    graph = [stream]

    del stream
    other = cublas(library, idle)
    graph.clear()
    next_one = cublas(library, idle)
    multiply(other)
    multiply(next_one)

    assert library.used == [8, 7]


def test_threads_never_share_a_handle():
    library, idle, barrier = Library(), deque(), Barrier(8, timeout=60)
    rounds = [[] for _ in range(200)]

    def work():
        for taken in rounds:
            mine = cublas(library, idle)
            taken.append(mine._handle.value)
            barrier.wait()  # all have one
            del mine
            barrier.wait()  # none has

    threads = [Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(sorted(taken) == sorted(library.made) for taken in rounds)
    assert len(library.made) == 8


def test_an_error_of_cublas_has_its_status_and_the_handle_is_not_reused():
    library, idle = Library(), deque()
    failing = cublas(library, idle)

    library.status = 3
    with pytest.raises(DeviceFaultError, match="cublasGemmStridedBatchedEx: cuBLAS status 3"):
        multiply(failing)
    with pytest.raises(DeviceFaultError, match="cublasCreate_v2: cuBLAS status 3"):
        cublas(library, idle)
    del failing
    gc.collect()

    assert not idle


def test_the_error_of_a_missing_library_says_what_to_install():
    with pytest.raises(DeviceUnavailableError, match=r"libcublas\.so\.999 is not found.*hotrow\[cuda999\]"):
        load_library(999)
