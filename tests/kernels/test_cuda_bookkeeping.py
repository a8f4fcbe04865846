"""What a GPU's device keeps, what it frees and which errors it raises, on a stub of CuPy that fails on demand."""

import gc
import importlib
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.errors import DeviceFaultError, DeviceUnavailableError, KernelError
from tests.kernels.stub_cupy import FAULT, StubGpu, stub_modules

NO_MEMORY = 2
SOURCE = 'extern "C" __global__ void twice(float factor) {}\n'


class Kept:
    """Represents an array."""


@pytest.fixture
def gpu():
    return StubGpu()


@pytest.fixture
def cuda(gpu, monkeypatch, tmp_path):
    """``kernels.cuda_device`` on the stub; its caches are empty."""
    for name in ("kernels.cuda_device", "kernels.cuda_compiler", "kernels.cuda_memory", "kernels.cuda_streams"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    for name, module in stub_modules(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return importlib.import_module("kernels.cuda_device")


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "twice.cu"
    file.write_text(SOURCE)
    return file


def test_default_streams_per_thread_are_refused(cuda, monkeypatch):
    monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    with pytest.raises(DeviceUnavailableError, match="cuda:0: CUPY_CUDA_PER_THREAD_DEFAULT_STREAM is set, unset it"):
        cuda.CudaDevice(0)

    monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
    cuda.CudaDevice(0)


def test_an_event_is_done_when_its_work_has_run_or_failed(cuda, gpu):
    event = cuda.CudaDevice(0).stream().record()

    gpu.is_busy = True
    assert not event.is_done()
    gpu.is_busy = False
    assert event.is_done()
    gpu.fault = FAULT
    assert event.is_done()


def test_an_event_belongs_to_the_gpu_of_its_stream(cuda, gpu):
    cuda.CudaDevice(1).stream().record()

    assert gpu.event_devices == [1]


@pytest.mark.parametrize("launches", [1, 100])
def test_a_dropped_streams_arrays_are_kept_until_its_work_has_run(cuda, gpu, launches):
    device = cuda.CudaDevice(0)
    stream, arrays = device.stream(), [Kept() for _ in range(launches)]
    array = weakref.ref(arrays[0])

    gpu.is_busy = True
    for kept in arrays:
        stream.hold(kept)
    del stream, arrays, kept
    gc.collect()
    device.stream()
    assert array() is not None

    gpu.is_busy = False
    device.stream()
    assert array() is None


def test_a_stream_keeps_nothing_after_a_wait(cuda):
    stream, array = cuda.CudaDevice(0).stream(), Kept()
    stream.hold(array)
    array = weakref.ref(array)

    assert array() is not None
    stream.synchronize()

    assert array() is None


def test_the_next_stream_of_a_gpu_reuses_the_cublas_handle_of_a_dropped_stream(cuda, gpu, monkeypatch):
    made = []

    def create(handle):
        made.append(gpu.current)
        handle._obj.value = len(made)
        return 0

    streams = sys.modules["kernels.cuda_streams"]
    monkeypatch.setattr(streams, "load_library", lambda version: SimpleNamespace(cublasCreate_v2=create))
    devices = [cuda.CudaDevice(index) for index in (0, 1)]

    for device in (*devices, *devices):
        device.stream().cublas()
    streams_at_a_time = [devices[1].stream() for _ in range(2)]
    for stream in streams_at_a_time:
        stream.cublas()

    assert made == [0, 1, 1]


def test_a_graph_keeps_the_captured_function_alive(cuda):
    device = cuda.CudaDevice(0)
    owner = Kept()
    array = weakref.ref(owner)

    graph = device.capture(device.stream(), lambda owner=owner: None)
    del owner
    gc.collect()

    assert array() is not None
    del graph
    assert array() is None


def test_an_operation_that_cupy_refuses_fails_the_capture(cuda):
    device = cuda.CudaDevice(0)

    def refused():
        raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")

    with pytest.raises(KernelError, match="cannot be captured as a graph: the current stream is capturing"):
        device.capture(device.stream(), refused)


@pytest.mark.parametrize(
    "use",
    [
        lambda device, stream, event, kernel, graph: stream.record(),
        lambda device, stream, event, kernel, graph: stream.wait(event),
        lambda device, stream, event, kernel, graph: stream.synchronize(),
        lambda device, stream, event, kernel, graph: event.synchronize(),
        lambda device, stream, event, kernel, graph: kernel((1,), (1,), (np.float32(2),), stream),
        lambda device, stream, event, kernel, graph: graph.launch(stream),
        lambda device, stream, event, kernel, graph: device.memory(),
        lambda device, stream, event, kernel, graph: device.pinned(3, np.int32),
    ],
    ids=["record", "wait", "synchronize", "event", "launch", "graph", "memory", "pinned"],
)
def test_after_a_fault_every_call_raises_a_device_fault_error(cuda, gpu, file, use):
    device = cuda.CudaDevice(0)
    stream = device.stream()
    given = device, stream, stream.record(), device.kernel(file, "twice"), device.capture(stream, lambda: None)

    gpu.fault = FAULT

    with pytest.raises(DeviceFaultError, match=f"error {FAULT}"):
        use(*given)


def test_too_little_page_locked_memory_is_a_memory_error(cuda, gpu):
    device = cuda.CudaDevice(0)

    gpu.fault = NO_MEMORY

    with pytest.raises(MemoryError, match=f"error {NO_MEMORY}"):
        device.pinned(3, np.int32)


def test_page_locked_memory_is_pooled_in_few_sizes_except_large_blocks(cuda, gpu):
    device = cuda.CudaDevice(0)

    arrays = [device.pinned(size, np.uint8) for size in (0, 1, 1000, 1024, 1025, 64 << 20, (64 << 20) + 1)]

    assert gpu.pooled_bytes == [1, 1, 1024, 1024, 2048, 64 << 20]
    assert gpu.own_bytes == [(64 << 20) + 1]
    assert [array.size for array in arrays] == [0, 1, 1000, 1024, 1025, 64 << 20, (64 << 20) + 1]
    assert not any(array.any() for array in arrays)


def test_free_memory_counts_what_cupys_pool_keeps(cuda):
    assert cuda.CudaDevice(0).memory() == (100 + 10, 1000)


def test_large_arrays_do_not_come_from_the_pool(cuda, gpu):
    device, limit = cuda.CudaDevice(0), 64 << 20
    gpu.free_bytes = 1 << 30

    device.empty((limit // 4,), np.float32)
    device.empty(np.int64(limit + 1), np.uint8)

    assert gpu.made == [(limit, True), (limit + 1, False)]


def test_a_large_array_may_take_the_pools_free_memory(cuda, gpu):
    device, size = cuda.CudaDevice(0), (64 << 20) + 10
    gpu.free_bytes = size - 10

    device.empty(size, np.uint8)

    assert gpu.made == [(size, False)]
    gpu.free_bytes = size - 1
    with pytest.raises(MemoryError):
        device.empty(size, np.uint8)


def test_dynamic_shared_memory_is_raised_if_static_memory_leaves_too_little(cuda, file):
    device = cuda.CudaDevice(0)
    kernel, stream = device.kernel(file, "twice"), device.stream()

    kernel((1,), (1,), (np.float32(2),), stream, shared_bytes=47 * 1024)  # the stub asserts that the kernel may have it


def test_kernels_are_compiled_once_and_machine_code_is_kept_on_disk(cuda, gpu, file, tmp_path):
    for index in (0, 1):
        cuda.CudaDevice(index).kernel(file, "twice")
    cuda.CudaDevice(0).kernel(file, "twice", SIZE=3)

    assert [options for _, options in gpu.compiled] == [
        ("--gpu-architecture=sm_90", "--std=c++17", "--fmad=false", "--device-as-default-execution-space", *more)
        for more in ((), ("-DSIZE=3",))
    ]
    kept = sorted(path.read_bytes() for path in (tmp_path / "hotrow" / "cubin").iterdir())
    assert kept == [b"machine code 1\0", b"machine code 2\0"]  # the byte that CuPy leaves out


def test_without_a_cache_directory_kernels_are_still_compiled(cuda, gpu, file, tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    device = cuda.CudaDevice(0)

    device.kernel(file, "twice")((1,), (1,), (np.float32(2),), device.stream())

    assert len(gpu.compiled) == 1
