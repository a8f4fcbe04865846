"""Arrays of the runner: NumPy arrays that behave like CuPy's.

They refuse what CuPy refuses: mixing with host arrays, implicit conversion to NumPy, and mixing two devices. They also
refuse ``bool``, ``int`` and ``float``, which CuPy allows, because each of them makes the host wait without saying so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from kernels.device import Array

Operation = Callable[..., Any]

_ATTRIBUTES = ("shape", "dtype", "size", "ndim", "nbytes", "itemsize", "strides", "flags")
_METHOD_NAMES = """
    all any argmax argmin argsort astype clip copy cumsum dot fill flatten max mean min nonzero prod put ravel repeat
    reshape round searchsorted sort squeeze std sum swapaxes take transpose var view
"""
_METHODS = frozenset(_METHOD_NAMES.split())
_IN_PLACE = frozenset({"fill", "put", "sort"})


class Owner(Protocol):
    """The device of an array, as the array sees it."""

    name: str

    def operate(self, operation: Operation, args: Any, kwargs: dict[str, Any], *, in_place: bool = False) -> Any:
        """Run ``operation`` on the current stream; ``args`` and ``kwargs`` may contain arrays of this device."""

    def namespace(self) -> Any:
        """Return the namespace of the arrays."""

    def from_host(self, value: Any) -> Any:
        """Copy a host array to a new device array, and return any other value unchanged."""


class RunnerArray:
    """An array in a runner's memory. See ``kernels.device.Array``."""

    __array_priority__ = 100.0

    def __init__(self, memory: npt.NDArray[Any], device: Owner) -> None:
        """Wrap ``memory``, which is read and written only through the device."""
        self._memory = memory
        self._device = device

    def __repr__(self) -> str:
        """Show dtype and shape only: reading the values would wait for the device."""
        return f"<{self.dtype}{list(self.shape)} on {self._device.name}>"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or method that CuPy's arrays also have and that stays on the device."""
        if name in _ATTRIBUTES:
            return getattr(self._memory, name)
        if name in _METHODS:
            method = getattr(np.ndarray, name)
            return lambda *args, **kwargs: self._device.operate(
                method, (self, *args), kwargs, in_place=name in _IN_PLACE
            )
        raise AttributeError(f"arrays of the kernel runner have no attribute {name!r}")

    @property
    def T(self) -> Array:  # noqa: N802 - the array API's name
        """The array with its dimensions reversed."""
        return self._of(np.transpose)

    @property
    def mT(self) -> Array:  # noqa: N802 - the array API's name
        """The array with its last two dimensions swapped."""
        return self._of(np.swapaxes, -1, -2)

    @property
    def device(self) -> Owner:
        """The device that holds the array."""
        return self._device

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """See the array API standard."""
        return self._device.namespace()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Run a NumPy ufunc on the device, as CuPy does."""
        return self._device.operate(getattr(ufunc, method), inputs, kwargs, in_place="out" in kwargs)

    def __array_function__(self, function: Operation, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a NumPy function on the device, as CuPy does."""
        return self._device.operate(function, args, kwargs, in_place="out" in kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse the conversion."""
        raise TypeError("implicit conversion to a NumPy array is not allowed: use Device.to_host")

    def _refuse_to_wait(self) -> NoReturn:
        raise TypeError("the value of a device array is not on the host: use Device.to_host")

    __bool__ = __int__ = __float__ = __complex__ = __index__ = _refuse_to_wait

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return len(self._memory)

    def __getitem__(self, index: Any) -> Array:
        """Return a view or a copy by NumPy's rules; index arrays must be on the device."""
        return self._of(operator.getitem, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a device array or a scalar."""
        self._device.operate(operator.setitem, (self, index, value), {}, in_place=True)

    def _of(self, operation: Operation, *rest: Any) -> Any:
        return self._device.operate(operation, (self, *rest), {})


def _binary(operation: Operation) -> Any:
    return lambda self, other: self._device.operate(operation, (self, other), {})


def _reflected(operation: Operation) -> Any:
    return lambda self, other: self._device.operate(lambda b, a: operation(a, b), (self, other), {})


def _in_place(operation: Operation) -> Any:
    def change(self: RunnerArray, other: Any) -> RunnerArray:
        self._device.operate(operation, (self, other), {}, in_place=True)
        return self

    return change


def _unary(operation: Operation) -> Any:
    return lambda self: self._device.operate(operation, (self,), {})


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_COMPARISONS = "eq ne lt le gt ge"
for _name in _ARITHMETIC.split():
    _plain = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(RunnerArray, f"__{_name}__", _binary(_plain))
    setattr(RunnerArray, f"__r{_name}__", _reflected(_plain))
    setattr(RunnerArray, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))
for _name in _COMPARISONS.split():
    setattr(RunnerArray, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(RunnerArray, f"__{_name}__", _unary(getattr(operator, _name)))


def each_array(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to every leaf of its tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)(each_array(part, change) for part in value)
    if isinstance(value, dict):
        return {key: each_array(part, change) for key, part in value.items()}
    return change(value)
