"""Captured work of the runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernels.device import Stream
from kernels.errors import KernelError
from kernels.runner.streams import RunnerStream, Work


class RunnerGraph:
    """See ``kernels.device.Graph``. It keeps the queued work and its arrays; a launch queues that work again."""

    def __init__(self, device_name: str, function: Callable[[], Any], recorded: Sequence[Work], result: Any) -> None:
        """``recorded`` is the work that the function queued, and ``result`` is its return value."""
        self.result = result
        self._function = function  # launches may know memory that it owns only by address
        self._device_name = device_name
        self._recorded = tuple(recorded)

    def launch(self, stream: Stream) -> None:
        """See ``Graph.launch``."""
        if not isinstance(stream, RunnerStream) or stream.device_name != self._device_name:
            raise KernelError(f"a graph of {self._device_name} cannot be launched on {stream!r}")
        for work in self._recorded:
            stream.submit(work)
