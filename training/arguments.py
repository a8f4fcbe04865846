"""Check the arguments of training's calls. ``place`` names the call in error messages."""

from collections.abc import Iterable
from numbers import Real
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serving.model.strict_json import LARGEST_FLOAT32

_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.uint32))


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
    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    array = value.detach().cpu().numpy() if is_plain else value
    if not isinstance(array, np.ndarray) or array.dtype not in _INTEGERS:
        raise TypeError(f"{place}: expected {name} as a tensor or an array of int64, got {shown(value)}")
    return np.ascontiguousarray(array, np.int64)


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, str | Real | None) else shown(value)


def shown(value: Any) -> str:
    """Return a value's type and shape, for messages."""
    if isinstance(value, torch.Tensor) and value.is_nested:  # its shape has names, or is unknown
        return f"nested {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, torch.Tensor | np.ndarray):
        sparse = "" if isinstance(value, np.ndarray) or value.layout == torch.strided else "sparse "
        return f"{sparse}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
