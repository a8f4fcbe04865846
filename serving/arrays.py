"""Turns a caller's tensor (a list, a NumPy array or an array-like) into a NumPy array, or raises RequestError.

``np.asarray`` alone accepts too much: it parses strings, and turns booleans into numbers and big integers into floats.
So lists are checked by the types of their elements, and arrays by their dtype.
"""

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import RequestError

# Subclasses of the accepted types that are not meant as numbers.
_REFUSED: tuple[type, ...] = (bool, np.timedelta64)
_INTEGERS: tuple[type, ...] = (int, np.integer)
_NUMBERS: tuple[type, ...] = (int, float, np.integer, np.floating)


def flat_integers(value: Any, tensor: str) -> NDArray[np.int64]:
    """Return int64[n], contiguous, for a list or array of integers of shape [n] or [1, n].

    Args:
        value: what the caller gave.
        tensor: the tensor's name, for messages.

    Raises:
        RequestError: ``value`` is something else, or a number does not fit int64.
    """
    return np.ascontiguousarray(_flat(value, tensor), dtype=np.int64)


def integers(value: Any, tensor: str) -> NDArray[np.int64]:
    """Return int64[n] or int64[m, n], contiguous, for a list or array of integers of that shape.

    Raises:
        RequestError: ``value`` is something else, or a number does not fit int64.
    """
    array = _integers(value, tensor)
    if array.ndim not in (1, 2):
        raise RequestError(f"{tensor}: expected the shape [n] or [m, n], got {list(array.shape)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def flat_offsets(value: Any, tensor: str) -> NDArray[np.int32] | NDArray[np.int64]:
    """Return the same as ``flat_integers``, except that an int32 array stays int32."""
    flat = _flat(value, tensor)
    if flat.dtype == np.int32:
        return np.ascontiguousarray(flat, dtype=np.int32)
    return np.ascontiguousarray(flat, dtype=np.int64)


def floats(value: Any, tensor: str) -> NDArray[np.float32]:
    """Return float32[n] or float32[m, n], contiguous, for a list or array of numbers of that shape.

    A number too large for float32 becomes an infinity, which the caller's check for finite numbers finds.

    Raises:
        RequestError: ``value`` is something else.
    """
    if isinstance(value, list | tuple):
        array = _floats_of_list(value, tensor)
    else:
        array = _as_array(value, tensor)
        if array.dtype.kind not in "fiu":
            raise RequestError(f"{tensor}: expected floats, got an array of {array.dtype}")
    if array.dtype != np.float32:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _flat(value: Any, tensor: str) -> NDArray[Any]:
    """Return an array [n] of integers that fit int64."""
    array = _integers(value, tensor)
    if array.ndim != 1 and not (array.ndim == 2 and array.shape[0] == 1):
        raise RequestError(f"{tensor}: expected the shape [n] or [1, n], got {list(array.shape)}")
    return array.reshape(-1)


def _integers(value: Any, tensor: str) -> NDArray[Any]:
    """Return an array of integers that fit int64."""
    if isinstance(value, list | tuple):
        return _integers_of_list(value, tensor)
    array = _as_array(value, tensor)
    if array.dtype.kind not in "iu":
        raise RequestError(f"{tensor}: expected integers, got an array of {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > np.uint64(2**63 - 1):
        at = int(np.argmax(array > np.uint64(2**63 - 1)))
        raise RequestError(f"{tensor}: {array.reshape(-1)[at]} at position {at} does not fit int64")
    return array


def _as_array(value: Any, tensor: str) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if value is None or not hasattr(value, "__array__"):
        raise RequestError(f"{tensor}: expected a list or an array, got {_type_name(value)}")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise RequestError(f"{tensor}: {_type_name(value)} cannot be read as an array: {err}") from err


def _integers_of_list(value: list[Any] | tuple[Any, ...], tensor: str) -> NDArray[Any]:
    flat, shape = _flatten(value, tensor)
    _check_types(flat, _INTEGERS, "integers", tensor)
    try:
        return np.array(flat, dtype=np.int64).reshape(shape)
    except OverflowError as err:
        at = next(index for index, number in enumerate(flat) if not -(2**63) <= number < 2**63)
        raise RequestError(f"{tensor}: {flat[at]} at position {at} does not fit int64") from err


def _floats_of_list(value: list[Any] | tuple[Any, ...], tensor: str) -> NDArray[Any]:
    flat, shape = _flatten(value, tensor)
    _check_types(flat, _NUMBERS, "numbers", tensor)
    try:
        return np.array(flat, dtype=np.float64).reshape(shape)
    except OverflowError as err:
        # An integer overflows where it rounds to 2**1024, which is half a unit in the last place below it.
        at = next(
            index for index, number in enumerate(flat) if isinstance(number, int) and abs(number) >= 2**1024 - 2**970
        )
        raise RequestError(f"{tensor}: the number at position {at} does not fit float32") from err


def _flatten(value: list[Any] | tuple[Any, ...], tensor: str) -> tuple[list[Any], tuple[int, ...]]:
    if not value or not set(map(type, value)) <= {list, tuple}:
        return list(value), (len(value),)
    columns = len(value[0])
    for row, part in enumerate(value):
        if len(part) != columns:
            raise RequestError(f"{tensor}: ragged: row 0 has {columns} values, row {row} has {len(part)}")
    return list(chain.from_iterable(value)), (len(value), columns)


def _check_types(flat: list[Any], accepted: tuple[type, ...], expected: str, tensor: str) -> None:
    wrong = {kind for kind in set(map(type, flat)) if issubclass(kind, _REFUSED) or not issubclass(kind, accepted)}
    if wrong:
        at = next(index for index, element in enumerate(flat) if type(element) in wrong)
        raise RequestError(f"{tensor}: expected {expected}, got {_type_name(flat[at])} at position {at}")


def _type_name(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
