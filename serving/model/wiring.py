"""Explain why a layer reads a tensor that no layer above it makes."""

from collections.abc import Iterable, Sequence

from serving.errors import did_you_mean
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
    return missing + did_you_mean(bottom, made)


def _path(bottom: str, goals: set[str], makers: dict[str, Fields]) -> list[str]:
    """Return a cycle of tensors from ``bottom`` back to one of ``goals``, or an empty list."""
    waiting = [bottom]
    reader_of = {bottom: ""}  # the tensor that each tensor was reached from
    while waiting:
        tensor = waiting.pop()
        if tensor in goals:
            way = [tensor]
            while way[-1] != bottom:
                way.append(reader_of[way[-1]])
            return [tensor, *reversed(way)]
        for name in _names(makers[tensor], "bottom") if tensor in makers else ():
            if name not in reader_of:
                reader_of[name] = tensor
                waiting.append(name)
    return []


def _names(layer: Fields, key: str) -> tuple[str, ...]:
    """Return the names in a value that may not have been checked yet."""
    value = layer.value(key, ())
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, str))
