"""A kernel as the runner launches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.device import Stream
from kernels.launch import check_arguments, check_shape
from kernels.runner.arrays import RunnerArray
from kernels.runner.module import Module, Schedule
from kernels.source import Parameter

if TYPE_CHECKING:
    from kernels.runner.device import RunnerDevice


class RunnerKernel:
    """See ``kernels.device.Kernel``."""

    def __init__(self, device: RunnerDevice, module: Module, name: str, parameters: Sequence[Parameter]) -> None:
        """One kernel of a module."""
        self._device = device
        self._module = module
        self._name = name
        self._parameters = parameters

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        stream: Stream,
        shared_bytes: int = 0,
    ) -> None:
        """See ``Kernel.__call__``."""
        shape = check_shape(self._name, grid, block, shared_bytes)
        check_arguments(self._name, self._parameters, args, self._wrong_array)
        values = [_bytes_of(argument) for argument in args]
        kept = [argument for argument in args if isinstance(argument, RunnerArray)]

        def run(schedule: Schedule) -> None:
            self._module.run(self._name, *shape, values, shared_bytes, schedule)
            kept.__len__()  # the arrays live until here

        self._device.launch(stream, run)

    def _wrong_array(self, argument: Any) -> str:
        if not isinstance(argument, RunnerArray) or argument.device is not self._device:
            return f"expected an array of {self._device.name}, not {argument!r}"[:200]
        return "" if argument.flags.c_contiguous else "expected a C-contiguous array"


def _bytes_of(argument: RunnerArray | np.generic) -> bytes:
    if isinstance(argument, RunnerArray):
        return np.uint64(argument._memory.__array_interface__["data"][0]).tobytes()
    return argument.tobytes()
