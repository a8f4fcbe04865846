"""A stub of CuPy without a GPU: only the parts that ``kernels.cuda_device`` uses. Tests decide when its GPU is busy."""

import ctypes
import math
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np

NOT_READY = 600
FAULT = 700


class CudaRuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class CudaDriverError(CudaRuntimeError):
    pass


class StubGpu:
    """The record of what happened on the GPUs, and what shall happen next."""

    def __init__(self):
        self.is_busy = False
        self.fault = 0
        self.current = 0
        self.event_devices = []
        self.pooled_bytes, self.own_bytes = [], []
        self.free_bytes, self.pool_free_bytes = 100, 10
        self.has_own_allocator = False
        self.made = []  # arrays' bytes, and whether they come from the pool
        self.compiled = []

    def check(self):
        if self.fault:
            raise CudaRuntimeError(self.fault)

    def query(self, address):
        return self.fault or (NOT_READY if self.is_busy else 0)

    def pinned(self, sizes, size_bytes):
        self.check()
        sizes.append(size_bytes)
        buffer = ctypes.create_string_buffer(max(size_bytes, 1))
        return SimpleNamespace(ptr=ctypes.addressof(buffer), buffer=buffer)

    def empty(self, shape, dtype):
        size_bytes = math.prod(np.atleast_1d(shape).tolist()) * np.dtype(dtype).itemsize
        if self.has_own_allocator and size_bytes > self.free_bytes:
            raise CudaRuntimeError(2)
        self.made.append((size_bytes, not self.has_own_allocator))

    def empty_the_pool(self):
        self.free_bytes += self.pool_free_bytes
        self.pool_free_bytes = 0

    @contextmanager
    def using_own_allocator(self, allocator=None):
        self.has_own_allocator = allocator is None
        yield
        self.has_own_allocator = False

    def compile(self, text, options):
        self.compiled.append((text, options))
        return f"machine code {len(self.compiled)}".encode()


def stub_modules(gpu):
    """Return the modules that replace CuPy's in ``sys.modules``."""
    cuda = ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Device=device(gpu),
        Stream=stream(gpu),
        Event=event(gpu),
        MemoryPool=lambda: SimpleNamespace(malloc="the graph's"),
        PinnedMemory=lambda size_bytes, flags: gpu.pinned(gpu.own_bytes, size_bytes),
        alloc_pinned_memory=lambda size_bytes: gpu.pinned(gpu.pooled_bytes, size_bytes),
        cublas=ModuleType("cupy.cuda.cublas"),
        driver=SimpleNamespace(CUDADriverError=CudaDriverError),
        nvrtc=nvrtc(gpu),
        runtime=runtime(gpu),
        get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: False),
        using_allocator=gpu.using_own_allocator,
    )
    cupy = ModuleType("cupy")
    pool = SimpleNamespace(free_bytes=lambda: gpu.pool_free_bytes, free_all_blocks=gpu.empty_the_pool)
    cupy.__dict__.update(
        cuda=cuda,
        empty=gpu.empty,
        get_default_memory_pool=lambda: pool,
        ndarray=type("ndarray", (), {}),
        RawModule=raw_module(gpu),
    )
    return {"cupy": cupy, "cupy.cuda": cuda}


def device(gpu):
    class Device:
        compute_capability = "90"

        def __init__(self, index):
            self.index = index

        @property
        def mem_info(self):
            gpu.check()
            return gpu.free_bytes, 1000

        def __enter__(self):
            self.before, gpu.current = gpu.current, self.index
            return self

        def __exit__(self, *error):
            gpu.current = self.before

    return Device


def stream(gpu):
    class Stream:
        def __init__(self, non_blocking=False):
            self.ptr, self.device_id = 1, gpu.current

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def synchronize(self):
            gpu.check()
            gpu.is_busy = False

        def wait_event(self, event):
            gpu.check()

        def begin_capture(self, mode):
            gpu.check()

        def end_capture(self):
            return SimpleNamespace(launch=lambda stream: gpu.check())

    return Stream


def event(gpu):
    class Event:
        def __init__(self, disable_timing):
            self.ptr, self.device = 1, gpu.current

        def record(self, stream):
            gpu.check()
            assert self.device == stream.device_id
            gpu.event_devices.append(self.device)

        def synchronize(self):
            gpu.check()

    return Event


def raw_module(gpu):
    class Function:
        max_dynamic_shared_size_bytes = 40 * 1024  # of a kernel with 8 KiB of static shared memory

        def __init__(self, name):
            self.name, self.is_loaded = name, False

        def compile(self):
            self.is_loaded = True

        def __call__(self, grid, block, args, shared_mem):
            gpu.check()
            assert self.is_loaded
            assert shared_mem <= self.max_dynamic_shared_size_bytes

    class RawModule:
        def __init__(self, *, path):
            with open(path, "rb") as file:
                self.content = file.read()

        def get_function(self, name):
            return Function(name)

    return RawModule


def runtime(gpu):
    return SimpleNamespace(
        CUDARuntimeError=CudaRuntimeError,
        getDeviceCount=lambda: 2,
        eventQuery=gpu.query,
        runtimeGetVersion=lambda: 12090,
        memcpyDefault=4,
        memcpyAsync=lambda *arguments: gpu.check(),
        hostAllocPortable=1,
        streamCaptureModeRelaxed=2,
    )


def nvrtc(gpu):
    return SimpleNamespace(
        NVRTCError=type("NVRTCError", (Exception,), {}),
        getVersion=lambda: (13, 0),
        createProgram=lambda text, name, headers, includes: {"text": text},
        compileProgram=lambda program, options: program.update(cubin=gpu.compile(program["text"], options)),
        getCUBIN=lambda program: program["cubin"],
        getProgramLog=lambda program: "",
        destroyProgram=lambda program: None,
    )
