"""The JSON checker: it reads documents strictly and checks objects member by member. Every error says where.

A document that RFC 8259 forbids or leaves ambiguous is an error.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from serving.errors import ConfigError, did_you_mean, nearest
from serving.model.regular_file import read_regular

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_BYTES = 64 << 20
_LONGEST_NAME = 4096  # as a path's
_MOST_NAMES = 30  # of known keys in one message
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LARGEST_FLOAT32: Final = (2 - 2**-23) * 2.0**127


def read_json(path: str | Path) -> Any:
    """Read one JSON file; see ``parse_json``.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is not strict JSON; the message names the file.
    """
    source = str(path)
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError as err:
        raise ConfigError(source, "", "no such file") from err
    except OSError as err:
        raise ConfigError(source, "", f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(source, "", f"not UTF-8: byte {err.start} is 0x{err.object[err.start]:02x}") from err
    return parse_json(text, source)


def parse_json(text: str, source: str) -> Any:
    """Parse ``text``; ``source`` names it in messages.

    A repeated key in one object, ``NaN``, ``Infinity``, numbers too large for a float and half of a surrogate pair are
    errors too.

    Raises:
        ConfigError: with the line and column of a syntax error.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ConfigError(source, "", f"the key {describe(twice)} appears twice in one object")
        return members

    def finite(token: str) -> float:
        number = float(token)
        if not math.isfinite(number):
            raise ConfigError(source, "", f"{shorten(token)} is not a finite number")
        return number

    try:
        document = json.loads(text, object_pairs_hook=unique_keys, parse_constant=finite, parse_float=finite)
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except UnicodeEncodeError as err:
        half = ascii(err.object[err.start])[1:-1]
        raise ConfigError(source, "", f"{half} is half of a surrogate pair, which stands for no character") from err
    except json.JSONDecodeError as err:
        raise ConfigError(source, f"line {err.lineno} column {err.colno}", _syntax_reason(err)) from err
    except RecursionError as err:
        raise ConfigError(source, "", "nested too deeply") from err
    except ValueError as err:
        raise ConfigError(source, "", "a whole number has more digits than any number here may have") from err


def _syntax_reason(err: json.JSONDecodeError) -> str:
    """Return a message about the place where the parser stopped, in words that help the file's author."""
    rest = err.doc[err.pos :].lstrip()
    before = err.doc[: err.pos].rstrip()
    if not err.doc.strip():
        return "the file is empty"
    if err.doc.startswith("\ufeff"):
        return "the file begins with a byte order mark; save it as UTF-8 without the mark"
    if rest.startswith(("//", "/*", "#")):
        return "comments are not JSON"
    if rest.startswith("'"):
        return "strings need double quotes"
    if (before.endswith(",") and rest.startswith(("}", "]"))) or rest.startswith((",}", ",]")):
        return "a comma before the closing bracket"
    if not rest or err.msg.startswith("Unterminated string"):
        return f"the text ends too early ({err.msg})"
    return err.msg


@lru_cache
def log_newer(what: str, names: frozenset[str]) -> None:
    """Log once that ``what`` has members ``names`` of a later release, which may add optional members to its files.

    A member that changes what the others mean comes with a new number of the format.
    """
    if names:
        shown = ", ".join(map(shorten, sorted(names)[:_MOST_NAMES]))
        logger.warning("%s: ignored %s, which a later release of Hotrow may use", what, shown)


class _Required:
    """The type of ``REQUIRED``: a member without a default."""


REQUIRED: Final = _Required()


class Fields:
    """The members of one JSON object.

    Attributes:
        source: the file, for messages.
        path: where the object is in the document, ``"layers[4].fc_param"``.
        shown: the path as messages show it, with the layer's name: ``layers[4] "fc1".fc_param``.
    """

    def __init__(self, value: Any, source: str, path: str, known: Iterable[str] | None = None) -> None:
        """Check that ``value`` is an object with no members except ``known`` (None: check them later).

        Raises:
            ConfigError: it is not an object, or has an unknown member.
        """
        self.source = source
        self.path = self.shown = path
        if not isinstance(value, dict):
            raise self.error(f"expected an object, got {describe(value)}")
        self._members: dict[str, Any] = value
        if known is not None:
            self.allow(known)

    def allow(self, known: Iterable[str]) -> None:
        """Refuse every member that is not in ``known``."""
        names = set(known)
        for key in self._members:
            if key not in names:
                some = [*map(shorten, sorted(names)[:_MOST_NAMES]), *["..."] * (len(names) > _MOST_NAMES)]
                expected = f"one of {', '.join(some)}" if names else "no members"
                hint = did_you_mean(key, sorted(names)) or f"; expected {expected}"
                raise self.error(f"unknown key{hint}", shorten(key))

    def others(self, known: Iterable[str]) -> set[str]:
        """Return the members that are not in ``known``."""
        return self._members.keys() - set(known)

    def __contains__(self, key: str) -> bool:
        """Return whether the object has this member."""
        return key in self._members

    def __iter__(self) -> Iterator[str]:
        """Iterate over the members' names, in document order."""
        return iter(self._members)

    def error(self, reason: str, key: str = "") -> ConfigError:
        """Return an error about this object, or about its member ``key``."""
        return ConfigError(self.source, ".".join(part for part in (self.shown, key) if part), reason)

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the member as it is.

        Raises:
            ConfigError: it is missing and has no default. All other readers raise this too.
        """
        if key in self._members:
            return self._members[key]
        if default is REQUIRED:
            close = nearest(key, self._members)
            raise self.error(f"missing; the object has {describe(close[0])}" if close else "missing", key)
        return default

    def integer(
        self, key: str, default: int | _Required = REQUIRED, *, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        """Return an integer from ``minimum`` to ``maximum``; 1.0 and true are not integers."""
        return self.check_integer(self.value(key, default), key, minimum, maximum)

    def check_integer(self, value: Any, key: str, minimum: int, maximum: int = 2**31 - 1) -> int:
        """Return ``value`` if it is an integer from ``minimum`` to ``maximum``; ``key`` is its place, for messages."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"expected an integer, got {describe(value)}", key)
        if not minimum <= value <= maximum:
            raise self.error(f"expected an integer from {minimum} to {maximum}, got {describe(value)}", key)
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return a number that float32 can hold, as a float."""
        return self.check_number(self.value(key, default), key)

    def check_number(self, value: Any, key: str) -> float:
        """Return ``value`` as a float if it is a number that float32 can hold; ``key`` is its place, for messages."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"expected a number, got {describe(value)}", key)
        if abs(value) > LARGEST_FLOAT32:
            raise self.error(f"expected a number within float32, got {describe(value)}", key)
        return float(value)

    def count(self, key: str) -> int:
        """Return an integer from 1. 10.0 counts as 10, because HugeCTR keeps some counts as floats."""
        value = self.value(key)
        return self.check_integer(int(value) if isinstance(value, float) and value.is_integer() else value, key, 1)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        """Return true or false."""
        return self.choice(key, {True: True, False: False}, default)

    def items(self, key: str) -> list[Any]:
        """Return a list that is not empty."""
        value = self.value(key)
        if not isinstance(value, list) or not value:
            raise self.error(f"expected a list, got {describe(value)}", key)
        return value

    def integers(self, key: str, *, minimum: int = 1, maximum: int = 2**31 - 1) -> tuple[int, ...]:
        """Return a list of integers, not empty."""
        return tuple(
            self.check_integer(item, f"{key}[{index}]", minimum, maximum) for index, item in enumerate(self.items(key))
        )

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` numbers that float32 can hold."""
        found = tuple(self.check_number(item, f"{key}[{index}]") for index, item in enumerate(self.items(key)))
        if len(found) != count:
            raise self.error(f"expected {count} numbers, got {len(found)}", key)
        return found

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        """Return a string that is not empty."""
        return self._check_text(self.value(key, default), key)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return one string or a list of strings, as HugeCTR writes ``bottom`` and ``top``."""
        value = self.value(key)
        if not isinstance(value, list):
            return (self._check_text(value, key),)
        if not value:
            raise self.error("expected at least one name, got an empty list", key)
        return tuple(self._check_text(item, f"{key}[{index}]") for index, item in enumerate(value))

    def _check_text(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.error(f"expected a name, got {describe(value)}", key)
        if len(value) > _LONGEST_NAME:
            raise self.error(f"expected a name of at most {_LONGEST_NAME:,} characters, got {len(value):,}", key)
        return value

    def choice(self, key: str, choices: Mapping[Any, T], default: Any = REQUIRED) -> T:
        """Return what ``choices`` maps the member's value to."""
        return self.check_choice(self.value(key, default), key, choices)

    def check_choice(self, value: Any, key: str, choices: Mapping[Any, T]) -> T:
        """Return what ``choices`` maps ``value`` to; ``key`` is its place, for messages."""
        for name, meaning in choices.items():
            if type(value) is type(name) and value == name:
                return meaning
        close = nearest(value, map(str, choices))
        hint = f"; did you mean {json.dumps(close[0])}?" if close else ""
        expected = ", ".join(json.dumps(name) for name in choices)
        raise self.error(f"expected one of {expected}, got {describe(value)}{hint}", key)

    def object(self, key: str, known: Iterable[str] | None = None) -> "Fields":
        """Return the member, an object with no members except ``known``."""
        return Fields(self.value(key), self.source, self._path_of(key), known)

    def objects(self, key: str) -> Iterator["Fields"]:
        """Yield the objects of a list that is not empty."""
        value = self.value(key)
        if not isinstance(value, list) or not value:
            raise self.error(f"expected a list of objects, got {describe(value)}", key)
        for index, item in enumerate(value):
            yield Fields(item, self.source, f"{self._path_of(key)}[{index}]")

    def _path_of(self, key: str) -> str:
        return f"{self.shown}.{key}" if self.shown else key


def describe(value: Any) -> str:
    """Return a short form of a JSON value for a message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return shorten(json.dumps(value))


def shorten(text: str) -> str:
    """Return the beginning of a text of any length, for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
