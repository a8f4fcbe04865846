"""A device: one place where kernels run, a GPU (``"cuda:0"``) or the CPU runner (``"runner"``), behind one protocol.

Work that is queued on one stream runs in that order, in parallel with the host and other streams. Events order the work
of different streams. The host waits only in ``synchronize``, in ``Device.to_host`` and where a method below says so.
Every method may be called from any thread. A process that forks must open its devices after the fork: in a forked child
a device of the parent raises an error, and after the parent has opened a GPU, the child can open none.

A fault of a kernel (out of bounds, or a deadlock on the runner) is raised as ``DeviceFaultError`` where the host next
waits for that work.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from kernels.errors import DeviceUnavailableError

Array: TypeAlias = Any
"""An array in a device's memory, of the namespace ``Device.xp``. It never becomes a NumPy array implicitly."""

_NAME = re.compile(r"(?P<runner>runner)(?::(?P<number>\d+))?|cuda:(?P<index>\d+)|auto")
_devices: dict[str, Device] = {}
_devices_lock = threading.Lock()
_inherited: dict[str, Device] = {}  # in a forked child, its parents' devices: kept, because freeing one would call CUDA


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the work before it has run.

        Raises:
            DeviceFaultError: some of that work failed.
        """

    def is_done(self) -> bool:
        """Return whether the work before it has run or failed; never waits, not even for a lock, for finalizers."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait(self, event: Event) -> None:
        """Let later work start after the event, which may belong to another stream of the device."""

    def record(self) -> Event:
        """Return the point after all work queued so far."""

    def synchronize(self) -> None:
        """Wait until all work queued so far has run.

        Raises:
            DeviceFaultError: some of it failed.
        """


class Kernel(Protocol):
    """One compiled kernel."""

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], stream: Stream, shared_bytes: int = 0
    ) -> None:
        """Queue a launch; does not wait. Arrays are kept alive until it has run.

        Args:
            grid: one to three numbers of blocks.
            block: one to three numbers of threads, at most 1,024 in all.
            args: in the order of the kernel's parameters: a C-contiguous array of this device for a pointer, a NumPy
                scalar of exactly the parameter's type for a value.
            stream: of this device.
            shared_bytes: dynamic shared memory per block.

        Raises:
            KernelError: the arguments do not fit, or the grid has no blocks. Nothing was queued.
        """


class Timer(Protocol):
    """A stopwatch on the device's clock for the work of one stream."""

    def start(self) -> None:
        """Start after the work that the stream has queued so far; does not wait."""

    def stop(self) -> None:
        """Stop after the work that the stream has queued so far; does not wait."""

    def elapsed_us(self) -> float:
        """Wait for the stop, and return the microseconds between start and stop.

        Raises:
            DeviceFaultError: some of the stream's work failed.
            ValueError: the timer was not started and stopped.
        """


class Graph(Protocol):
    """Captured work that can be launched again and again with the same arrays."""

    result: Any
    """The captured function's result. The graph owns the arrays in it, and each launch writes them again."""

    def launch(self, stream: Stream) -> None:
        """Queue the captured work; does not wait. A graph must not be launched by two threads at once."""


class Device(Protocol):
    """One place where kernels run. Shapes and dtypes are NumPy's."""

    name: str
    """The name for ``open_device``: ``"cuda:0"``, ``"runner"``."""

    uses_host_memory: bool
    """Whether its memory is host memory, as on the runner."""

    xp: Any
    """The array namespace: CuPy, or on the runner NumPy with the behaviour of CuPy.

    Under ``using(stream)`` its operations are work of that stream. Elsewhere they run on CUDA's default stream, which
    is ordered with all streams: an operation starts after all earlier work and before all later work. This is
    simple and correct, but too slow between requests. The runner waits and then runs each operation at once.
    """

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return a new array of undefined content, in memory aligned to 256 bytes."""

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return a new array of zeros that every stream can read; may wait."""

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a new page-locked host array of zeros, which kernels access through ``device_view``."""

    def device_view(self, pinned: npt.NDArray[Any]) -> Array:
        """Return an array of the device over the memory of a pinned array.

        Raises:
            ValueError: the array is not from ``pinned``, or not C-contiguous.
        """

    def stream(self) -> Stream:
        """Return a new stream, which waits for no other stream, except for array operations outside ``using``."""

    def upload(self, host: npt.NDArray[Any], out: Array, stream: Stream) -> None:
        """Queue a copy to the device.

        Args:
            host: a pinned array must keep its content until the copy has run; another array is copied first.
            out: of the same shape and dtype; both C-contiguous.
            stream: of this device.

        Raises:
            ValueError: shape, dtype or layout differ.
        """

    def download(self, array: Array, out: npt.NDArray[Any], stream: Stream) -> None:
        """Queue a copy to the host.

        Args:
            array: of this device, C-contiguous.
            out: pinned, of the same shape and dtype; its content is valid once the stream has run.
            stream: of this device.

        Raises:
            ValueError: shape, dtype or layout differ, or ``out`` is not pinned.
        """

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Wait for the stream of ``using``, or outside ``using`` for all streams, and copy to a new host array.

        Raises:
            DeviceFaultError: work that it waited for failed.
        """

    def kernel(self, file: str | Path, name: str, **defines: str | int) -> Kernel:
        """Return a kernel, compiled for this device unless the process or the cache on disk has it.

        Args:
            file: relative to ``kernels/cuda``, or an absolute path.
            name: the name of the ``extern "C"`` kernel.
            defines: macros.

        Raises:
            KernelError: there is no such file or kernel, or it does not compile. The message includes the compiler's.
        """

    def product(self, x: Array, y: Array, stream: Stream, *, is_tf32: bool = False) -> Array:
        """Queue the matrix product ``x @ y``. Unlike the products of ``xp``, it can be captured in a graph.

        Launch a graph with products on the stream that captured it, because products use that stream's workspace. The
        factors are not kept alive: a factor from another stream must live until the product has run.

        Args:
            x: float32 or float16[..., M, K].
            y: of the same type, [..., K, N], or [K, N] for all matrices of x.
            stream: of this device.
            is_tf32: a GPU may round float32 factors to TF32, which has 10 bits of mantissa.

        Returns:
            float32[..., M, N], summed in float32.

        Raises:
            ValueError: shapes or dtypes do not fit.
            DeviceUnavailableError: the library for products is missing.
        """

    def capture(self, stream: Stream, function: Callable[[], Any]) -> Graph:
        """Call ``function`` and keep the work that it queues on ``stream`` as a graph. None of the work runs now.

        The graph keeps the function alive. If the function can reach the graph, their memory waits for the garbage
        collector.

        The function runs under ``using(stream)``. It may launch kernels, upload from and download to pinned arrays, and
        use array operations. It must not wait, read arrays on the host, or use other streams. Some operations of CuPy
        cannot be captured: matrix products (use ``product``), ``asarray`` of host arrays, and joins of more than eight
        arrays, because CuPy uploads their addresses.

        Raises:
            KernelError: the function did something that cannot be captured.
        """

    def timer(self, stream: Stream) -> Timer:
        """Return a timer for a stream. It can be used again and again, but not while a graph is captured."""

    def properties(self) -> dict[str, str | int]:
        """Return the device's properties for benchmark records: at least the manufacturer's ``name``."""

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """Return a context in which this thread's array operations are queued on ``stream``.

        The memory of an array that was made inside is reused by later work of the same stream. Kernels, copies and
        graphs keep their arrays alive until they have run; array operations do not. So the caller must keep an array
        that was made elsewhere, or that another stream's operations use, until these operations have run.
        """


def open_device(name: str) -> Device:
    """Return the device called ``name``: within a process the same object for the same name.

    Args:
        name: ``"cuda:<index>"``, ``"runner"``, ``"runner:<number>"`` for further runners, or ``"auto"`` for the first
            GPU.

    Raises:
        DeviceUnavailableError: CuPy or the driver is missing; there is no GPU with this index; CuPy has a default
            stream per thread; a parent of this forked process has opened a GPU; or g++ is missing for the runner.
        ValueError: ``name`` is not the name of a device.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"device {name!r}: expected 'cuda:<index>', 'runner', 'runner:<number>' or 'auto'")
    if match["runner"]:
        number = int(match["number"] or 0)
        return _only_one(f"runner:{number}" if number else "runner", _open_runner)
    index = int(match["index"] or 0)
    return _only_one(f"cuda:{index}", lambda _: _open_cuda(index))


def _only_one(name: str, opener: Callable[[str], Device]) -> Device:
    with _devices_lock:
        if name not in _devices:
            _devices[name] = opener(name)
        return _devices[name]


def _start_again() -> None:
    """Reset the devices in a forked child: it cannot use its parent's, and another thread may have held the lock."""
    global _devices, _devices_lock
    _inherited.update(_devices)
    _devices, _devices_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_start_again)


def _open_runner(name: str) -> Device:
    from kernels.runner.device import RunnerDevice

    return RunnerDevice(name)


def _open_cuda(index: int) -> Device:
    if any(name.startswith("cuda:") for name in _inherited):
        raise DeviceUnavailableError(
            f"cuda:{index}: a parent of this process has opened a GPU, and CUDA does not work in a forked child: "
            "open devices after the fork"
        )
    if "cupy" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")  # as CUDA's runtime does; without a driver, nobody waits for the import of CuPy
        except OSError as err:
            raise DeviceUnavailableError(f"cuda:{index}: no usable NVIDIA driver: {err}") from err
    try:
        from kernels.cuda_device import CudaDevice
    except ImportError as err:
        raise DeviceUnavailableError(
            f"cuda:{index}: CuPy cannot be used ({err}): "
            "pip install 'hotrow[cuda13]', or 'hotrow[cuda12]' for a driver of CUDA 12"
        ) from err
    return CudaDevice(index)
