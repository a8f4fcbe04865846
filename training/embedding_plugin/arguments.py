"""Check the plugin's arguments. ``place`` names the call in error messages."""

from collections.abc import Iterable
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.embedding.inputs import shown

_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.uint32))


def whole(place: str, name: str, value: Any, least: int) -> int:
    """Return an int. A tensor of one element counts as a number."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{place}: expected {name} as an int, got {shown(value)}") from None
    if number < least:
        raise ValueError(f"{place}: expected {name} of at least {least}, got {number}")
    return number


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
