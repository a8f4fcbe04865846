"""Streams and events of GPUs, and CUDA's errors as Hotrow's."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kernels.cublas import WORKSPACE_BYTES, Cublas, load_library
from kernels.device import Event
from kernels.errors import DeviceFaultError, KernelError

_HELD_LAUNCHES = 64  # how many launches one event stands for
_NO_MEMORY, _NOT_READY = 2, 600  # cudaErrorMemoryAllocation, cudaErrorNotReady
_idle_handles: dict[int, deque[ctypes.c_void_p]] = {}  # of cuBLAS, that nobody uses, by GPU
_orphans: deque[tuple[CudaEvent, list[Any]]] = deque()  # arrays of dropped streams, and when they may go


class CudaEvent:
    """See ``kernels.device.Event``."""

    def __init__(self, stream: Any) -> None:
        """Record the point after what the CuPy stream has now.

        Raises:
            DeviceFaultError: work of the GPU has failed.
        """
        # An event is of the GPU that is current when it is made, and only that GPU's streams can record it.
        with told_as_faults(), cupy.cuda.Device(stream.device_id):
            self.cupy_event = cupy.cuda.Event(disable_timing=True)
            self.cupy_event.record(stream)

    def synchronize(self) -> None:
        """See ``Event.synchronize``."""
        with told_as_faults():
            self.cupy_event.synchronize()

    def is_done(self) -> bool:
        """See ``Event.is_done``."""
        # Not CuPy's ``done``: after a fault, when no more is to come, it says no forever.
        return bool(runtime.eventQuery(self.cupy_event.ptr) != _NOT_READY)


class CudaStream:
    """See ``kernels.device.Stream``. Keeps the arrays of what is queued until it has run."""

    def __init__(self, index: int) -> None:
        """Make a stream of that GPU."""
        self.index = index
        self._held: list[Any] = []
        self._waiting: deque[tuple[CudaEvent, list[Any]]] = deque()
        let_go_of_orphans()
        with told_as_faults(), cupy.cuda.Device(index):
            self.cupy_stream = cupy.cuda.Stream()  # the default stream waits for it, and it for the default stream
        self.captured: list[Any] | None = None  # while a graph is captured, the arrays it uses
        self._cublas: Cublas | None = None
        self._lock = threading.RLock()  # again, where what waits for a dropped buffer is collected inside

    def cublas(self) -> Cublas:
        """The stream's handle of cuBLAS, taken or made when it is first asked for.

        Raises:
            DeviceUnavailableError: the library is missing.
            KernelError: it is first asked for while a graph is captured.
        """
        with self._lock:
            if self._cublas is None:
                self.refuse_while_capturing("make a handle of cuBLAS")
                version = runtime.runtimeGetVersion() // 1000
                with suppress(ImportError):
                    _ = cupy.cuda.cublas  # loads the library, wherever CuPy finds it
                idle = _idle_handles.setdefault(self.index, deque())
                with cupy.cuda.Device(self.index):
                    self._cublas = Cublas(load_library(version), cupy.empty(WORKSPACE_BYTES, np.uint8), idle)
            return self._cublas

    def hold(self, *objects: Any) -> None:
        """Keep objects until what was just queued has run: the memory pool would give their memory to others."""
        if self.captured is not None:
            self.captured.extend(objects)
            return
        with self._lock:
            self._held.extend(objects)
            if len(self._held) < _HELD_LAUNCHES:
                return
            self._waiting.append((CudaEvent(self.cupy_stream), self._held))
            self._held = []
            while self._waiting and self._waiting[0][0].is_done():
                self._waiting.popleft()

    def wait(self, event: Event) -> None:
        """See ``Stream.wait``."""
        self.refuse_while_capturing("wait for an event")
        if not isinstance(event, CudaEvent):
            raise KernelError(f"expected an event of a GPU, not {event!r}")
        with told_as_faults():
            self.cupy_stream.wait_event(event.cupy_event)

    def record(self) -> CudaEvent:
        """See ``Stream.record``."""
        self.refuse_while_capturing("record an event")
        return CudaEvent(self.cupy_stream)

    def synchronize(self) -> None:
        """See ``Stream.synchronize``."""
        self.refuse_while_capturing("wait")
        with self._lock:
            done = self._held, list(self._waiting)
            self._held = []
            self._waiting.clear()
        with told_as_faults():
            self.cupy_stream.synchronize()
        del done  # until here: only now has nobody a use for it

    def refuse_while_capturing(self, what: str) -> None:
        """Raise KernelError if a graph is being captured: CUDA would fail the capture at its end, and not say why."""
        if self.captured is not None:
            raise KernelError(f"cannot {what} while a graph is captured on this stream")

    def __del__(self) -> None:
        """Leave what is still queued its arrays: CUDA runs it, stream or not."""
        if sys.is_finalizing():
            return
        if self._held:
            with suppress(DeviceFaultError):
                self._waiting.append((CudaEvent(self.cupy_stream), self._held))
        _orphans.extend(self._waiting)


class CudaTimer:
    """See ``kernels.device.Timer``."""

    def __init__(self, stream: CudaStream) -> None:
        """Two events that keep the time, which those of ``CudaEvent`` do not: they cost less."""
        self._stream = stream
        with told_as_faults(), cupy.cuda.Device(stream.index):
            self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def start(self) -> None:
        """See ``Timer.start``."""
        self._record(self._start)

    def stop(self) -> None:
        """See ``Timer.stop``."""
        self._record(self._stop)

    def elapsed_us(self) -> float:
        """See ``Timer.elapsed_us``."""
        self._stream.synchronize()  # tells of faults, which an event alone may not
        try:
            return 1000.0 * float(cupy.cuda.get_elapsed_time(self._start, self._stop))
        except runtime.CUDARuntimeError as err:
            raise ValueError(f"a timer must be started and stopped first: {err}") from err

    def _record(self, event: Any) -> None:
        self._stream.refuse_while_capturing("time work")
        with told_as_faults():
            event.record(self._stream.cupy_stream)


def let_go_of_orphans() -> None:
    """Forget the arrays of dropped streams whose work has run by now."""
    for _ in range(len(_orphans)):
        with suppress(IndexError):  # another thread does the same
            event, held = _orphans.popleft()
            if not event.is_done():
                _orphans.append((event, held))


@contextmanager
def told_as_faults(what: str = "CUDA") -> Iterator[None]:
    """Raise CuPy's errors as DeviceFaultError, and as MemoryError where the host or the GPU has no more."""
    try:
        yield
    except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as err:
        error = MemoryError if err.status == _NO_MEMORY else DeviceFaultError
        raise error(f"{what}: {err}") from err
