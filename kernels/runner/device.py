"""The runner as a device."""

from __future__ import annotations

import itertools
import operator
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.device import Graph, Kernel, Stream
from kernels.errors import KernelError
from kernels.operands import pinned_address, require_factors, require_same_form
from kernels.runner.arrays import Operation, RunnerArray, each_array
from kernels.runner.compiler import Compiler
from kernels.runner.graph import RunnerGraph
from kernels.runner.kernel import RunnerKernel
from kernels.runner.memory import Block, PinnedBlock, allocate
from kernels.runner.module import Module, Schedule, Scheduler
from kernels.runner.namespace import Namespace
from kernels.runner.streams import Delays, RunnerStream, RunnerTimer, Work
from kernels.runner.views import view_of
from kernels.source import read_source
from kernels.system_memory import available_memory_bytes

_UNKNOWN = 0xA5  # the content of memory before the first write
# Operations that CuPy cannot capture.
_PRODUCTS = frozenset(
    {operator.matmul, operator.imatmul, np.matmul, np.dot, np.ndarray.dot, np.inner, np.tensordot, np.vdot}
)
_JOINS = frozenset({np.concatenate, np.stack, np.hstack, np.vstack})
_MOST_JOINED = 8


class RunnerDevice:
    """See ``kernels.device.Device``.

    Opening it reads these environment variables: ``HOTROW_RUNNER_SANITIZER`` (``thread`` or ``address``),
    ``HOTROW_RUNNER_SEED`` and ``HOTROW_RUNNER_THREADS`` (the initial ``Schedule``), and ``HOTROW_RUNNER_DELAY_MS`` (the
    longest delay of its streams, see ``Delays``).
    """

    def __init__(self, name: str) -> None:
        """Open the device called ``name``."""
        self.name = name
        self.uses_host_memory = True
        self._compiler = Compiler(os.environ.get("HOTROW_RUNNER_SANITIZER", ""))
        self._scheduler = Scheduler(self._compiler.scheduler())
        self._modules: dict[tuple[str, tuple[tuple[str, str | int], ...]], Module] = {}
        self._modules_lock = threading.Lock()
        self._schedule = Schedule(
            int(os.environ.get("HOTROW_RUNNER_SEED", "0")), int(os.environ.get("HOTROW_RUNNER_THREADS", "1"))
        )
        self._delays = Delays(float(os.environ.get("HOTROW_RUNNER_DELAY_MS", "0")), self._schedule.seed)
        self._launches = itertools.count()
        self._streams: weakref.WeakSet[RunnerStream] = weakref.WeakSet()
        self._current = threading.local()
        self.xp = Namespace(self)

    @contextmanager
    def scheduled(self, seed: int = 0, os_threads: int = 1) -> Iterator[None]:
        """Run launches that any thread queues inside this context by another ``Schedule``; each draws its own order."""
        before, self._schedule = self._schedule, Schedule(seed, os_threads)
        self._launches = itertools.count()
        try:
            yield
        finally:
            self._schedule = before

    def memory(self) -> tuple[int, int]:
        """See ``Device.memory``: the machine's memory, with its file cache as free memory."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        free_bytes = available_memory_bytes() or os.sysconf("SC_AVPHYS_PAGES") * page_bytes
        return free_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> RunnerArray:
        """See ``Device.empty``."""
        memory = allocate(Block, shape, dtype, _UNKNOWN)
        stream = self._current_stream()
        if stream is not None:  # CuPy's pool returns memory that earlier work of this stream may still write
            stream.submit(lambda: memory.reshape(-1).view(np.uint8).fill(_UNKNOWN))
        return RunnerArray(memory, self)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> RunnerArray:
        """See ``Device.zeros``."""
        memory = allocate(Block, shape, dtype, 0)
        stream = self._current_stream()
        if stream is not None and stream.recorded is not None:  # each launch of the graph must start from zeros
            stream.submit(lambda: memory.fill(0))
        return RunnerArray(memory, self)

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See ``Device.pinned``."""
        return allocate(PinnedBlock, shape, dtype, 0)

    def device_view(self, pinned: npt.NDArray[Any]) -> RunnerArray:
        """See ``Device.device_view``."""
        if pinned_address(pinned, PinnedBlock) is None or not pinned.flags.c_contiguous:
            raise ValueError("a device view needs a C-contiguous array from Device.pinned")
        return RunnerArray(pinned, self)

    def stream(self) -> RunnerStream:
        """See ``Device.stream``."""
        stream = RunnerStream(self.name, self._delays.of_stream())
        self._streams.add(stream)
        return stream

    def upload(self, host: npt.NDArray[Any], out: RunnerArray, stream: Stream) -> None:
        """See ``Device.upload``."""
        target = self.memory_of(out)
        require_same_form(host, out)
        source = host if pinned_address(host, PinnedBlock) is not None else host.copy()
        self._queue(stream, lambda: np.copyto(target, source))

    def download(self, array: RunnerArray, out: npt.NDArray[Any], stream: Stream) -> None:
        """See ``Device.download``."""
        source = self.memory_of(array)
        require_same_form(out, array)
        if pinned_address(out, PinnedBlock) is None:
            raise ValueError("a download needs an array from Device.pinned to write to")
        self._queue(stream, lambda: np.copyto(out, source))

    def to_host(self, array: RunnerArray) -> npt.NDArray[Any]:
        """See ``Device.to_host``."""
        memory = self.memory_of(array)
        self._wait_for(self._current_stream())
        return memory.copy()

    def kernel(self, file: str | Path, name: str, **defines: str | int) -> Kernel:
        """See ``Device.kernel``."""
        source = read_source(file)
        parameters = source.parameters(name)
        key = source.text, tuple(sorted(defines.items()))
        with self._modules_lock:
            module = self._modules.get(key)
            if module is None:
                module = self._modules[key] = Module(source, defines, self._compiler, self._scheduler)
        return RunnerKernel(self, module, name, parameters)

    def product(self, x: RunnerArray, y: RunnerArray, stream: Stream, *, is_tf32: bool = False) -> RunnerArray:
        """See ``Device.product``; nothing is rounded to TF32 here."""
        self.memory_of(x), self.memory_of(y)
        require_factors(x, y)
        with self.using(stream):
            if x.dtype == np.float16:  # products of halves are exact in float32
                x, y = x.astype(np.float32), y.astype(np.float32)
            product: RunnerArray = self._operate(np.matmul, (x, y), {})
            return product

    def capture(self, stream: Stream, function: Callable[[], Any]) -> Graph:
        """See ``Device.capture``."""
        queue = self._mine(stream)
        if queue.recorded is not None:
            raise KernelError("this stream is already capturing a graph")
        queue.recorded = []
        try:
            with self.using(stream):
                result = function()
            return RunnerGraph(self.name, function, queue.recorded, result)
        finally:
            queue.recorded = None

    def timer(self, stream: Stream) -> RunnerTimer:
        """See ``Device.timer``."""
        return RunnerTimer(self._mine(stream))

    def properties(self) -> dict[str, str | int]:
        """See ``Device.properties``."""
        return {"name": f"kernel runner on {platform.machine()}"}

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """See ``Device.using``."""
        before, self._current.stream = self._current_stream(), self._mine(stream)
        try:
            yield
        finally:
            self._current.stream = before

    def namespace(self) -> Namespace:
        """See ``arrays.Owner.namespace``."""
        return self.xp

    def from_host(self, value: Any) -> Any:
        """See ``arrays.Owner.from_host``."""
        if not isinstance(value, np.ndarray):
            return value
        self._refuse_while_capturing("copy a host array, which is gone when the graph is launched: upload a pinned one")
        return RunnerArray(value.copy(), self)

    def operate(self, operation: Operation, args: Any, kwargs: dict[str, Any], *, in_place: bool = False) -> Any:
        """Run an array operation: now, after waiting, or at each launch of the graph that is being captured.

        A view waits for nothing, as on a GPU. Waiting here would hide a missing wait in the caller.

        ``in_place`` operations return no new array. In a graph, running any other operation once on the current content
        of its arguments allocates its result.

        Raises:
            KernelError: CuPy cannot capture it.
        """
        if isinstance(args, tuple) and args and isinstance(args[0], RunnerArray):
            view = view_of(self.memory_of(args[0]), operation, args[1:], kwargs)
            if view is not None:
                return RunnerArray(view, self)
        if operation in _PRODUCTS:
            self._refuse_while_capturing("multiply matrices by cuBLAS as CuPy calls it: use Device.product")
        if operation in _JOINS and len(args[0]) > _MOST_JOINED:
            self._refuse_while_capturing(f"join more than {_MOST_JOINED} arrays, whose addresses CuPy then uploads")
        return self._operate(operation, args, kwargs, in_place=in_place)

    def _operate(self, operation: Operation, args: Any, kwargs: dict[str, Any], *, in_place: bool = False) -> Any:
        args, kwargs = (each_array(given, self._argument) for given in (args, kwargs))
        operation = _quietly(operation)
        stream = self._current_stream()
        if stream is None or stream.recorded is None:
            self._wait_for(stream)
            return each_array(operation(*args, **kwargs), self._result)
        if in_place:
            self._queue(stream, lambda: operation(*args, **kwargs))
            return each_array(kwargs.get("out"), self._result)
        result = each_array(operation(*args, **kwargs), self._result)
        self._queue(stream, lambda: _write(result, operation(*args, **kwargs)))
        return result

    def memory_of(self, array: Any) -> npt.NDArray[Any]:
        """Return the memory of an array of this device.

        Raises:
            TypeError: it is not an array of this device.
        """
        if not isinstance(array, RunnerArray) or array.device is not self:
            raise TypeError(f"expected an array of {self.name}, not {array!r}"[:200])
        return array._memory

    def launch(self, stream: Stream, run: Callable[[Schedule], None]) -> None:
        """Queue a kernel's launch with the current schedule."""
        schedule = self._schedule
        if schedule.seed:
            schedule = Schedule(schedule.seed * 1_000_003 + next(self._launches), schedule.os_threads)
        self._queue(stream, lambda: run(schedule))

    def _queue(self, stream: Stream, work: Work) -> None:
        self._mine(stream).submit(work)

    def _mine(self, stream: Stream) -> RunnerStream:
        if not isinstance(stream, RunnerStream) or stream.device_name != self.name:
            raise KernelError(f"expected a stream of {self.name}, not {stream!r}")
        return stream

    def _current_stream(self) -> RunnerStream | None:
        """The stream of ``using``, or None for CUDA's default stream."""
        stream: RunnerStream | None = getattr(self._current, "stream", None)
        return stream

    def _refuse_while_capturing(self, what: str) -> None:
        stream = self._current_stream()
        if stream is not None and stream.recorded is not None:
            raise KernelError(f"a captured graph cannot {what}")

    def _wait_for(self, stream: RunnerStream | None) -> None:
        if stream is not None:
            stream.synchronize()
            return
        for other in list(self._streams):
            other.drain()

    def _argument(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            raise TypeError(f"{self.name}: a host array cannot take part in a device operation: use xp.asarray")
        return self.memory_of(value) if isinstance(value, RunnerArray) else value

    def _result(self, value: Any) -> Any:
        return RunnerArray(np.asarray(value), self) if isinstance(value, np.ndarray | np.generic) else value


def _quietly(operation: Operation) -> Operation:
    """Return the operation without NumPy's warnings: a GPU does not warn of overflow."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return operation(*args, **kwargs)

    return run


def _write(result: Any, values: Any) -> None:
    """Copy the values that a graph's operation returned into the arrays of the graph's result."""
    if isinstance(result, tuple | list):
        for part, value in zip(result, values, strict=True):
            _write(part, value)
    elif isinstance(result, RunnerArray):
        np.copyto(result._memory, values)
