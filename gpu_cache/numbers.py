"""Checks of numbers that a cache is made or asked with."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return the number as an int.

    Raises:
        TypeError: it is no whole number by type: a float, a truth value, a string.
        ValueError: it is out of its range.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {number}")
    return number
