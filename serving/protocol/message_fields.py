"""Counts the fields of a ``ModelInferRequest`` before it is parsed.

An empty tensor takes two bytes of a message. Parsed, it takes hundreds of bytes and a microsecond on the event loop.
So does each string in a tensor's contents. Packed numbers are one field.
"""

from collections.abc import Mapping

from serving.errors import PayloadTooLargeError

_MOST_FIELDS = 10_000
#: A message of this size or less is parsed fast, whatever it has.
_SHORT_BYTES = 16 << 10
Parts = Mapping[int, "Parts"]
"""The fields of a message whose own fields count, by number, with the parts of each."""
_PARTS: Parts = {5: {5: {}}, 6: {}}  # inputs with their contents, and outputs
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


def check_fields(data: bytes) -> None:
    """Refuse a message that has too many fields, including those of its tensors and of their contents.

    ``data`` may be any bytes.

    Raises:
        PayloadTooLargeError: it has too many fields.
    """
    if len(data) <= _SHORT_BYTES:
        return
    fields = at = 0
    levels = [(len(data), _PARTS)]  # where the message and the parts around ``at`` end, and their parts
    while at < len(data):
        while at >= levels[-1][0]:
            levels.pop()
        fields += 1
        if fields > _MOST_FIELDS:
            reason = f"more than the {_MOST_FIELDS:,} fields that the server accepts in one message"
            raise PayloadTooLargeError(f"the request has {reason}; large tensors belong in raw_input_contents")
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _BYTES:
            size_bytes, at = _varint(data, at)
            parts = levels[-1][1].get(tag >> 3)
            if parts is None:
                at += size_bytes
            else:
                levels.append((at + size_bytes, parts))
        elif kind == _VARINT:
            _, at = _varint(data, at)
        else:
            at += {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind, 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at ``at``, and where it ends. The end of the data also ends the number."""
    number = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return number, at + 1
