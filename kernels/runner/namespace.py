"""The runner's array namespace: NumPy's functions for arrays of the runner."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from kernels.runner.arrays import Owner

_FROM_THE_HOST = frozenset({"asarray", "array"})  # the two functions that take host arrays, as in CuPy


class Namespace:
    """NumPy's functions for arrays of one device.

    Types and constants are NumPy's own. Functions take and return device arrays. Only ``asarray`` and ``array`` also
    take host arrays, and copy them.
    """

    def __init__(self, device: Owner, numpy: types.ModuleType = np) -> None:
        """Wrap NumPy, or a part of it such as ``numpy.linalg``, for one device."""
        self._device = device
        self._numpy = numpy

    def __getattr__(self, name: str) -> Any:
        """Return NumPy's attribute of that name, wrapped if it is a function."""
        found = getattr(self._numpy, name)
        if isinstance(found, types.ModuleType):
            return Namespace(self._device, found)
        if isinstance(found, type) or not callable(found):
            return found
        takes_host_arrays = name in _FROM_THE_HOST

        def function(*args: Any, **kwargs: Any) -> Any:
            if takes_host_arrays:
                args = tuple(self._device.from_host(value) for value in args)
            return self._device.operate(found, args, kwargs, in_place=kwargs.get("out") is not None)

        return function

    def __repr__(self) -> str:
        """Name the device."""
        return f"<array namespace of {self._device.name}>"
