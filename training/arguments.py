"""Check the arguments of training's calls. ``place`` names the call in error messages."""

from collections.abc import Iterable
from numbers import Real
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.model.strict_json import LARGEST_FLOAT32

_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.uint32))
_DENSE = "torch.strided"  # the layout of PyTorch's dense tensors


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is an int of at least ``least``. True and False do not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(place: str, name: str, value: Any, least: int | None = None) -> int:
    """Return an int. A tensor of one element counts as an int; True and False do not."""
    try:
        result = index(value)
    except TypeError:
        result = None
    if result is None or isinstance(value, bool):
        raise TypeError(f"{place}: expected {name} as an int, got {_brief(value)}")
    if least is not None and result < least:
        raise ValueError(f"{place}: expected {name} of at least {least}, got {result}")
    return result


def number(place: str, name: str, value: Any, least: float = -LARGEST_FLOAT32, most: float = LARGEST_FLOAT32) -> float:
    """Return a float. True and False are no numbers."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{place}: expected {name} as a number, got {_brief(value)}")
    result = float(value)
    if not least <= result <= most:
        raise ValueError(f"{place}: expected {name} from {least:g} to {most:g}, got {value}")
    return result


def pair(place: str, name: str, values: Any) -> tuple[float, float]:
    """Return two floats."""
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise ValueError(f"{place}: expected {name} as two numbers, got {values!r}")
    return number(place, name, values[0]), number(place, name, values[1])


def one_of(place: str, name: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse a value that is not one of ``choices``."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{place}: expected {name} as one of {', '.join(map(repr, choices))}, got {value!r}")


def items(place: str, name: str, value: Any) -> list[Any]:
    """Return the items of a list, or of anything else that has items."""
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{place}: expected {name} as a list, got {shown(value)}") from None


def path(place: str, name: str, value: Any) -> Path:
    """Return a path."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{place}: expected {name} as a path, got {shown(value)}")
    return Path(value)


def integers(place: str, name: str, value: Any) -> NDArray[np.int64]:
    """Return the numbers of a tensor or an array, of any shape."""
    array = as_array(value)
    if array is None or array.dtype not in _INTEGERS:
        raise TypeError(f"{place}: expected {name} as a tensor or an array of int64, got {shown(value)}")
    return np.ascontiguousarray(array, np.int64)


def as_array(value: Any) -> NDArray[Any] | None:
    """Return the numbers of an array, or of a dense tensor of PyTorch or TensorFlow. None: the value is another."""
    if hasattr(value, "detach"):
        value = value.detach().cpu() if str(value.layout) == _DENSE and not value.is_nested else None
    array = value if isinstance(value, np.ndarray) or not hasattr(value, "numpy") else value.numpy()
    return array if isinstance(array, np.ndarray) else None


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, str | Real | None) else shown(value)


def shown(value: Any) -> str:
    """Return a value's type and shape, for messages. Arrays and tensors of PyTorch and TensorFlow have a shape."""
    if isinstance(value, np.generic) or not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return type(value).__name__
    dtype = getattr(value.dtype, "name", str(value.dtype).removeprefix("torch."))
    if getattr(value, "is_nested", False) or getattr(value.shape, "rank", 0) is None:  # the shape is unknown
        return f"nested {dtype}"
    is_dense = str(getattr(value, "layout", _DENSE)) == _DENSE and not hasattr(value, "dense_shape")
    return f"{'' if is_dense else 'sparse '}{dtype}{list(value.shape)}"
