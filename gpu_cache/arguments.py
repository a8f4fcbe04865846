"""Checks of arguments: dtype and shape of every array, and the values of host arrays."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpu_cache.readers import Readers
from kernels.device import Array, Device, Stream, open_device
from kernels.errors import ReservedKeyError

if TYPE_CHECKING:
    from gpu_cache.layout import Layout

_MOST_KEYS = 2**31 - 1
_INT64 = np.iinfo(np.int64)


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int, or raise TypeError for another type and ValueError if it is out of range."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {number}")
    return number


def device_of(device: Any) -> Device:
    """Return ``device``, opened if it is a name."""
    if isinstance(device, str):
        return open_device(device)
    if not hasattr(device, "stream"):
        raise TypeError(f"device: expected a device, or its name such as 'cuda:0', got {device!r}")
    opened: Device = device
    return opened


def readers_of(readers: Any) -> Readers:
    """Return ``readers``, or new ones for None."""
    if readers is None:
        return Readers()
    if not isinstance(readers, Readers):
        raise TypeError(f"readers: expected Readers or None, got {readers!r}")
    return readers


def keys_on_device(
    device: Device, layout: Layout, keys: Any, stream: Stream, *, must_be_distinct: bool = False
) -> Array:
    """Return int64[N] on the device: the array itself, or a copy of a host array, whose values are checked."""
    _require(keys, "keys", np.int64, (None,))
    if keys.size > _MOST_KEYS:
        raise ValueError(f"keys: expected at most {_MOST_KEYS} in a call, got {keys.size}")
    if not isinstance(keys, np.ndarray):
        return keys
    _require_values(keys, layout)
    if must_be_distinct:
        _require_distinct(keys)
    return _copy(device, keys, stream)


def rows_on_device(device: Device, rows: Any, count: int, dim: int, stream: Stream) -> Array:
    """Return float32[N, D] on the device: the array itself, or a copy of a host array."""
    _require(rows, "rows", np.float32, (count, dim))
    return _copy(device, rows, stream) if isinstance(rows, np.ndarray) else rows


def misses_on_device(device: Device, misses: Any, count: int, stream: Stream) -> Array:
    """Return uint32[N] on the device: the array itself, or a copy of a host array."""
    _require(misses, "misses", np.uint32, (count,))
    return _copy(device, misses, stream) if isinstance(misses, np.ndarray) else misses


def _require(array: Any, name: str, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> None:
    wanted = f"{np.dtype(dtype)}[{', '.join('N' if size is None else str(size) for size in shape)}]"
    if not hasattr(array, "dtype") or not hasattr(array, "flags"):
        raise TypeError(f"{name}: expected an array {wanted}, got {type(array).__name__}")
    fits = len(array.shape) == len(shape) and all(
        size is None or size == given for size, given in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        raise ValueError(f"{name}: expected {wanted}, got {array.dtype}{list(array.shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous array")


def _require_values(keys: npt.NDArray[np.int64], layout: Layout) -> None:
    beyond = ~layout.can_hold(keys)
    if not beyond.any():
        return
    position = int(beyond.argmax())
    key = int(keys[position])
    if not _INT64.min + 1 < key < _INT64.max - 1:
        raise ReservedKeyError(key, position)
    raise ValueError(f"keys: expected 0 to {2**32 - 3} for U32 lines, got {key} at position {position}")


def _require_distinct(keys: npt.NDArray[np.int64]) -> None:
    ordered = np.sort(keys)
    again = ordered[1:] == ordered[:-1]
    if again.any():
        key = int(ordered[again.argmax()])
        first, second = np.flatnonzero(keys == key)[:2]
        raise ValueError(f"keys: expected each key once, got {key} at positions {first} and {second}")


def _copy(device: Device, host: npt.NDArray[Any], stream: Stream) -> Array:
    array = device.empty(host.shape, host.dtype)
    if host.size:
        device.upload(host, array, stream)
    return array
