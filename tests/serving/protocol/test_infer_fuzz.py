"""For any input the decoder returns a request or raises RequestError, never another exception."""

import contextlib
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.errors import RequestError
from serving.protocol.infer import InferDecoder, InferRequest
from serving.protocol.tensors import DTYPES, Signature, TensorSpec, TextTensor, array_from_numbers, tensor_from_json

SIGNATURE = Signature(
    inputs=(
        TensorSpec("DES", ("FP32",), (-1, 2)),
        TensorSpec("CATCOLUMN", ("INT64", "UINT32"), (-1,)),
        TensorSpec("ROWINDEX", ("INT32",), (-1,)),
        TensorSpec("TEXT", ("BYTES",), (-1,)),
    ),
    outputs=(TensorSpec("OUTPUT0", ("FP32",), (-1, 1)),),
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def valid_request():
    """A whole request: one JSON tensor of numbers, one of texts, and two binary ones."""
    tail = np.array([7, 8], np.int64).tobytes() + np.array([0, 1, 2], np.int32).tobytes()
    head = json.dumps(
        {
            "id": "1",
            "inputs": [
                {"name": "DES", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]},
                {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["a"]},
                {"name": "CATCOLUMN", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}},
                {"name": "ROWINDEX", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}},
            ],
            "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return head + tail, len(head)


BODY, HEAD_BYTES = valid_request()


def decodes_or_is_refused(body, header_bytes):
    """Any exception except RequestError fails the test."""
    with contextlib.suppress(RequestError):
        assert isinstance(InferDecoder(SIGNATURE).decode(body, header_bytes), InferRequest)


def test_the_request_that_is_damaged_below_is_valid():
    assert InferDecoder(SIGNATURE).decode(BODY, str(HEAD_BYTES)).inputs["ROWINDEX"].tolist() == [0, 1, 2]


@settings(deadline=None, max_examples=40)
@given(body=st.binary(max_size=200), header_bytes=st.none() | st.text(max_size=6) | st.integers(-5, 250).map(str))
@example(body=b"", header_bytes="0")
def test_random_bytes(body, header_bytes):
    decodes_or_is_refused(body, header_bytes)


@settings(deadline=None, max_examples=40)
@given(length=st.integers(0, len(BODY) - 1), header_bytes=st.just(HEAD_BYTES) | st.integers(0, len(BODY) + 5))
def test_a_truncated_request_is_refused(length, header_bytes):
    with pytest.raises(RequestError):
        InferDecoder(SIGNATURE).decode(BODY[:length], str(header_bytes))


@settings(deadline=None, max_examples=66)
@given(flips=st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_request_with_flipped_bits(flips):
    body = bytearray(BODY)
    for position, mask in flips:
        body[position] ^= mask

    decodes_or_is_refused(bytes(body), str(HEAD_BYTES))


@settings(deadline=None, max_examples=66)
@given(data=st.data())
def test_a_request_with_one_json_value_replaced(data):
    document = json.loads(BODY[:HEAD_BYTES])
    node = document
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON_VALUES)
    head = json.dumps(document).encode()

    decodes_or_is_refused(head + BODY[HEAD_BYTES:], str(len(head)))


@settings(deadline=None, max_examples=40)
@given(
    value=JSON_VALUES,
    datatype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
@example(value=[], datatype="BYTES", shape=[0])
@example(value=["a", 1], datatype="BYTES", shape=[2])
def test_any_json_value_as_tensor_data(value, datatype, shape):
    with contextlib.suppress(RequestError):
        assert tensor_from_json(value, DTYPES[datatype], tuple(shape), "data").shape == tuple(shape)


@settings(deadline=None)
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_whole_numbers_arrive_exactly(numbers):
    assert array_from_numbers(numbers, DTYPES["INT64"], (len(numbers),), "data").tolist() == numbers


DATA = {
    "DES": np.arange(12, dtype=np.float32).tobytes(),
    "CATCOLUMN": np.arange(12, dtype=np.int64).tobytes(),
    "ROWINDEX": np.arange(12, dtype=np.int32).tobytes(),
    "TEXT": b"".join(struct.pack("<I", number % 3) + b"ab"[: number % 3] for number in range(12)),
}
DATATYPES = {"DES": "FP32", "CATCOLUMN": "INT64", "ROWINDEX": "INT32", "TEXT": "BYTES"}
ONE_FOR_ALL = InferDecoder(SIGNATURE)


@st.composite
def binary_requests(draw):
    """A body of binary tensors, and the length of its head. Most are right, and many have the same numbers."""
    inputs, tail = [], b""
    for name, datatype in DATATYPES.items():
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 3, 3, 0, 4, 2**31 - 1, 2**40]), min_size=1, max_size=2))
        items = min(math.prod(shape), 12)
        size = sum(4 + number % 3 for number in range(items)) if name == "TEXT" else DTYPES[datatype].itemsize * items
        data = DATA[name][:size]
        announced = draw(st.sampled_from([len(data)] * 9 + [0, 7, 24, -1, 2**63, 2**64 - 1]))
        parameters = {"binary_data_size": announced}
        inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": parameters})
        tail += data
    tail += draw(st.sampled_from([b""] * 9 + [b"x"]))
    document = {"inputs": inputs, "parameters": {"timeout": draw(st.sampled_from([5, 5, 6, -1])), "1": '2"3'}}
    head = json.dumps(document, separators=draw(st.sampled_from([(",", ":"), (", ", ": ")]))).encode()
    return head + tail[draw(st.sampled_from([0] * 9 + [1])) :], len(head)


def outcome_of(decoder, body, head_bytes):
    """Everything in a decoded request, or the error."""
    try:
        request = decoder.decode(body, str(head_bytes))
        inputs = {
            name: (tensor.shape, [part.tobytes() for part in tensor.texts[:3]])
            if isinstance(tensor, TextTensor)
            else (tensor.shape, tensor.dtype, tensor.tobytes())
            for name, tensor in request.inputs.items()
        }
    except RequestError as err:
        return str(err)
    return inputs, request.outputs, request.places, request.timeout_us


def huge_size():
    """A size with more digits than any number that a head may have."""
    tensors = [(name, DATATYPES[name], 2**63 if name == "TEXT" else 0) for name in DATATYPES]
    inputs = [
        {"name": name, "datatype": datatype, "shape": [0], "parameters": {"binary_data_size": size}}
        for name, datatype, size in tensors
    ]
    head = json.dumps({"inputs": inputs}).encode()
    return head, len(head)


@settings(deadline=None, max_examples=100)
@given(request=binary_requests())
@example(request=huge_size())
def test_what_a_decoder_has_read_before_changes_no_request(request):
    assert outcome_of(ONE_FOR_ALL, *request) == outcome_of(InferDecoder(SIGNATURE), *request)
    assert outcome_of(ONE_FOR_ALL, *request) == outcome_of(ONE_FOR_ALL, *request)
