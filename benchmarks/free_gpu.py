"""A stub of CuPy whose driver calls cost nothing, to measure Hotrow's own host time of a GPU request.

``install`` puts the stub in CuPy's place. Arrays of its GPU are in host memory. No kernel runs: ``on_launch`` is called
with the name of each kernel that would run, or with ``"graph"``, and may write what the kernel would report.
"""

import ctypes
import sys
from collections import Counter
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np

calls = Counter()
"""Driver calls by kind: launch, graph, copy, record, wait and synchronize."""

hooks = SimpleNamespace(on_launch=lambda name: None)


class Array:
    """An array of the GPU."""

    device = SimpleNamespace(id=0)
    shape, dtype, size = (
        property(lambda self, name=name: getattr(self._host, name)) for name in ("shape", "dtype", "size")
    )
    nbytes, flags, ndim = (
        property(lambda self, name=name: getattr(self._host, name)) for name in ("nbytes", "flags", "ndim")
    )

    def __init__(self, shape=None, dtype=None, memory=None, host=None):
        self._host = host if host is not None else memory if memory is not None else np.empty(shape, dtype)
        self.data = SimpleNamespace(ptr=self._host.ctypes.data)

    def view(self, dtype):
        return Array(host=self._host.view(dtype))

    def reshape(self, *shape):
        return Array(host=self._host.reshape(*shape))

    def fill(self, value):
        self._host.fill(value)

    def get(self):
        return self._host.copy()

    def __getitem__(self, place):
        return Array(host=self._host[place])

    def __setitem__(self, place, value):
        self._host[place] = value

    def __len__(self):
        return len(self._host)


class Device:
    compute_capability = "90"
    mem_info = (100 << 30, 140 << 30)

    def __init__(self, index):
        self.id = index

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Stream:
    is_capturing_now = False

    def __init__(self, non_blocking=False):
        self.ptr, self.device_id = id(self), 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        calls["synchronize"] += 1

    def wait_event(self, event):
        calls["wait"] += 1

    def is_capturing(self):
        return False

    def begin_capture(self, mode):
        Stream.is_capturing_now = True

    def end_capture(self):
        Stream.is_capturing_now = False
        return SimpleNamespace(launch=lambda stream: _launch("graph", "graph"))


class Event:
    ptr = 1

    def __init__(self, disable_timing=False):
        pass

    def record(self, stream):
        calls["record"] += 1

    def synchronize(self):
        calls["synchronize"] += 1


class Function:
    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, name):
        self._name = name

    def compile(self):
        pass

    def __call__(self, grid, block, arguments, shared_mem=0):
        if not Stream.is_capturing_now:
            _launch("launch", self._name)


class Pinned:
    def __init__(self, size_bytes, flags=0):
        self._buffer = ctypes.create_string_buffer(max(size_bytes, 1))
        self.ptr = ctypes.addressof(self._buffer)


def install():
    """Put the stub in CuPy's place; call it before ``kernels.cuda_device`` is imported."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    pool = SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
    cupy.__dict__.update(
        cuda=cuda,
        ndarray=Array,
        empty=Array,
        zeros=lambda shape, dtype: Array(host=np.zeros(shape, dtype)),
        RawModule=lambda path: SimpleNamespace(get_function=Function),
        get_default_memory_pool=lambda: pool,
    )
    default = Stream()
    cuda.__dict__.update(
        Device=Device,
        Stream=Stream,
        Event=Event,
        PinnedMemory=Pinned,
        alloc_pinned_memory=Pinned,
        MemoryPool=lambda: SimpleNamespace(malloc=None),
        UnownedMemory=lambda address, size, owner, device: owner,
        MemoryPointer=lambda memory, offset: memory,
        get_current_stream=lambda: default,
        using_allocator=lambda allocator=None: nullcontext(),
        driver=SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {"status": 0})),
        runtime=_runtime(),
        nvrtc=_nvrtc(),
    )
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": cuda.runtime, "cupy.cuda.nvrtc": cuda.nvrtc}
    sys.modules.update(modules)


def _launch(kind, name):
    calls[kind] += 1
    hooks.on_launch(name)


def _copy(*_):
    calls["copy"] += 1


def _runtime():
    runtime = ModuleType("cupy.cuda.runtime")
    runtime.__dict__.update(
        CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {"status": 0}),
        getDeviceCount=lambda: 1,
        eventQuery=lambda address: 0,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: {},
        memcpyAsync=_copy,
        memcpyDefault=4,
        hostAllocPortable=1,
        streamCaptureModeRelaxed=2,
    )
    return runtime


def _nvrtc():
    nvrtc = ModuleType("cupy.cuda.nvrtc")
    nvrtc.__dict__.update(
        NVRTCError=type("NVRTCError", (Exception,), {}),
        getVersion=lambda: (13, 0),
        createProgram=lambda *arguments: None,
        compileProgram=lambda *arguments: None,
        getCUBIN=lambda program: b"none",
        getProgramLog=lambda program: "",
        destroyProgram=lambda program: None,
    )
    return nvrtc
