"""Numbers on the command line: argparse's types for options, which say what they expected."""

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number within these bounds."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if smallest <= number <= largest:
            return number
        raise ArgumentTypeError(f"expected a whole number from {smallest} to {largest}, but {text[:32]!r} came")

    return parse


def probability(text: str) -> float:
    """The type of an option that takes a probability of more than 0 and at most 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number <= 1:  # which NaN is not
        return number
    raise ArgumentTypeError(f"expected more than 0 and at most 1, but {text[:32]!r} came")


def seconds(longest_s: int) -> Callable[[str], float]:
    """The type of an option that takes a time of more than 0 and at most ``longest_s`` seconds."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if 0 < number <= longest_s:  # which NaN is not
            return number
        raise ArgumentTypeError(f"expected more than 0 and at most {longest_s} seconds, but {text[:32]!r} came")

    return parse
