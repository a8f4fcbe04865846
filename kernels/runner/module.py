"""Compile kernels for the runner and run them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import DeviceFaultError
from kernels.launch import Shape
from kernels.runner.compiler import Compiler
from kernels.source import KernelSource, macro_options

_MESSAGE_BYTES = 2048


@dataclass(frozen=True)
class Schedule:
    """How a launch runs.

    Args:
        seed: with 0, threads and blocks take turns in a fixed order; any other number draws a random order.
        os_threads: how many blocks run in parallel.
    """

    seed: int = 0
    os_threads: int = 1


class Module:
    """The kernels of one file, compiled for the CPU.

    Args:
        source: the file.
        defines: macros.
        compiler: of the device.
        scheduler: of the same compiler.
    """

    def __init__(
        self, source: KernelSource, defines: dict[str, str | int], compiler: Compiler, scheduler: Scheduler
    ) -> None:
        """See the class.

        Raises:
            KernelError: the file does not compile.
        """
        entries = "".join(
            f'extern "C" __attribute__((visibility("default"))) void hotrow_entry_{name}(void** arguments) '
            f"{{ cpu::call_kernel(&{name}, arguments); }}\n"
            for name in source.signatures
        )
        text = f'{source.text}\n#line 1 "<entries>"\n{entries}'
        self._library = ctypes.CDLL(str(compiler.kernels(source.path.name, text, macro_options(defines))))
        self._scheduler = scheduler

    def run(
        self, name: str, grid: Shape, block: Shape, values: list[bytes], shared_bytes: int, schedule: Schedule
    ) -> None:
        """Run a kernel to its end, on the calling thread and ``os_threads - 1`` others.

        Args:
            name: of the kernel.
            grid: blocks.
            block: threads.
            values: the bytes of each argument.
            shared_bytes: dynamic shared memory.
            schedule: the order of threads and blocks.

        Raises:
            DeviceFaultError: its threads deadlock or break a rule of CUDA.
        """
        entry = getattr(self._library, f"hotrow_entry_{name}")
        self._scheduler.run(name, entry, self._library.hotrow_prepare, grid, block, values, shared_bytes, schedule)


class Scheduler:
    """The library that runs the threads of blocks; it is loaded globally, for the kernels' libraries to find it."""

    def __init__(self, library: Path) -> None:
        """Load it."""
        self._launch = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL).hotrow_runner_launch
        self._launch.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]

    def run(
        self,
        name: str,
        entry: ctypes._NamedFuncPointer,
        prepare: ctypes._NamedFuncPointer,
        grid: Shape,
        block: Shape,
        values: list[bytes],
        shared_bytes: int,
        schedule: Schedule,
    ) -> None:
        """See ``Module.run``."""
        buffers = [ctypes.create_string_buffer(value, 8) for value in values]  # 8 bytes keep each one aligned
        arguments = (ctypes.c_void_p * max(len(buffers), 1))(*(ctypes.addressof(value) for value in buffers))
        shape = (ctypes.c_uint * 6)(*grid, *block)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = self._launch(
            ctypes.cast(entry, ctypes.c_void_p),
            ctypes.cast(prepare, ctypes.c_void_p),
            arguments,
            shape,
            shared_bytes,
            schedule.os_threads,
            schedule.seed % 2**64,
            message,
            _MESSAGE_BYTES,
        )
        if failed:
            raise DeviceFaultError(f"{name}: {message.value.decode()}")
