"""Requests are refused for their size before anything is built. The oracles count what json and protobuf read."""

import json

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferRequest

from serving.errors import PayloadTooLargeError, RequestError
from serving.frontend.limits import Limits
from serving.protocol.bounds import Bounds, check_json
from serving.protocol.infer import InferDecoder
from serving.protocol.messages import read_message
from serving.protocol.tensors import Signature, TensorSpec

TEXTS = st.text('ab\\"[]{}, \n/é', max_size=6)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def size_of(document):
    """How many values a document has, and how many levels of lists and objects."""
    if not isinstance(document, list | dict):
        return 1, 0
    inner = [size_of(one) for one in (document.values() if isinstance(document, dict) else document)]
    return 1 + sum(values for values, _ in inner), 1 + max((depth for _, depth in inner), default=0)


def is_accepted(text, values, depth):
    try:
        check_json(text, Bounds(max_json_values=values, max_json_depth=depth))
    except RequestError:
        return False
    return True


@settings(deadline=None)
@given(document=DOCUMENTS, indent=st.none() | st.just(1), is_ascii=st.booleans(), until_piece=st.integers(0, 40))
@example(document=[[], None, []], indent=1, is_ascii=True, until_piece=2)
def test_exactly_the_documents_beyond_a_bound_are_refused(document, indent, is_ascii, until_piece):
    text = json.dumps(document, indent=indent, ensure_ascii=is_ascii).encode()
    values, depth = size_of(document)

    for spaces in (0, 2**18 - until_piece):  # a large text is counted in pieces
        padded = b" " * spaces + text
        assert is_accepted(padded, values, max(depth, 1))
        if values > 1:
            assert not is_accepted(padded, values - 1, max(depth, 1))
        if depth > 1:
            assert not is_accepted(padded, values, depth - 1)


@pytest.mark.parametrize("text", [b"", b"]" * 500, b'["' + b"[" * 500, b'"' + b"\\" * 500, b"\xff" * 500, b"\\"])
def test_text_that_is_not_json_is_left_to_the_parser(text):
    check_json(text, Bounds())


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        (b"[" + b"1," * 999_999 + b"1]", PayloadTooLargeError, "more than the 1,000,000 values"),
        (b"[" + b"{}," * 999_999 + b"{}]", PayloadTooLargeError, "more than the 1,000,000 values"),
        (b"[" * 65 + b"]" * 65, RequestError, "nested more than 64 deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, RequestError, "nested more than 64 deep"),
        (b'["]]]]",' * 65 + b"1" + b"]" * 65, RequestError, "nested more than 64 deep"),
    ],
    ids=["numbers", "objects", "lists", "nested objects", "brackets in strings"],
)
def test_a_document_beyond_the_default_bounds_is_refused(text, error, reason):
    with pytest.raises(error, match=reason):
        check_json(text, Bounds())


def test_a_string_of_any_content_is_one_value():
    check_json(b'["' + b",[{" * 1_000_000 + b'"]', Bounds())


def test_the_bounds_of_the_front_end_are_the_default_bounds():
    assert Limits().bounds == Bounds()


def test_a_large_tensor_may_be_sent_as_binary_data():
    data = bytes(4 * 2_000_000)
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": "X", "datatype": "FP32", "shape": [2_000_000], "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    spec = TensorSpec("X", ("FP32",), (-1,))

    request = InferDecoder(Signature((spec,), (spec,))).decode(head + data, str(len(head)))

    assert request.inputs["X"].shape == (2_000_000,)


def field(number, content):
    return bytes([number << 3, content] if isinstance(content, int) else [number << 3 | 2, len(content), *content])


MESSAGES = st.recursive(
    st.binary(max_size=6),
    lambda part: st.lists(
        st.builds(field, st.integers(1, 9), st.integers(0, 127) | part.filter(lambda one: len(one) < 30)),
        min_size=1,
        max_size=4,
    ).map(b"".join),
    max_leaves=8,
)


def fields_of(message, parts):
    """How many fields a message and its parts have, as protobuf reads them."""
    found = list(UnknownFieldSet(Empty.FromString(message)))
    assume(all(one.wire_type != 3 for one in found))  # groups, which no request has
    inner = [(one.data, parts[one.field_number]) for one in found if one.wire_type == 2 and one.field_number in parts]
    return len(found) + sum(fields_of(*one) for one in inner)


def has_few_fields(data):
    try:
        read_message(data)
    except PayloadTooLargeError:
        return False
    except DecodeError:  # what protobuf makes of it is tested elsewhere
        return True
    return True


@settings(deadline=None, max_examples=25)
@given(message=MESSAGES, lost_bytes=st.integers(0, 40))
@example(message=field(5, field(5, field(8, b"") * 40)), lost_bytes=0)
@example(message=field(5, field(1, b"") + field(1, bytes(29))), lost_bytes=31)
def test_exactly_the_requests_beyond_10000_fields_are_refused(message, lost_bytes):
    try:
        ModelInferRequest.FromString(message)
    except DecodeError:
        has_few_fields(message * (20_000 // len(message)))
        return
    fields = fields_of(message, {5: {5: {}}, 6: {}})
    assume(fields)

    accepted = message * (10_000 // fields)
    assert has_few_fields(accepted)
    assert has_few_fields(accepted[: len(accepted) - lost_bytes])
    assert not has_few_fields(accepted + message)
