"""Changes valid inputs into hostile inputs that are almost right."""

import copy
import json

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

#: Texts that JSON parsers read in different ways, or as numbers that fit nowhere.
RAW = (
    "NaN", "Infinity", "-Infinity", "-0", "1e999", "1E400", "0.1e-999", "1" * 5000, "-" + "9" * 400, "0x10", "01", "1.",
    '"\\ud800"', '"\\u0000"', '"\xff"', "[" * 200, "{" * 50, "[]" * 3, '{"a":1,"a":2}', "'x'", "tru", "\t", "//", "",
)  # fmt: skip
VALUES = (
    0, 1, -1, 2, -2, 7, 63, 64, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 3, 2**63 - 1,
    2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 0.5, -0.0, 1e-320, 1e38, 3.5e38, 1e308,
    True, False, None, "", "x", "DES", "INT64", "BYTES", "BOOL", "OUTPUT0", "../..", "a" * 300, "\u0000", "\u2028",
    "é" * 70, [], {}, [[]], [0], [None], [[1], [2, 3]], {"": 0}, {"a": {"b": [1]}}, [[[[[[[[0]]]]]]]], [0] * 100,
    [[]] * 100, [0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [2**31 - 1, 2**31 - 1], [2**62, 2, 0], [1] * 70, [-1, 2],
)  # fmt: skip
SHAPES = ([], [0], [-1], [1, 1], [0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [2**31 - 1, 2**31 - 1], [2**62, 2, 0], [1] * 70)
_MARK = "@raw@"
_PIECES = (b"", b"\0", b"\xff", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"9", b"\n", b"\r\n", b"\x80\x80\x80")


def change_bytes(data, rng):
    """Change, insert, remove or repeat a few bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.choice(_PIECES)
        elif kind == 2:
            del data[at : at + rng.choice((1, 2, 8, 64, 1024))]
        elif kind == 3:
            begin = rng.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + rng.choice((1, 4, 16, 256))]
        else:
            data[at : at + 4] = rng.randbytes(4)
    return bytes(data)


def change_json(text, rng):
    """Change a JSON document in its structure; a text that is no JSON is changed in its bytes."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return change_bytes(text, rng)
    raw = None
    for _ in range(rng.randint(1, 3)):
        places = list(_places(document))
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.randrange(9)
        if kind < 4:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 4:
            raw = rng.choice(RAW)
            holder[key] = _MARK
        elif kind == 5 and isinstance(holder, dict):
            del holder[key]
        elif kind == 6 and isinstance(holder, list):
            holder.extend(holder[: rng.randint(1, 3)])
        elif kind == 7:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else 0
        else:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    changed = json.dumps(document)
    if raw is not None:
        changed = changed.replace(f'"{_MARK}"', raw)
    return changed.encode("utf-8", "surrogatepass")


def _keys(holder):
    return holder if isinstance(holder, dict) else range(len(holder))


def _places(node):
    """Every place in a document: its list or object, and its key."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(pairs):
        yield node, key
        yield from _places(value)


def change_body(data, rng):
    """Change a binary infer body: a line with the length of its JSON part, the JSON part and the tensors' bytes."""
    length, _, body = data.partition(b"\n")
    if not length.isdigit() or rng.random() < 0.2:
        return change_bytes(data, rng)
    split = int(length)
    head, tail = body[:split], body[split:]
    kind = rng.randrange(4)
    if kind < 2:
        head = change_json(head, rng)
    elif kind == 2:
        tail = change_bytes(tail, rng)
    announced = len(head) if rng.random() < 0.9 else rng.choice((0, 1, len(body), len(body) + 1, 2**63, 10**30))
    return b"%d\n%s%s" % (announced, head, tail)


def change_message(data, rng):
    """Change a ``ModelInferRequest`` in its fields; bytes that are no message are changed as bytes."""
    message = service_pb2.ModelInferRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return change_bytes(data, rng)
    kind = rng.randrange(8)
    if kind == 0 or not message.inputs:
        return change_bytes(data, rng)
    tensor = rng.choice(list(message.inputs))
    number = rng.choice([value for value in VALUES if type(value) is int and -(2**63) <= value < 2**63])
    if kind == 1:
        tensor.shape[:] = rng.choice(SHAPES)
    elif kind == 2 and tensor.shape:
        tensor.shape[rng.randrange(len(tensor.shape))] = number
    elif kind == 3:
        tensor.name = rng.choice(("DES", "CATCOLUMN", "ROWINDEX", "", "x" * 300, "\0"))
        tensor.datatype = rng.choice(("FP32", "INT64", "INT32", "UINT32", "BYTES", "BF16", ""))
    elif kind == 4 and message.raw_input_contents:
        at = rng.randrange(len(message.raw_input_contents))
        message.raw_input_contents[at] = change_bytes(message.raw_input_contents[at], rng)
    elif kind == 5:
        message.raw_input_contents.append(b"\0" * rng.choice((0, 1, 8, 104)))
        tensor.contents.int64_contents.append(number)
    elif kind == 6:
        names = ("timeout", "priority", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "x")
        holder = rng.choice((message, tensor, message.outputs.add(name="OUTPUT0")))
        for name in rng.sample(names, 3):
            field = rng.choice(("int64_param", "string_param", "bool_param", "double_param"))
            value = {"int64_param": number, "string_param": "r", "bool_param": True, "double_param": 1e300}[field]
            setattr(holder.parameters[name], field, value)
    else:
        message.outputs.add(name=rng.choice(("OUTPUT0", "OUTPUT1", "")))
    return message.SerializeToString()
