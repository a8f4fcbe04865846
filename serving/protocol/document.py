"""Reads JSON documents field by field; the RequestError of a wrong field starts with its JSON path."""

from typing import Any, TypeVar

import orjson

from serving.errors import RequestError
from serving.protocol.bounds import Bounds, check_json
from serving.protocol.tensors import json_kind

_T = TypeVar("_T")
_ABSENT = object()
_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a whole number",
}


def parse_document(text: bytes, bounds: Bounds | None) -> dict[str, Any]:
    """Return the JSON object in ``text``; anything else, with NaN and Infinity, is a RequestError.

    Args:
        text: the document.
        bounds: of a client's document; None: the text is trusted.

    Raises:
        PayloadTooLargeError: the document has more values than ``bounds`` says.
    """
    if bounds is not None:
        check_json(text, bounds)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as err:
        raise RequestError(f"the body is not JSON: {err}") from err
    if type(document) is not dict:
        raise RequestError(f"the body must be a JSON object, but {json_kind(document)} came")
    return document


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
