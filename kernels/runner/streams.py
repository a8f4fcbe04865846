"""Streams of the runner: each has a thread that runs its work in order. A missing wait is a race, as on a GPU."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kernels.device import Event
from kernels.errors import DeviceFaultError, DeviceUnavailableError, KernelError

Work = Callable[[], object]


class _Process:
    """The process that owns a stream's thread: a forked child has no such thread and would wait forever."""

    def __init__(self, device_name: str) -> None:
        """Remember this process; ``device_name`` is for the error."""
        self._device_name = device_name
        self._number = os.getpid()

    def require(self) -> None:
        """Raise DeviceUnavailableError in another process."""
        if os.getpid() != self._number:
            reason = f"process {self._number} made this stream, and {os.getpid()} was forked from it"
            raise DeviceUnavailableError(f"{self._device_name}: {reason}: open devices after forking")


class Delays:
    """Makes streams late: on a fast stream, a host that forgets to wait usually still reads the right values.

    Half of the streams are late, and the others overtake them.

    Args:
        longest_ms: the longest wait before each piece of work and each event of a late stream; 0 for no delay.
        seed: of the random delays.
    """

    def __init__(self, longest_ms: float = 0.0, seed: int = 0) -> None:
        """See the class.

        Raises:
            ValueError: ``longest_ms`` is negative or not finite.
        """
        if not 0 <= longest_ms < float("inf"):
            raise ValueError(f"a stream cannot be late by {longest_ms} ms")
        self._longest_s = longest_ms / 1000
        self._drawn = random.Random(seed)

    def of_stream(self) -> Work:
        """Return the delay that a new stream runs before each piece of work."""
        if self._drawn.random() < 0.5 or not self._longest_s:
            return int
        drawn = random.Random(self._drawn.random())  # per stream, so which stream runs first changes no delay
        return lambda: time.sleep(drawn.uniform(0, self._longest_s))


class RunnerEvent:
    """See ``kernels.device.Event``."""

    def __init__(self, queue: Callable[[Work], Future[None]], raise_fault: Work, process: _Process) -> None:
        """Queue the event on a stream of ``process``; ``raise_fault`` raises that stream's earlier fault."""
        self._process = process
        self._raise_fault = raise_fault
        self._is_done = False
        self._reached = queue(self._reach)

    def synchronize(self) -> None:
        """See ``Event.synchronize``."""
        self._process.require()
        self._reached.result()

    def is_done(self) -> bool:
        """See ``Event.is_done``. Takes no lock, unlike the future: finalizers call it, and their threads hold locks."""
        return self._is_done

    def _reach(self) -> None:
        self._is_done = True  # before the waiting threads continue
        self._raise_fault()


class RunnerStream:
    """See ``kernels.device.Stream``.

    After a fault the stream runs nothing more, and every wait for it raises that fault.
    """

    def __init__(self, device_name: str, delay: Work = int) -> None:
        """Make a stream of that device, whose thread starts with the first work; ``delay`` runs before each work."""
        self.device_name = device_name
        self._delay = delay
        self.recorded: list[Work] | None = None  # while a graph is captured, the work that would have been queued
        self._process = _Process(device_name)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{device_name} stream")
        self._fault: DeviceFaultError | None = None
        self._is_fault_told = False

    def submit(self, work: Work) -> None:
        """Queue ``work``."""
        if self.recorded is not None:
            self.recorded.append(work)
        else:
            self._submit(self._run, work)

    def wait(self, event: Event) -> None:
        """See ``Stream.wait``."""
        self.refuse_while_capturing("wait for an event")
        self._submit(self._run, event.synchronize)

    def record(self) -> RunnerEvent:
        """See ``Stream.record``."""
        self.refuse_while_capturing("record an event")
        return RunnerEvent(self._submit, self._raise_fault, self._process)

    def synchronize(self) -> None:
        """See ``Stream.synchronize``."""
        self.record().synchronize()

    def drain(self) -> None:
        """Wait like ``synchronize``, but raise a fault only if it was not raised before."""
        if self.recorded is None:
            self._submit(int).result()
            if not self._is_fault_told:
                self._raise_fault()

    def refuse_while_capturing(self, what: str) -> None:
        """Raise KernelError if a graph is being captured."""
        if self.recorded is not None:
            raise KernelError(f"cannot {what} while a graph is captured on this stream")

    def _submit(self, function: Callable[..., object], *args: Work) -> Future[Any]:
        self._process.require()
        return self._thread.submit(self._late, function, *args)

    def _late(self, function: Callable[..., object], *args: Work) -> object:
        self._delay()
        return function(*args)

    def _run(self, work: Work) -> None:
        if self._fault is not None:
            return
        try:
            work()
        except DeviceFaultError as err:
            self._fault = err
        except Exception as err:  # noqa: BLE001 - the thread's top: nothing else reports it
            self._fault = DeviceFaultError(f"{self.device_name}: {type(err).__name__}: {err}")

    def _raise_fault(self) -> None:
        if self._fault is not None:
            self._is_fault_told = True
            raise self._fault


class RunnerTimer:
    """See ``kernels.device.Timer``. The clock is the host's, so its times say nothing about a GPU."""

    def __init__(self, stream: RunnerStream) -> None:
        """Make a timer for that stream."""
        self._stream = stream
        self._times_ns: dict[str, int] = {}

    def start(self) -> None:
        """See ``Timer.start``."""
        self._record("start")

    def stop(self) -> None:
        """See ``Timer.stop``."""
        self._record("stop")

    def elapsed_us(self) -> float:
        """See ``Timer.elapsed_us``."""
        self._stream.synchronize()
        if self._times_ns.keys() != {"start", "stop"}:
            raise ValueError("a timer must be started and stopped first")
        return (self._times_ns["stop"] - self._times_ns["start"]) / 1000

    def _record(self, point: str) -> None:
        self._stream.refuse_while_capturing("time work")
        self._stream.submit(lambda: self._times_ns.update({point: time.perf_counter_ns()}))
