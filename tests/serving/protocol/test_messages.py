"""ModelInferRequest over gRPC: heads that are remembered give the same requests as heads that are read."""

import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.protocol.ctr import batch_of, signature_of
from serving.protocol.infer import InferDecoder
from serving.protocol.messages import MessageDecoder, read_message
from serving.reading import read_batch
from tests.serving.protocol.raw_tensors import in_http, raw_bytes

DATATYPES = {"DES": "FP32", "CATCOLUMN": "INT64", "ROWINDEX": "INT32"}


def config_of(slots=(2, 1), key_type="I64", limit=None, dense_dim=2):
    tables = tuple(
        TableConfig(name=f"t{at}", dim=4, slots=count, combiner="sum", file=Path("x"), max_keys_per_sample=limit)
        for at, count in enumerate(slots)
    )
    return ModelConfig(
        name="m",
        graph_file=Path("g"),
        dense_file=Path("d"),
        tables=tables,
        key_type=key_type,
        max_batchsize=8,
        dense_dim=dense_dim,
        label_dim=1,
    )


def message_of(tensors, request_id="", **fields):
    message = service_pb2.ModelInferRequest(model_name="m", id=request_id, **fields)
    for name, (datatype, array) in tensors.items():
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(raw_bytes(datatype, array))
    return message.SerializeToString()


class Carriers:
    """The decoders of one model, which have remembered the head of ``tensors``."""

    def __init__(self, config, tensors):
        self._config, signature = config, signature_of(config)
        self._http, self._grpc = InferDecoder(signature), MessageDecoder(signature)
        self.batches(tensors)

    def batches(self, tensors):
        """What each carrier makes of the tensors: a batch, or the text of an error behind the tensor's name."""
        requests = [self._http.decode(*in_http(tensors, True)), self._grpc.decode(read_message(message_of(tensors)))]
        return [self._answer(batch_of, self._config, request.inputs) for request in requests]

    def expected(self, tensors):
        """The same without heads or native code."""
        arrays = [tensors[name][1] if name in tensors else None for name in DATATYPES]
        return self._answer(read_batch, self._config, *arrays)

    @staticmethod
    def _answer(read, *arguments):
        try:
            batch = read(*arguments)
        except RequestError as err:
            return str(err)
        joined = batch.joined
        keys, row_ptrs = joined.keys.tolist(), joined.row_ptrs.tolist()
        return batch.dense.tolist(), keys, row_ptrs, list(joined.lengths), joined.keys.dtype, joined.row_ptrs.dtype


@st.composite
def requests(draw):
    """A model, a right request, and another one of the same shapes whose numbers may be wrong."""
    slots = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dense_dim, samples = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    config = config_of(slots, draw(st.sampled_from(["I64", "I32"])), draw(st.sampled_from([None, 4])), dense_dim)
    bags = samples * sum(slots)
    is_wide, has_offsets = draw(st.booleans()), draw(st.booleans())
    counts = st.lists(st.integers(0, 2), min_size=bags, max_size=bags) if has_offsets else st.just([1] * bags)
    first, second = draw(counts), draw(counts)
    keys = st.integers(0, 9) | st.sampled_from([-(2**63), 2**63 - 1, 2**32, -1])

    def tensors(of_bags, numbers, keys):
        shape = (len(keys),) if has_offsets else (samples, sum(slots))
        found = {"DES": ("FP32", np.array(numbers, np.float32).reshape(samples, dense_dim))}
        found["CATCOLUMN"] = "INT64", np.array(keys, np.int64).reshape(shape)
        if has_offsets:
            offsets = np.cumsum([0, *of_bags], dtype=np.int64 if is_wide else np.int32)
            found["ROWINDEX"] = "INT64" if is_wide else "INT32", offsets
        return found

    right = tensors(first, [0.5] * samples * dense_dim, [3] * sum(first))
    floats = st.floats(-1, 1, width=32) | st.sampled_from([float("nan"), float("-inf")])
    numbers = draw(st.lists(floats, min_size=samples * dense_dim, max_size=samples * dense_dim))
    drawn = draw(st.lists(keys, min_size=sum(first), max_size=sum(first)))
    return config, right, tensors(second, numbers, drawn)


@settings(deadline=None, max_examples=80)
@given(request=requests())
def test_tensors_behind_a_known_head_are_checked_like_arrays(request):
    config, right, other = request
    carriers = Carriers(config, right)

    expected = carriers.expected(right)
    assert [repr(batch) for batch in carriers.batches(right)] == [repr(expected)] * 2
    expected = carriers.expected(other)
    assert [repr(batch) for batch in carriers.batches(other)] == [repr(expected)] * 2


def test_messages_of_one_head_differ_in_their_ids_and_their_numbers():
    decoder = MessageDecoder(signature_of(config_of(slots=(1,))))
    for number, request_id in ((1, "a"), (2, ""), (3, "Zürich"), (4, "a" * 200)):
        dense, keys = np.full((1, 2), number, np.float32), np.array([[number]], np.int64)
        message = read_message(message_of({"DES": ("FP32", dense), "CATCOLUMN": ("INT64", keys)}, request_id))
        request = decoder.decode(message)

        assert (message.model_name, message.model_version, message.id, request.id) == ("m", "", request_id, request_id)
        assert request.inputs["DES"].tolist() == [[number, number]]
        assert request.inputs["CATCOLUMN"].tolist() == [[number]]


def test_a_head_says_how_long_the_raw_contents_are():
    decoder = MessageDecoder(signature_of(config_of(slots=(1,))))
    for keys in ([[1]], [[1], [2]], [[1]]):
        array = np.array(keys, np.int64)
        dense = np.zeros((len(keys), 2), np.float32)
        request = decoder.decode(read_message(message_of({"DES": ("FP32", dense), "CATCOLUMN": ("INT64", array)})))
        assert request.inputs["CATCOLUMN"].tolist() == keys


def test_parameters_and_outputs_belong_to_the_head():
    decoder, dense = MessageDecoder(signature_of(config_of(slots=(1,)))), np.zeros((1, 2), np.float32)
    for timeout_us in (5, 7, 5):
        tensors = {"DES": ("FP32", dense), "CATCOLUMN": ("INT64", np.array([[1]], np.int64))}
        message = service_pb2.ModelInferRequest.FromString(message_of(tensors))
        message.parameters["timeout"].int64_param = timeout_us
        assert decoder.decode(read_message(message.SerializeToString())).timeout_us == timeout_us


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a\x05m", id="a name that ends early"),
        pytest.param(b"\x0a\x01\xff", id="a name that is not UTF-8"),
        pytest.param(b"\x2a\x03\x0a\x05X", id="a tensor that ends early"),
        pytest.param(b"\x1a\x01\xff", id="an id that is not UTF-8"),
        pytest.param(b"\x07", id="an unknown kind of field"),
        pytest.param(b"\xff" * 11, id="an endless number"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(DecodeError):
        read_message(data)


def test_a_text_within_a_tensor_that_is_not_utf_8_is_refused():
    with pytest.raises(RequestError, match="ModelInferRequest"):
        MessageDecoder(signature_of(config_of())).decode(read_message(b"\x0a\x01m\x2a\x03\x0a\x01\xff"))


def test_unknown_fields_are_ignored_as_protobuf_ignores_them():
    tensors = {"DES": ("FP32", np.zeros((1, 2), np.float32)), "CATCOLUMN": ("INT64", np.array([[1]], np.int64))}
    group, number, eight = b"\x7b\x08\x01\x7c", b"\x78\x05", b"\x79" + bytes(8)
    for unknown in (group, number, eight):
        request = MessageDecoder(signature_of(config_of(slots=(1,)))).decode(
            read_message(unknown + message_of(tensors) + unknown)
        )
        assert request.inputs["CATCOLUMN"].tolist() == [[1]]


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=40))
@example(data=b"\x1a\x01a\x1a\x01b\x0a\x01m\x3a\x02xy\x3a\x00")
def test_any_bytes_are_read_as_protobuf_reads_them(data):
    try:
        expected = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        expected = None
    try:
        found = read_message(data)
    except DecodeError:
        assert expected is None
        return
    if expected is not None:  # otherwise a tensor is wrong, which its decoder finds
        named = expected.model_name, expected.model_version, expected.id, b"".join(expected.raw_input_contents)
        assert (found.model_name, found.model_version, found.id, found.contents) == named


def test_a_wrong_datatype_or_shape_is_named_as_in_http():
    decoder = MessageDecoder(signature_of(config_of()))
    for datatype, shape, text in (
        ("FP64", [1, 2], "DES (inputs[0].datatype): expected FP32, but 'FP64' came"),
        ("FP32", [-1], "DES (inputs[0].shape[0]): expected a whole number from 0"),
    ):
        message = service_pb2.ModelInferRequest(model_name="m")
        message.inputs.add(name="DES", datatype=datatype, shape=shape)
        with pytest.raises(RequestError, match=re.escape(text)):
            decoder.decode(read_message(message.SerializeToString()))
