"""A device: one place where kernels run, a GPU (``"cuda:0"``) or the CPU runner (``"runner"``), behind one protocol.

What is queued on one stream runs in that order, and beside the host and other streams; order between streams is what
events make. The host waits only in ``synchronize``, ``Device.to_host`` and where an operation below says so. Every
method may be called from any thread. A process that forks opens devices after forking: in a forked child, one that the
parent opened is of no use, and says so; and a child of a process that has opened a GPU can open none.

A fault of a kernel (out of bounds, or a deadlock on the runner) is raised as ``DeviceFaultError`` where the host next
waits for that work.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from kernels.errors import DeviceUnavailableError

Array: TypeAlias = Any
"""An array in a device's memory, of the namespace ``Device.xp``. It never becomes a NumPy array by itself."""

_NAME = re.compile(r"(?P<runner>runner)(?::(?P<number>\d+))?|cuda:(?P<index>\d+)|auto")
_devices: dict[str, Device] = {}
_devices_lock = threading.Lock()
_inherited: dict[str, Device] = {}  # in a forked child, its parents': kept, as letting go of one would call CUDA


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the work before it has run.

        Raises:
            DeviceFaultError: some of that work failed.
        """

    def is_done(self) -> bool:
        """Tell, without waiting even for a lock, whether the work before it has run or failed: finalizers ask."""


class Stream(Protocol):
    """A queue of work, which runs in order."""

    def wait(self, event: Event) -> None:
        """Let what is queued from now on start after the event, which may be of another stream of the device."""

    def record(self) -> Event:
        """Return the point after what is queued now."""

    def synchronize(self) -> None:
        """Wait until all that is queued now has run.

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
            args: in the order of the kernel's parameters: for a pointer a C-contiguous array of this device, for a
                value a NumPy scalar of just that type.
            stream: of this device.
            shared_bytes: dynamic shared memory per block.

        Raises:
            KernelError: the arguments do not fit; nothing was queued. A grid of no blocks is such a case.
        """


class Timer(Protocol):
    """A stopwatch on the device's own clock, for work of one stream."""

    def start(self) -> None:
        """Begin behind what the stream has queued now; does not wait."""

    def stop(self) -> None:
        """End behind what the stream has queued now; does not wait."""

    def elapsed_us(self) -> float:
        """Wait for the end, and return the microseconds between the two.

        Raises:
            DeviceFaultError: some of the stream's work failed.
            ValueError: the timer was not started and stopped.
        """


class Graph(Protocol):
    """Captured work, to be launched again and again with the same arrays."""

    result: Any
    """What the captured function returned. Arrays in it are the graph's own: each launch writes them anew."""

    def launch(self, stream: Stream) -> None:
        """Queue the captured work; does not wait. One launch of a graph at a time."""


class Device(Protocol):
    """One place where kernels run. Shapes and dtypes are NumPy's."""

    name: str
    """As ``open_device`` takes it: ``"cuda:0"``, ``"runner"``."""

    uses_host_memory: bool
    """Whether its memory is the host's: the runner's is."""

    xp: Any
    """The array namespace: CuPy, or on the runner NumPy with the manners of CuPy.

    Under ``using(stream)`` its operations are work of that stream. Elsewhere they are ordered with all streams: each
    begins after what any of them has queued, and what is queued later begins after it. That is CUDA's default stream:
    right without further thought, and too slow between requests. The runner does operations at once, having waited.
    """

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device's memory."""

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return a new array of unknown content, in memory aligned to 256 bytes."""

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return a new array of zeros, which every stream finds there; may wait."""

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a new page-locked host array of zeros, which kernels reach through ``device_view``."""

    def device_view(self, pinned: npt.NDArray[Any]) -> Array:
        """Return a pinned array as an array of the device: the same memory.

        Raises:
            ValueError: the array is not from ``pinned``, or not C-contiguous.
        """

    def stream(self) -> Stream:
        """Return a new stream, which waits for no other, but for array operations outside ``using``."""

    def upload(self, host: npt.NDArray[Any], out: Array, stream: Stream) -> None:
        """Queue a copy to the device.

        Args:
            host: if pinned, it must keep its content until the copy has run; any other is copied first.
            out: same shape and dtype; both C-contiguous.
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
        """Copy to a new host array, after what the stream of ``using`` has queued, or, elsewhere, any stream; waits.

        Raises:
            DeviceFaultError: work that it waited for failed.
        """

    def kernel(self, file: str | Path, name: str, **defines: str | int) -> Kernel:
        """Return a kernel, compiled for this device if it is not yet: in the process and on disk by content.

        Args:
            file: below ``kernels/cuda``, or an absolute path.
            name: of the ``extern "C"`` kernel.
            defines: macros.

        Raises:
            KernelError: no such file or kernel, or it does not compile; the message has the compiler's.
        """

    def product(self, x: Array, y: Array, stream: Stream, *, is_tf32: bool = False) -> Array:
        """Queue the matrix product ``x @ y``, also where a graph is captured, where ``xp``'s own products cannot be.

        A graph with products is to be launched on the stream it was captured on: they share that stream's workspace. As
        for array operations, factors are not kept: what was made on another stream must live until the product has run.

        Args:
            x: float32 or float16[..., M, K].
            y: of the same type, [..., K, N], or [K, N] for all matrices of x.
            stream: of this device.
            is_tf32: a GPU may round factors of float32 to TF32, 10 bits behind the point.

        Returns:
            float32[..., M, N], each sum of float32.

        Raises:
            ValueError: shapes or dtypes do not fit.
            DeviceUnavailableError: the library that multiplies is missing.
        """

    def capture(self, stream: Stream, function: Callable[[], Any]) -> Graph:
        """Call ``function`` and keep what it queues on ``stream`` as a graph. None of it runs now.

        The graph keeps the function too, with all that it owns: a graph that its function can reach is a circle, whose
        memory waits for the garbage collector.

        The function runs under ``using(stream)``. It may launch kernels, upload from and download to pinned arrays, and
        use array operations; it must not wait, nor read arrays on the host, nor use other streams. Of CuPy's operations
        it cannot use products of matrices (``product`` can be captured), ``asarray`` of host arrays, and joins of more
        than eight arrays, whose addresses CuPy uploads.

        Raises:
            KernelError: the function did what cannot be captured.
        """

    def timer(self, stream: Stream) -> Timer:
        """Return a timer of a stream. It may be used again and again; not while a graph is captured."""

    def properties(self) -> dict[str, str | int]:
        """Return what a record of measurements says about the device: at least its ``name``, as the maker has it."""

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """Let this thread's array operations go to ``stream`` meanwhile.

        Arrays made here are given back to what is made here: later work of the same stream. Kernels, copies and graphs
        keep their arrays until they have run; array operations do not. So an array that was made elsewhere, or that
        operations of another stream use, is kept by the caller until these have run.
        """


def open_device(name: str) -> Device:
    """Return the device called ``name``; the same object for the same name in a process.

    Args:
        name: ``"cuda:<index>"``, ``"runner"`` or ``"runner:<number>"`` (runners with different numbers are different
            devices), or ``"auto"``: the first GPU.

    Raises:
        DeviceUnavailableError: CuPy or the driver is missing, or there is no GPU of that index; CuPy has a default
            stream per thread; a process that this one was forked from has opened a GPU; for the runner, no g++.
        ValueError: ``name`` is not a device's name.
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


def _begin_anew() -> None:
    """In a forked child: its parent's devices are not its own, and another thread may have held the lock."""
    global _devices, _devices_lock
    _inherited.update(_devices)
    _devices, _devices_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _open_runner(name: str) -> Device:
    from kernels.runner.device import RunnerDevice

    return RunnerDevice(name)


def _open_cuda(index: int) -> Device:
    if any(name.startswith("cuda:") for name in _inherited):
        raise DeviceUnavailableError(
            f"cuda:{index}: a process that this one was forked from has opened a GPU, and CUDA does not go on in a "
            "forked child: open devices after forking"
        )
    try:
        from kernels.cuda import CudaDevice
    except ImportError as err:
        raise DeviceUnavailableError(
            f"cuda:{index}: CuPy cannot be used ({err}): "
            "pip install 'hotrow[cuda13]', or 'hotrow[cuda12]' for a driver of CUDA 12"
        ) from err
    return CudaDevice(index)
