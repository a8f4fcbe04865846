"""Argparse types for numbers and names. An error says what was expected."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import wraps
from typing import Self, TypeVar

_T = TypeVar("_T")


class VariableText(str):
    """The value of a variable of the environment that sets an option; ``variable`` is its name."""

    variable: str

    @classmethod
    def of(cls, variable: str, value: str) -> Self:
        """Return the value with the variable's name."""
        text = cls(value)
        text.variable = variable
        return text


def names_variable(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return an option's type whose errors name the variable if the text is a variable's value."""

    @wraps(parse)
    def parse_named(text: str) -> _T:
        try:
            return parse(text)
        except ArgumentTypeError as err:
            if not isinstance(text, VariableText):
                raise
            raise ArgumentTypeError(f"{err} in the variable {text.variable}") from err

    return parse_named


def one_of(*names: str) -> Callable[[str], str]:
    """Return the type of an option that takes one of these names; unlike ``choices`` it also checks defaults."""

    def parse(text: str) -> str:
        if text in names:
            return text
        raise ArgumentTypeError(f"expected {', '.join(names[:-1])} or {names[-1]}, got {text[:32]!r}")

    return parse


def is_on(text: str) -> bool:
    """Read a variable of the environment that sets an option without a value: 1 or 0."""
    if text in {"0", "1"}:
        return text == "1"
    raise ArgumentTypeError(f"expected 1 or 0, got {text[:32]!r}")


def whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number within these bounds."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if smallest <= number <= largest:
            return number
        raise ArgumentTypeError(f"expected a whole number from {smallest} to {largest}, got {text[:32]!r}")

    return parse


def number(largest: float, unit: str = "", *, above_zero: bool = False) -> Callable[[str], float]:
    """Return the type of an option that takes a number from 0, or above 0, up to ``largest``."""
    expected = f"more than 0 and at most {largest:,}" if above_zero else f"a number from 0 to {largest:,}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if 0 <= value <= largest and not (above_zero and value == 0):  # False for NaN
            return value
        raise ArgumentTypeError(f"expected {expected}{unit and f' {unit}'}, got {text[:32]!r}")

    return parse


#: Reads an option that takes a number above 0 and at most 1.
ratio = number(1, above_zero=True)

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_size(text: str) -> int:
    """Read an option that takes an amount of memory: ``8GiB``, ``1.5 TiB``, or plain bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]iB|)", text, flags=re.ASCII)
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size_bytes < 1:
        raise ArgumentTypeError(f"expected bytes, or a number of KiB, MiB, GiB or TiB, got {text[:32]!r}")
    return size_bytes


def column_names(text: str) -> list[str]:
    """Read an option that takes names of columns, separated by commas."""
    names = [name for name in text.split(",") if name]
    if not names:
        raise ArgumentTypeError(f"expected names of columns, got {text[:32]!r}")
    return names


def cache_sizes(text: str) -> tuple[int | float, ...]:
    """Read an option that takes cache sizes: whole numbers are rows, ``5%`` is 0.05 of a table."""
    return tuple(_cache_size(part.strip()) for part in text.split(","))


def _cache_size(text: str) -> int | float:
    if re.fullmatch(r"\d{1,10}", text, flags=re.ASCII) and int(text):
        return int(text)
    if re.fullmatch(r"\d{1,3}(\.\d{1,6})?%", text, flags=re.ASCII) and 0 < float(text[:-1]) <= 100:
        return float(text[:-1]) / 100
    raise ArgumentTypeError(f"expected rows, or a percentage of a table such as 5%, got {text[:32]!r}")
