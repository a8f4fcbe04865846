"""A GPU as a device, through CuPy. Only the files ``kernels/cuda*.py`` import CuPy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from kernels.cuda_compiler import cubin_file
from kernels.cuda_memory import PinnedBlock, empty_array, empty_pinned, queue_copy
from kernels.cuda_streams import CudaStream, CudaTimer, raising_device_faults
from kernels.device import Array, Graph, Kernel, Stream, Timer
from kernels.errors import DeviceUnavailableError, KernelError
from kernels.launch import check_arguments, check_shape
from kernels.operands import pinned_address, require_factors, require_same_form
from kernels.source import KernelSource, Parameter, macro_options, read_source

_PER_THREAD = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"  # CuPy reads it when it is imported: 0, or another number


class CudaDevice:
    """See ``kernels.device.Device``."""

    def __init__(self, index: int) -> None:
        """Open the GPU with this index.

        Raises:
            DeviceUnavailableError: the driver is missing or too old, there is no such GPU, or CuPy's default streams
                are per thread.
        """
        self.name = f"cuda:{index}"
        if os.environ.get(_PER_THREAD, "0").strip("0"):
            # Outside ``using``, ``to_host`` would then read what other streams have not written yet.
            reason = "a default stream per thread does not wait for other streams"
            raise DeviceUnavailableError(f"{self.name}: {_PER_THREAD} is set, unset it: {reason}")
        self.uses_host_memory = False
        self.xp: Any = cupy
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as err:
            raise DeviceUnavailableError(f"{self.name}: no usable NVIDIA driver: {err}") from err
        if index >= count:
            raise DeviceUnavailableError(f"{self.name}: the machine has {count} GPUs, the last is cuda:{count - 1}")
        self._index = index
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._modules_lock = threading.Lock()
        with cupy.cuda.Device(index):
            self._filling = cupy.cuda.Stream(non_blocking=True)  # for zeros, which wait for no other work

    def memory(self) -> tuple[int, int]:
        """See ``Device.memory``."""
        with raising_device_faults(), cupy.cuda.Device(self._index) as device:
            free, total = device.mem_info
            # Memory that CuPy's pool has kept is free too: the pool reuses it, or returns it when CUDA runs out.
            return int(free) + int(cupy.get_default_memory_pool().free_bytes()), int(total)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """See ``Device.empty``."""
        return empty_array(self._index, shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """See ``Device.zeros``."""
        with raising_device_faults(), cupy.cuda.Device(self._index):
            stream = cupy.cuda.get_current_stream()
            if stream.is_capturing():
                return cupy.zeros(shape, dtype)
            with self._filling:
                array = cupy.zeros(shape, dtype)
            self._filling.synchronize()
            return array

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See ``Device.pinned``."""
        array = empty_pinned(self._index, shape, dtype)
        array.fill(0)
        return array

    def device_view(self, pinned: npt.NDArray[Any]) -> Array:
        """See ``Device.device_view``."""
        address = pinned_address(pinned, PinnedBlock)
        if address is None or not pinned.flags.c_contiguous:
            raise ValueError("a device view needs a C-contiguous array from Device.pinned")
        memory = cupy.cuda.UnownedMemory(address, pinned.nbytes, pinned, self._index)
        return cupy.ndarray(pinned.shape, pinned.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def stream(self) -> CudaStream:
        """See ``Device.stream``."""
        return CudaStream(self._index)

    def upload(self, host: npt.NDArray[Any], out: Array, stream: Stream) -> None:
        """See ``Device.upload``."""
        queue = self._mine(stream)
        self._check_array(out)
        require_same_form(host, out)
        source = host
        if pinned_address(host, PinnedBlock) is None:
            source = empty_pinned(self._index, host.shape, host.dtype)
            source[...] = host
        queue_copy(out.data.ptr, source.ctypes.data, host.nbytes, queue)
        queue.hold(source, out)

    def download(self, array: Array, out: npt.NDArray[Any], stream: Stream) -> None:
        """See ``Device.download``."""
        queue = self._mine(stream)
        self._check_array(array)
        require_same_form(out, array)
        if pinned_address(out, PinnedBlock) is None:
            raise ValueError("a download needs an array from Device.pinned to write to")
        queue_copy(out.ctypes.data, array.data.ptr, out.nbytes, queue)
        queue.hold(array, out)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """See ``Device.to_host``."""
        self._check_array(array)
        with raising_device_faults(), cupy.cuda.Device(self._index):
            if cupy.cuda.get_current_stream().is_capturing():
                raise KernelError("cannot read an array on the host while a graph is captured")
            host: npt.NDArray[Any] = array.get()
            return host

    def kernel(self, file: str | Path, name: str, **defines: str | int) -> Kernel:
        """See ``Device.kernel``."""
        source = read_source(file)
        parameters = source.parameters(name)
        key = source.text, tuple(macro_options(defines))
        with self._modules_lock, raising_device_faults(), cupy.cuda.Device(self._index):
            if key not in self._modules:
                self._modules[key] = cupy.RawModule(path=str(self._compiled(source, key[1])))
            function = self._modules[key].get_function(name)
            # Load it now: at the first launch it might wait for all running work, or happen while a graph is captured.
            function.compile()
            return CudaKernel(self, function, name, parameters)

    def product(self, x: Array, y: Array, stream: Stream, *, is_tf32: bool = False) -> Array:
        """See ``Device.product``."""
        queue = self._mine(stream)
        self._check_array(x)
        self._check_array(y)
        shape = require_factors(x, y)
        with self.using(stream):
            if not x.size or not y.size:
                return cupy.zeros(shape, np.float32)
            out = cupy.empty(shape, np.float32)
            library = queue.cublas()
            library.multiply(cupy, x, y, out, queue.cupy_stream.ptr, is_tf32)
            queue.hold(library)  # not the arrays: the pool gives their memory only to later work of this stream
            return out

    def capture(self, stream: Stream, function: Callable[[], Any]) -> Graph:
        """See ``Device.capture``.

        The graph's arrays come from a separate memory pool, so nothing else ever uses the memory that it writes. CuPy
        cannot compile or load anything during a capture, so call the function once before. CuPy also refuses its own
        matrix products: use ``product``.
        """
        queue = self._mine(stream)
        queue.refuse_while_capturing("capture another graph")
        pool = cupy.cuda.MemoryPool()
        # Keep the function too: launches may know memory that it owns only by address.
        before, queue.captured = queue.cupy_stream, [pool, function]
        with cupy.cuda.Device(self._index):
            # The capturing stream must not block on the default stream: using that would be an error in every thread.
            queue.cupy_stream = cupy.cuda.Stream(non_blocking=True)
        try:
            with self.using(stream), cupy.cuda.using_allocator(pool.malloc):
                queue.cupy_stream.begin_capture(runtime.streamCaptureModeRelaxed)
                try:
                    result = function()
                finally:
                    graph = queue.cupy_stream.end_capture()
            return CudaGraph(self._index, graph, result, queue.captured)
        except (RuntimeError, MemoryError) as err:  # CUDA's errors, and CuPy's own, which are plain RuntimeErrors
            raise KernelError(f"this work cannot be captured as a graph: {err}") from err
        finally:
            queue.cupy_stream, queue.captured = before, None

    def timer(self, stream: Stream) -> Timer:
        """See ``Device.timer``."""
        return CudaTimer(self._mine(stream))

    def properties(self) -> dict[str, str | int]:
        """See ``Device.properties``."""
        properties = runtime.getDeviceProperties(self._index)
        attributes = cupy.cuda.Device(self._index).attributes
        clocks = {"clock_khz": "ClockRate", "memory_clock_khz": "MemoryClockRate"}  # the maximum
        return {
            "name": properties["name"].decode(),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "multiprocessors": int(properties["multiProcessorCount"]),
            "memory_bytes": int(properties["totalGlobalMem"]),
            "l2_bytes": int(properties["l2CacheSize"]),
            **{name: int(attributes[clock]) for name, clock in clocks.items() if clock in attributes},
            "driver_cuda_version": int(runtime.driverGetVersion()),
            "runtime_cuda_version": int(runtime.runtimeGetVersion()),
        }

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """See ``Device.using``."""
        with cupy.cuda.Device(self._index), self._mine(stream).cupy_stream:
            yield

    def wrong_array(self, argument: Any) -> str:
        """Return why a kernel of this device cannot take an argument as an array, or ""."""
        if not isinstance(argument, cupy.ndarray) or argument.device.id != self._index:
            return f"expected an array of {self.name}, not {_described(argument)}"
        return "" if argument.flags.c_contiguous else "expected a C-contiguous array"

    def _compiled(self, source: KernelSource, options: Sequence[str]) -> Path:
        architecture = int(cupy.cuda.Device(self._index).compute_capability)
        try:
            return cubin_file(source.path.stem, source.text, architecture, options)
        except KernelError as err:
            raise KernelError(f"{source.path.name} does not compile: {err}") from err

    def _check_array(self, array: Any) -> None:
        if not isinstance(array, cupy.ndarray) or array.device.id != self._index:
            raise TypeError(f"expected an array of {self.name}, not {_described(array)}")

    def _mine(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.index != self._index:
            raise KernelError(f"expected a stream of {self.name}, not {stream!r}")
        return stream


class CudaKernel:
    """See ``kernels.device.Kernel``."""

    def __init__(self, device: CudaDevice, function: Any, name: str, parameters: Sequence[Parameter]) -> None:
        """One kernel of a CuPy module."""
        self._device = device
        self._function = function
        self._name = name
        self._parameters = parameters

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], stream: Stream, shared_bytes: int = 0
    ) -> None:
        """See ``Kernel.__call__``."""
        shape = check_shape(self._name, grid, block, shared_bytes)
        check_arguments(self._name, self._parameters, args, self._device.wrong_array)
        with raising_device_faults(self._name), self._device.using(stream):
            # Without this, a kernel has 48 KiB minus its static shared memory.
            if shared_bytes and shared_bytes > self._function.max_dynamic_shared_size_bytes:
                self._function.max_dynamic_shared_size_bytes = shared_bytes
            self._function(*shape, tuple(args), shared_mem=shared_bytes)
        self._device._mine(stream).hold(*args)


class CudaGraph:
    """See ``kernels.device.Graph``."""

    def __init__(self, index: int, graph: Any, result: Any, kept_alive: Sequence[Any]) -> None:
        """``kept_alive`` are the arrays that the graph reads and writes."""
        self.result = result
        self._index = index
        self._graph = graph
        self._held = kept_alive

    def launch(self, stream: Stream) -> None:
        """See ``Graph.launch``."""
        if not isinstance(stream, CudaStream) or stream.index != self._index:
            raise KernelError(f"a graph of cuda:{self._index} cannot be launched on {stream!r}")
        with raising_device_faults(), cupy.cuda.Device(self._index):
            self._graph.launch(stream.cupy_stream)
        stream.hold(self)


def _described(value: Any) -> str:
    if isinstance(value, cupy.ndarray):
        return f"one of cuda:{value.device.id}"
    return type(value).__name__
