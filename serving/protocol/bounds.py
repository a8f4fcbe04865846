"""Limits of what one request may make the server build. JSON text is checked before it is parsed."""

import re
from dataclasses import dataclass

import numpy as np

from serving.errors import PayloadTooLargeError, RequestError

#: How much of a text is counted at a time. Other threads run in between.
_PIECE_BYTES = 1 << 18
#: The rest of an escape that has begun.
_REST_OF_ESCAPE = re.compile(rb"\\*[^\\]?", re.DOTALL)
_QUOTE, _COMMA, _SPACE = b'", '
_STEPS = np.zeros(256, dtype=np.int8)  # how much deeper each character leads
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_UNSTRUCTURED = bytes(set(range(256)) - set(b'[]{}"'))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may make the server build.

    Attributes:
        max_json_values: maximum values of a JSON document: numbers, strings, lists, objects and so on.
        max_json_depth: how deep its lists and objects may be nested.
        max_tensor_bytes: largest size of all tensors that a request has in shared memory.
        max_answer_bytes: largest answer to a predict request, before compression.
    """

    max_json_values: int = 1_000_000
    max_json_depth: int = 64
    max_tensor_bytes: int = 16 << 20
    max_answer_bytes: int = 64 << 20

    def check_answer(self, path: str, floats: int, size_bytes: int) -> None:
        """Refuse a request whose answer would be too large.

        Args:
            path: the part of the request that asks for so much.
            floats: how many numbers the answer has.
            size_bytes: about how many bytes they need.

        Raises:
            PayloadTooLargeError: the answer would be too large.
        """
        if size_bytes > self.max_answer_bytes:
            raise PayloadTooLargeError(
                f"{path}: the answer has {floats:,} numbers and needs about {size_bytes:,} bytes, "
                f"but the server sends at most {self.max_answer_bytes:,}"
            )


DEFAULT_BOUNDS = Bounds()


def check_json(text: bytes, bounds: Bounds, what: str = "the body") -> None:
    """Refuse a JSON text that has more values or more levels than ``bounds`` says; the text may be wrong JSON.

    ``what`` is the text's name in messages.

    Raises:
        PayloadTooLargeError: it has too many values.
        RequestError: it has too many levels.
    """
    # A value and what parts it from the next value are two characters.
    if len(text) >= 2 * bounds.max_json_values or not _is_shallow(text, bounds.max_json_depth):
        _count(text, bounds, what)


def _is_shallow(text: bytes, max_depth: int) -> bool:
    """Whether a text certainly has no more than ``max_depth`` levels. It costs little, and is true for most texts."""
    brackets = text.translate(_AS_LISTS, delete=_UNSTRUCTURED)
    if brackets.count(b"[") <= max_depth:
        return True
    brackets = brackets.replace(b'""', b"")
    if b'"' in brackets or b"\\" in text:  # some brackets may be within strings
        return False
    return bool(np.cumsum(_STEPS[np.frombuffer(brackets, dtype=np.uint8)], dtype=np.int32).max() <= max_depth)


def _count(text: bytes, bounds: Bounds, what: str) -> None:
    """Count the values and the levels of a text exactly, up to the bounds."""
    values, depth, is_inside, follows_opening = 1, 0, False, False
    begin = 0
    while begin < len(text):
        end = min(begin + _PIECE_BYTES, len(text))
        end += len(_REST_OF_ESCAPE.match(text, end).group())  # type: ignore[union-attr]  # it matches nothing, too
        piece = text[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        begin = end
        characters = np.frombuffer(piece, dtype=np.uint8)
        of_strings = np.logical_xor.accumulate(characters == _QUOTE) ^ is_inside
        is_inside = bool(of_strings[-1]) if piece else is_inside
        outside = characters[~of_strings & (characters > _SPACE)]
        if not outside.size:
            continue
        steps = _STEPS[outside]
        # A list or an object has a value behind each comma, and a value behind its opening unless it ends there.
        opened = np.concatenate([[follows_opening], steps[:-1] > 0])
        follows_opening = bool(steps[-1] > 0)
        values += int(np.count_nonzero(outside == _COMMA) + np.count_nonzero(opened & (steps >= 0)))
        levels = depth + np.cumsum(steps, dtype=np.int64)
        depth = int(levels[-1])
        if values > bounds.max_json_values:
            reason = f"more than the {bounds.max_json_values:,} values that the server accepts in one JSON document"
            raise PayloadTooLargeError(f"{what} has {reason}; large tensors can be sent as binary data")
        if levels.max() > bounds.max_json_depth:
            reason = f"lists and objects that are nested more than {bounds.max_json_depth} deep"
            raise RequestError(f"{what} has {reason}, which the server does not accept")
