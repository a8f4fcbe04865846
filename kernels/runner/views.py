"""Views of arrays: CuPy makes them on the host, without work on the device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

_RESHAPES = frozenset({np.ndarray.reshape, np.reshape})
_TURNS = frozenset(
    {
        np.ndarray.view,
        np.ndarray.transpose,
        np.transpose,
        np.ndarray.swapaxes,
        np.swapaxes,
        np.ndarray.squeeze,
        np.squeeze,
    }
)


def view_of(
    memory: npt.NDArray[Any], operation: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> npt.NDArray[Any] | None:
    """Return the view that an operation makes of an array, or None if the operation reads the array's values.

    Args:
        memory: the array.
        operation: see ``Owner.operate``.
        rest: its positional arguments after the array.
        kwargs: its keyword arguments.
    """
    if operation is operator.getitem:
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        if not all(map(_is_basic, index)):
            return None
        return memory[index if ... in index else (*index, ...)]  # with ..., a single value is an array too
    if operation in _TURNS or (operation in _RESHAPES and memory.flags.c_contiguous and not kwargs):
        view: npt.NDArray[Any] = operation(memory, *rest, **kwargs)
        return view
    return None


def _is_basic(part: Any) -> bool:
    """Whether a part of an index is basic indexing, which makes a view."""
    if isinstance(part, bool):
        return False
    return part is None or isinstance(part, int | np.integer | slice | EllipsisType)
