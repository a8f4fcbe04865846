"""Every device compiles a kernel, checks its arguments and launches it."""

from pathlib import Path

import numpy as np
import pytest

from kernels.errors import KernelError

SOURCE = Path(__file__).parent / "scale.cu"


@pytest.fixture
def stream(device):
    return device.stream()


@pytest.fixture
def array(device):
    return device.zeros(8, np.float32)


def test_a_kernel_computes_on_uploaded_values(device, stream):
    values = np.arange(1000, dtype=np.float32)
    given, out = device.empty(1000, np.float32), device.empty(1000, np.float32)

    device.upload(values, given, stream)
    device.kernel(SOURCE, "scale")((4,), (256,), (given, out, np.int32(1000), np.float32(3)), stream)
    with device.using(stream):
        result = device.to_host(out)

    np.testing.assert_array_equal(result, values * 3)


def test_different_macros_make_different_kernels(device, stream, tmp_path):
    (tmp_path / "number.cu").write_text('extern "C" __global__ void number(int* out) { *out = NUMBER; }\n')
    out = device.zeros(2, np.int32)

    for place, number in enumerate((3, "4 + 1")):
        device.kernel(tmp_path / "number.cu", "number", NUMBER=number)((1,), (1,), (out[place:],), stream)
    stream.synchronize()

    assert device.to_host(out).tolist() == [3, 5]


@pytest.mark.parametrize("grid", [(0,), (1, 0), (2**31,), (1, 65536), (1, 1, 1, 1), ()])
def test_a_grid_beyond_the_limits_is_refused(device, stream, array, grid):
    with pytest.raises(KernelError, match=r"scale: (a )?grid"):
        device.kernel(SOURCE, "scale")(grid, (32,), (array, array, np.int32(1), np.float32(1)), stream)


@pytest.mark.parametrize(
    ("block", "words"), [((1025,), "block"), ((0,), "block"), ((64, 32), "a block of 2048 threads")]
)
def test_a_block_beyond_the_limits_is_refused(device, stream, array, block, words):
    with pytest.raises(KernelError, match=words):
        device.kernel(SOURCE, "scale")((1,), block, (array, array, np.int32(1), np.float32(1)), stream)


@pytest.mark.parametrize("shared_bytes", [-1, 227 * 1024 + 1])
def test_shared_memory_beyond_the_limits_is_refused(device, stream, array, shared_bytes):
    with pytest.raises(KernelError, match="bytes of shared memory: a block has 0 to 232448"):
        device.kernel(SOURCE, "scale")((1,), (1,), (array, array, np.int32(1), np.float32(1)), stream, shared_bytes)


@pytest.mark.parametrize(
    ("count", "factor", "words"),
    [
        (8, np.float32(1), "argument 2, 'n': expected np.int32, not int, whose width is not the parameter's"),
        (np.int64(8), np.float32(1), "argument 2, 'n': expected np.int32, not np.int64"),
        (np.uint32(8), np.float32(1), "argument 2, 'n': expected np.int32, not np.uint32"),
        (np.int32(8), np.int32(1), "argument 3, 'factor': expected np.float32, not np.int32"),
        (np.int32(8), np.float64(1), "argument 3, 'factor': expected np.float32, not np.float64"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(device, stream, array, count, factor, words):
    with pytest.raises(KernelError, match=words):
        device.kernel(SOURCE, "scale")((1,), (8,), (array, array, count, factor), stream)


def test_a_wrong_number_of_arguments_is_refused(device, stream, array):
    with pytest.raises(KernelError, match="scale takes 4 arguments, not 3"):
        device.kernel(SOURCE, "scale")((1,), (8,), (array, array, np.int32(8)), stream)


@pytest.mark.parametrize("given", [np.zeros(8, np.float32), np.int64(0), None], ids=["host array", "address", "None"])
def test_only_an_array_of_the_device_is_accepted_for_a_pointer(device, stream, array, given):
    with pytest.raises(KernelError, match=f"argument 0, 'in': expected an array of {device.name}, not"):
        device.kernel(SOURCE, "scale")((1,), (8,), (given, array, np.int32(8), np.float32(1)), stream)


def test_a_strided_array_is_refused(device, stream, array):
    with pytest.raises(KernelError, match="argument 1, 'out': expected a C-contiguous array"):
        device.kernel(SOURCE, "scale")((1,), (4,), (array, array[::2], np.int32(4), np.float32(1)), stream)


def test_an_unknown_kernel_is_refused_with_a_list_of_the_known_kernels(device):
    with pytest.raises(KernelError, match=r"scale\.cu has no kernel 'shrink': it has scale"):
        device.kernel(SOURCE, "shrink")


def test_a_kernel_that_does_not_compile_is_refused_with_the_file_and_line(device, tmp_path):
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong(int* out) {\n  *out = unheard_of;\n}\n')

    with pytest.raises(KernelError, match=r"(?s)wrong\.cu does not compile:.*wrong\.cu[:(]2.*unheard_of"):
        device.kernel(tmp_path / "wrong.cu", "wrong")
