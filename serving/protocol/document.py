"""Reads JSON documents field by field; the RequestError of a wrong field starts with its JSON path."""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import orjson

from serving.errors import RequestError
from serving.protocol.bounds import Bounds, check_json
from serving.protocol.tensors import json_kind

_T = TypeVar("_T")
_ABSENT = object()
_NOT_A_NUMBER = re.compile("[-+]?(NaN|nan|Inf|inf|None|undefined)")
_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a whole number of at most 64 bits",
}


def parse_document(text: bytes, bounds: Bounds | None, what: str = "the body") -> dict[str, Any]:
    """Return the JSON object in ``text``; anything else is a RequestError, and so are NaN, Infinity and repeated keys.

    Args:
        text: the document.
        bounds: of a client's document; None: the text is trusted.
        what: the text's name in messages.

    Raises:
        PayloadTooLargeError: the document has more values than ``bounds`` says.
    """
    if bounds is not None:
        check_json(text, bounds, what)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as err:
        advice = "; a missing value is null" * (_NOT_A_NUMBER.match(err.doc, err.pos) is not None)
        raise RequestError(f"{what} is not JSON: {_not_utf_8(text) or err}{advice}") from err
    if type(document) is not dict:
        raise RequestError(f"{what} must be a JSON object, but {json_kind(document)} came")
    # The parser takes the last of repeated keys, whose colons are then missing. Escapes may hide a colon.
    if bounds is not None and (b"\\" in text or text.count(b":") != _colons(document)):
        _refuse_repeated_keys(text.decode())
    return document


def _not_utf_8(text: bytes) -> str:
    """Return the first byte that is not UTF-8, for a message; an empty text if there is none."""
    try:
        text.decode()
    except UnicodeDecodeError as err:
        return f"not UTF-8: byte {err.start} is 0x{text[err.start]:02x}"
    return ""


def _colons(document: dict[str, Any]) -> int:
    """Return how many colons the text of an object has, or less: names and the items of most lists are not searched.

    If it has no escapes, the text of an object with repeated keys has more.
    """
    colons = len(document)
    for value in document.values():
        kind = type(value)
        if kind is dict:
            colons += _colons(value)
        elif kind is str:
            colons += value.count(":")
        elif kind is list and value and type(value[0]) is dict:
            colons += sum(_colons(item) for item in value if type(item) is dict)
    return colons


def _refuse_repeated_keys(text: str) -> None:
    """Read a valid document again, slowly, and raise a RequestError with the path of a key that an object repeats."""
    repeated: list[tuple[dict[str, Any], str]] = []

    def members_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            repeated.append((members, next(name for name in names if names.count(name) > 1)))
        return members

    document = json.loads(text, object_pairs_hook=members_of)
    if repeated:
        path, name = next(
            (path, name) for path, value in _values(document, "") for members, name in repeated if value is members
        )
        raise RequestError(f"{join(path, name[:64])}: came twice")


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a value and all values in it, except numbers and strings, with their paths."""
    yield path, value
    named = value.items() if type(value) is dict else enumerate(value)
    for key, item in named:
        if type(item) in (dict, list):
            yield from _values(item, join(path, key[:64]) if isinstance(key, str) else f"{path}[{key}]")


def required(document: dict[str, Any], name: str, kind: type[_T], path: str) -> _T:
    """Return field ``name`` of ``document`` at ``path``; an absent field or another kind is a RequestError."""
    value = document.get(name, _ABSENT)
    if type(value) is kind:
        return value
    raise _wrong(value, kind, join(path, name))


def optional(document: dict[str, Any], name: str, kind: type[_T], default: _T, path: str) -> _T:
    """See ``required``; an absent field is ``default``."""
    value = document.get(name, default)
    if type(value) is kind:
        return value
    raise _wrong(value, kind, join(path, name))


def checked(value: Any, kind: type[_T], path: str) -> _T:
    """Return ``value`` if it is exactly a ``kind`` (true is not a number); anything else is a RequestError."""
    if type(value) is kind:
        return value
    raise _wrong(value, kind, path)


def known_only(document: dict[str, Any], names: frozenset[str], path: str) -> None:
    """Refuse members that are not in ``names``: such a member may be misspelt."""
    if not document.keys() <= names:
        unknown = next(name for name in document if name not in names)
        raise RequestError(f"{join(path, unknown[:64])}: unknown; expected {', '.join(sorted(names))}")


def _wrong(value: Any, kind: type, path: str) -> RequestError:
    if value is _ABSENT:
        return RequestError(f"{path}: missing")
    return RequestError(f"{path}: expected {_KINDS[kind]}, but {json_kind(value)} came")


def join(path: str, name: str) -> str:
    """The JSON path of a field."""
    return f"{path}.{name}" if path else name
