"""Streams and events of GPUs, and the translation of CUDA's errors."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kernels.cublas import WORKSPACE_BYTES, Cublas, load_library
from kernels.device import Event
from kernels.errors import DeviceFaultError, KernelError

_HELD_LAUNCHES = 64  # launches per event
_NO_MEMORY, _NOT_READY = 2, 600  # cudaErrorMemoryAllocation, cudaErrorNotReady
_idle_handles: dict[int, deque[ctypes.c_void_p]] = {}  # unused handles of cuBLAS, by GPU
_queues: set[_Queue] = set()  # of all streams; those of dropped streams stay until their work has run


class CudaEvent:
    """See ``kernels.device.Event``."""

    def __init__(self, stream: Any) -> None:
        """Record the point after the work of the CuPy stream so far.

        Raises:
            DeviceFaultError: work of the GPU has failed.
        """
        # An event belongs to the GPU that is current when it is made, and only streams of that GPU can record it.
        with raising_device_faults(), cupy.cuda.Device(stream.device_id):
            self.cupy_event = cupy.cuda.Event(disable_timing=True)
            self.cupy_event.record(stream)

    def synchronize(self) -> None:
        """See ``Event.synchronize``."""
        with raising_device_faults():
            self.cupy_event.synchronize()

    def is_done(self) -> bool:
        """See ``Event.is_done``."""
        # Not CuPy's ``done``, which is False forever after a fault.
        return bool(runtime.eventQuery(self.cupy_event.ptr) != _NOT_READY)


class _Queue:
    """Keeps what the queued work of a stream uses, until the work has run.

    ``_queues`` refers to each queue, so the garbage collector never takes a queue together with its stream. The
    collector finalizes objects in any order. It could destroy or reuse CuPy's events, streams and pinned memory while
    the work still uses them.
    """

    def __init__(self, cupy_stream: Any) -> None:
        """Start without work."""
        self.is_dropped = False  # whether the stream is gone
        self._cupy_stream = cupy_stream
        self._held: list[Any] = []
        self._waiting: deque[tuple[CudaEvent, list[Any]]] = deque()
        self._lock = threading.RLock()  # reentrant: the garbage collector may drop a buffer inside

    def hold(self, objects: Sequence[Any]) -> None:
        """Keep objects until all work queued so far has run."""
        with self._lock:
            self._held.extend(objects)
            if len(self._held) >= _HELD_LAUNCHES:
                self.free_unused()

    def free_unused(self) -> bool:
        """Free what finished work has used, without waiting; return whether no work is left."""
        with self._lock:
            if self._held:
                self._waiting.append((CudaEvent(self._cupy_stream), self._held))
                self._held = []
            while self._waiting and self._waiting[0][0].is_done():
                self._waiting.popleft()
            return not self._waiting

    def synchronize(self) -> None:
        """Wait for all work queued so far, and free what it has used."""
        with self._lock:
            done = self._held, list(self._waiting)
            self._held = []
            self._waiting.clear()
        with raising_device_faults():
            self._cupy_stream.synchronize()
        del done  # only now is it unused


class CudaStream:
    """See ``kernels.device.Stream``. Keeps the arrays of queued work until it has run."""

    def __init__(self, index: int) -> None:
        """Make a stream of this GPU."""
        self.index = index
        _free_unused()
        with raising_device_faults(), cupy.cuda.Device(index):
            self.cupy_stream = cupy.cuda.Stream()  # it and the default stream wait for each other
        self.captured: list[Any] | None = None  # while a graph is captured, the arrays it uses
        self._cublas: Cublas | None = None
        self._lock = threading.RLock()  # reentrant, as the queue's
        self._queue = _Queue(self.cupy_stream)
        _queues.add(self._queue)
        weakref.finalize(self, setattr, self._queue, "is_dropped", True).atexit = False

    def cublas(self) -> Cublas:
        """The stream's handle of cuBLAS, taken or made on first use.

        Raises:
            DeviceUnavailableError: the library is missing.
            KernelError: it is first asked for while a graph is captured.
        """
        with self._lock:
            if self._cublas is None:
                self.refuse_while_capturing("make a handle of cuBLAS")
                version = runtime.runtimeGetVersion() // 1000
                with suppress(ImportError):
                    _ = cupy.cuda.cublas  # loads the library from where CuPy finds it
                idle = _idle_handles.setdefault(self.index, deque())
                with cupy.cuda.Device(self.index):
                    self._cublas = Cublas(load_library(version), cupy.empty(WORKSPACE_BYTES, np.uint8), idle)
            return self._cublas

    def hold(self, *objects: Any) -> None:
        """Keep objects until the work just queued has run, or the memory pool would reuse their memory."""
        if self.captured is not None:
            self.captured.extend(objects)
            return
        self._queue.hold(objects)

    def wait(self, event: Event) -> None:
        """See ``Stream.wait``."""
        self.refuse_while_capturing("wait for an event")
        if not isinstance(event, CudaEvent):
            raise KernelError(f"expected an event of a GPU, not {event!r}")
        with raising_device_faults():
            self.cupy_stream.wait_event(event.cupy_event)

    def record(self) -> CudaEvent:
        """See ``Stream.record``."""
        self.refuse_while_capturing("record an event")
        return CudaEvent(self.cupy_stream)

    def synchronize(self) -> None:
        """See ``Stream.synchronize``."""
        self.refuse_while_capturing("wait")
        self._queue.synchronize()

    def refuse_while_capturing(self, what: str) -> None:
        """Raise KernelError if a graph is being captured: CUDA would fail only at the end of the capture."""
        if self.captured is not None:
            raise KernelError(f"cannot {what} while a graph is captured on this stream")


class CudaTimer:
    """See ``kernels.device.Timer``."""

    def __init__(self, stream: CudaStream) -> None:
        """Make two events with a clock; ``CudaEvent`` has none, because it is cheaper."""
        self._stream = stream
        with raising_device_faults(), cupy.cuda.Device(stream.index):
            self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def start(self) -> None:
        """See ``Timer.start``."""
        self._record(self._start)

    def stop(self) -> None:
        """See ``Timer.stop``."""
        self._record(self._stop)

    def elapsed_us(self) -> float:
        """See ``Timer.elapsed_us``."""
        self._stream.synchronize()  # raises faults, which an event alone may not report
        try:
            return 1000.0 * float(cupy.cuda.get_elapsed_time(self._start, self._stop))
        except runtime.CUDARuntimeError as err:
            raise ValueError(f"a timer must be started and stopped first: {err}") from err

    def _record(self, event: Any) -> None:
        self._stream.refuse_while_capturing("time work")
        with raising_device_faults():
            event.record(self._stream.cupy_stream)


def _free_unused() -> None:
    """Free what finished work of all streams has used, and forget dropped streams without work.

    A stream whose work uses a graph may be reachable from that graph. So it is dropped only after its work was freed.
    """
    for queue in tuple(_queues):
        try:
            is_empty = queue.free_unused()
        except (DeviceFaultError, MemoryError):  # the next caller of this stream gets the error
            continue
        if is_empty and queue.is_dropped:
            _queues.discard(queue)


@contextmanager
def raising_device_faults(what: str = "CUDA") -> Iterator[None]:
    """Raise CuPy's errors as DeviceFaultError, or as MemoryError if the host or the GPU is out of memory."""
    try:
        yield
    except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as err:
        error = MemoryError if err.status == _NO_MEMORY else DeviceFaultError
        raise error(f"{what}: {err}") from err
