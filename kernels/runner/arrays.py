"""Arrays of the runner: NumPy underneath, with CuPy's manners.

What CuPy refuses is refused: to mix with host arrays, to become one by itself, to be of two devices at once. Stricter
than CuPy, ``bool``, ``int`` and ``float`` of an array are refused too: each would make the host wait unseen.
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
        """Do ``operation`` on the current stream, with arrays of this device in ``args`` and ``kwargs``."""

    def namespace(self) -> Any:
        """Return the namespace of the arrays."""

    def from_host(self, value: Any) -> Any:
        """Return a host array as a new one of the device, and anything else as it is."""


class RunnerArray:
    """An array in a runner's memory. See ``kernels.device.Array``."""

    __array_priority__ = 100.0

    def __init__(self, memory: npt.NDArray[Any], device: Owner) -> None:
        """Wrap ``memory``, which is read and written only through the device."""
        self._memory = memory
        self._device = device

    def __repr__(self) -> str:
        """Tell what it is, not what it holds: that would wait."""
        return f"<{self.dtype}{list(self.shape)} on {self._device.name}>"

    def __getattr__(self, name: str) -> Any:
        """Offer the attributes and methods that CuPy's arrays have too and that stay on the device."""
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
        """Where it lies."""
        return self._device

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """See the array API standard."""
        return self._device.namespace()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Do a NumPy function that was called by its NumPy name, as CuPy does."""
        return self._device.operate(getattr(ufunc, method), inputs, kwargs, in_place="out" in kwargs)

    def __array_function__(self, function: Operation, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do a NumPy function that was called by its NumPy name, as CuPy does."""
        return self._device.operate(function, args, kwargs, in_place="out" in kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise TypeError("implicit conversion to a NumPy array is not allowed: use Device.to_host")

    def _refuse_to_wait(self) -> NoReturn:
        raise TypeError("the value of a device array is not on the host: use Device.to_host")

    __bool__ = __int__ = __float__ = __complex__ = __index__ = _refuse_to_wait

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Rows of the first dimension."""
        return len(self._memory)

    def __getitem__(self, index: Any) -> Array:
        """A view or a copy, as NumPy's rules say; index arrays are of the device."""
        return self._of(operator.getitem, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write an array of the device, or a scalar."""
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
