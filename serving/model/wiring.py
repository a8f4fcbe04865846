"""Explain why a layer reads a tensor that no layer above it makes."""

import difflib
from collections.abc import Iterable, Sequence

from serving.model.strict_json import Fields


def explain_missing(bottom: str, reader: Fields, layers: Sequence[Fields], made: Iterable[str]) -> str:
    """Return the message for ``bottom``, which ``reader`` reads but which is not in ``made``."""
    missing = f"no layer above makes {bottom!r}"
    makers = {top: layer for layer in layers for top in _names(layer, "top")}
    if bottom in makers:
        path = _path(bottom, set(_names(reader, "top")), makers)
        if path:
            return f"{missing}; there is a cycle: {' <- '.join(path)}"
        return f"{missing}; {makers[bottom].shown} below makes it, but layers must be in the order in which they run"
    swapped = sorted(set(_names(reader, "top")) & set(made))
    if swapped:
        return f"{missing}, but its top {swapped[0]!r} is made above: are bottom and top swapped?"
    close = difflib.get_close_matches(bottom, made, n=1)
    return f"{missing}; did you mean {close[0]!r}?" if close else missing


def _path(bottom: str, goals: set[str], makers: dict[str, Fields]) -> list[str]:
    """Return a cycle of tensors from ``bottom`` back to one of ``goals``, or an empty list."""
    ways = [[bottom]]
    seen = {bottom}
    while ways:
        way = ways.pop()
        if way[-1] in goals:
            return [way[-1], *way]
        for name in _names(makers[way[-1]], "bottom") if way[-1] in makers else ():
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return []


def _names(layer: Fields, key: str) -> tuple[str, ...]:
    """Return the names in a value that may not have been checked yet."""
    value = layer.value(key, ())
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, str))
