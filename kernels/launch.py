"""Checks of a launch on every device, before anything is queued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.errors import KernelError
from kernels.source import Parameter

MOST_THREADS = 1024
MOST_SHARED_BYTES = 227 * 1024
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_MOST_IN_BLOCK = (1024, 1024, 64)

Shape = tuple[int, int, int]


def check_shape(kernel: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int) -> tuple[Shape, Shape]:
    """Return grid and block with three numbers each.

    Raises:
        KernelError: there are not one to three numbers, a number is below 1 or above CUDA's limit, or a block has more
            than 1,024 threads or too much shared memory.
    """
    shapes = _three(kernel, "grid", grid, _MOST_BLOCKS), _three(kernel, "block", block, _MOST_IN_BLOCK)
    threads = math.prod(shapes[1])
    if threads > MOST_THREADS:
        raise KernelError(f"{kernel}: a block of {threads} threads: a block has at most {MOST_THREADS}")
    if not 0 <= shared_bytes <= MOST_SHARED_BYTES:
        raise KernelError(f"{kernel}: {shared_bytes} bytes of shared memory: a block has 0 to {MOST_SHARED_BYTES}")
    return shapes


def _three(kernel: str, what: str, given: Sequence[int], shape: Shape) -> Shape:
    numbers = [int(number) for number in given]
    if not 1 <= len(numbers) <= 3:
        raise KernelError(f"{kernel}: a {what} has one to three numbers, not {len(numbers)}")
    x, y, z = (*numbers, 1, 1, 1)[:3]
    if not (1 <= x <= shape[0] and 1 <= y <= shape[1] and 1 <= z <= shape[2]):
        raise KernelError(f"{kernel}: {what} {(x, y, z)}: each number lies between 1 and {shape}")
    return x, y, z


def check_arguments(
    kernel: str, parameters: Sequence[Parameter], arguments: Sequence[Any], check_array: Callable[[Any], str]
) -> None:
    """Check that arguments fit a kernel's parameters.

    Args:
        kernel: its name, for messages.
        parameters: of the kernel.
        arguments: of the launch.
        check_array: returns why an argument cannot be used for a pointer, or "".

    Raises:
        KernelError: the number of arguments is wrong, an argument for a pointer is not an array of the device, or a
            value is not a NumPy scalar of the parameter's type.
    """
    if len(arguments) != len(parameters):
        raise KernelError(f"{kernel} takes {len(parameters)} arguments, not {len(arguments)}")
    for place, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        wrong = check_array(argument) if parameter.dtype is None else _check_scalar(parameter.dtype, argument)
        if wrong:
            raise KernelError(f"{kernel}: argument {place}, {parameter.name!r}: {wrong}")


def _check_scalar(dtype: np.dtype[np.generic], argument: Any) -> str:
    if not isinstance(argument, np.generic):
        return f"expected np.{dtype}, not {type(argument).__name__}, whose width is not the parameter's"
    return "" if argument.dtype == dtype else f"expected np.{dtype}, not np.{argument.dtype}"
