"""Whatever a client sends, a request has an answer or an error of its own: no bug of the server, no other exception.

Requests are drawn from pieces of right requests, so that many get far. Each goes the whole way: decoded, checked,
answered and encoded.
"""

import gzip
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from kernels.errors import HotrowError
from serving.frontend.codes import codes_of
from serving.frontend.decoders import Decoders
from serving.frontend.http.infer import InferExchange, SamplesExchange
from serving.protocol.bounds import Bounds
from serving.protocol.infer import InferDecoder
from serving.protocol.messages import MessageDecoder, encode_message, read_message
from serving.protocol.shared_memory import SharedMemory
from serving.repository import ModelRepository
from tests.serving.ps_files import write_lookup_model
from tests.tools.tiny_model import TinyModel

BOUNDS = Bounds(max_tensor_bytes=1 << 20, max_answer_bytes=1 << 20)
INTEGERS = st.sampled_from(
    [0, 1, 2, 3, 5, 8, 12, 100, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
)
NUMBERS = INTEGERS | st.floats() | st.sampled_from([1e300, -0.0, 1e-320, 3.5e38])
ODD = st.none() | st.booleans() | st.text(max_size=4) | st.just([]) | st.just({}) | st.just([[1], 2]) | NUMBERS
SHAPES = st.lists(st.integers(0, 6) | INTEGERS, max_size=9) | ODD
DATATYPES = st.sampled_from(["FP32", "INT64", "INT32", "UINT32", "UINT64", "FP64", "BYTES", "BOOL", ""])
SIZES = st.integers(0, 48) | INTEGERS | ODD
NAMES = st.sampled_from(["DES", "CATCOLUMN", "ROWINDEX", "KEYS", "NUMKEYS", "OUTPUT0", "x"])
DATA = st.lists(st.integers(0, 9) | ODD, max_size=8) | st.lists(st.lists(NUMBERS, max_size=3), max_size=4) | ODD
PLACES = {
    "shared_memory_region": st.just("r") | ODD,
    "shared_memory_byte_size": SIZES,
    "shared_memory_offset": SIZES,
}
RIGHT = {
    "tiny": {
        "DES": {"datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]},
        "CATCOLUMN": {"datatype": "INT64", "shape": [2], "data": [1, 2]},
        "ROWINDEX": {"datatype": "INT32", "shape": [4], "data": [0, 1, 2, 2]},
    },
    "hps_wdl": {
        "KEYS": {"datatype": "INT64", "shape": [1, 3], "data": [3, 7, 8]},
        "NUMKEYS": {"datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
    },
}


def tensors(model):
    """Right tensors of a model, each with some members changed."""
    changes = st.fixed_dictionaries(
        {},
        optional={
            "name": NAMES,
            "datatype": DATATYPES | ODD,
            "shape": SHAPES,
            "data": DATA,
            "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": SIZES, **PLACES}) | ODD,
            "strange": ODD,
        },
    )
    few = st.just({}) | st.just({}) | changes
    dropped = st.sets(st.sampled_from(["data", "shape"]), max_size=1)

    def changed(name, change, drop):
        tensor = {"name": name, **RIGHT[model][name], **change}
        return {key: value for key, value in tensor.items() if key not in drop or "parameters" not in change}

    return [st.builds(changed, st.just(name), few, dropped) for name in RIGHT[model]]


def documents(model):
    """Whole documents of ``infer``."""
    output = st.fixed_dictionaries(
        {"name": st.just("OUTPUT0") | NAMES},
        optional={"parameters": st.fixed_dictionaries({}, optional={"binary_data": st.booleans() | ODD, **PLACES})},
    )
    return st.fixed_dictionaries(
        {"inputs": st.tuples(*tensors(model)).map(list) | st.lists(st.one_of(tensors(model)), max_size=4)},
        optional={
            "id": st.just("1") | ODD,
            "outputs": st.lists(output, max_size=2) | ODD,
            "parameters": st.fixed_dictionaries(
                {}, optional={"binary_data_output": st.booleans(), "timeout": SIZES, "sequence_id": ODD}
            ),
        },
    )


SAMPLES = st.fixed_dictionaries(
    {
        "samples": st.lists(
            st.fixed_dictionaries(
                {"dense": st.just([1, 2, 3]) | DATA},
                optional={
                    "keys": st.just([[1], [2], [3, 4]])
                    | st.lists(DATA, min_size=3, max_size=3)
                    | st.dictionaries(st.sampled_from(["user", "item", "x"]), DATA, max_size=3)
                    | ODD
                },
            ),
            max_size=3,
        )
        | ODD
    }
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model with a dense network, and one without."""
    tiny, rows = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("rows")
    TinyModel().write(tiny)
    with ModelRepository(tiny) as first, ModelRepository(write_lookup_model(rows)) as second:
        first.load()
        second.load()
        yield {
            "tiny": first.loaded("tiny"),
            "hps_wdl": second.loaded("hps_wdl"),
        }


def ends_well(model, exchange):
    """Answer a request as a server does; an error must say who is at fault."""
    try:
        exchange.question = question = exchange.read(model)
        assert model.samples(question) >= 0
        assert exchange.timeout_us >= 0
        (answer,) = model.answer([question])
        assert exchange.write(model, answer) is not None
    except HotrowError as err:
        error = err
    else:
        return
    assert codes_of(error)[0] in (400, 413)
    assert 0 < len(str(error)) < 2000


@settings(deadline=None, max_examples=25)
@given(data=st.data(), tail=st.binary(max_size=40), is_zipped=st.booleans(), cut=st.none() | st.integers(0, 400))
def test_infer_over_http(models, data, tail, is_zipped, cut):
    name = data.draw(st.sampled_from(sorted(models)))
    head = json.dumps(data.draw(documents(name))).encode()
    headers = {b"inference-header-content-length": str(len(head) if cut is None else cut).encode()} if tail else {}
    body = head + tail
    if is_zipped:
        headers[b"content-encoding"] = b"gzip"
        body = gzip.compress(body)[: None if cut is None else max(0, cut)]

    exchange = InferExchange(body, headers, 1 << 20, Decoders(InferDecoder, SharedMemory(), BOUNDS))

    assert exchange.size_bytes is None or exchange.size_bytes >= 0
    ends_well(models[name], exchange)


@settings(deadline=None, max_examples=25)
@given(document=SAMPLES | ODD)
def test_samples_over_http(models, document):
    body = json.dumps(document).encode()
    for model in models.values():
        ends_well(model, SamplesExchange(body, {}, 1 << 20, Decoders(InferDecoder, SharedMemory(), BOUNDS)))


class MessageExchange:
    """A message of gRPC as an exchange."""

    def __init__(self, message):
        self.message = message

    @property
    def timeout_us(self):
        return self.request.timeout_us

    def read(self, model):
        decoder = MessageDecoder(model.signature, bounds=BOUNDS)
        self.request = decoder.decode(read_message(self.message.SerializeToString()))
        with self.request.locating_errors():
            return model.read(self.request.inputs, self.request.asked)

    def write(self, model, answer):
        outputs, parameters = model.outputs(self.question, answer)
        return encode_message(self.request, model.name, model.version, outputs, parameters, SharedMemory())


FIELDS = {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents", "UINT32": "uint_contents"}
PARAMETERS = st.dictionaries(
    st.sampled_from([*PLACES, "timeout", "binary_data", "classification"]),
    st.one_of(
        st.integers(-(2**63), 2**63 - 1).map(lambda number: {"int64_param": number}),
        st.integers(0, 2**64 - 1).map(lambda number: {"uint64_param": number}),
        st.floats().map(lambda number: {"double_param": number}),
        st.text(max_size=3).map(lambda text: {"string_param": text}),
        st.booleans().map(lambda truth: {"bool_param": truth}),
        st.just({}),
    ),
    max_size=3,
)


@st.composite
def messages(draw, name):
    """Messages of gRPC: right ones with some fields changed."""
    raw = draw(st.just([]) | st.lists(st.binary(max_size=24) | st.just(struct.pack("<3f", 1, 2, 3)), max_size=4))
    message = service_pb2.ModelInferRequest(model_name=name, raw_input_contents=raw)
    holders = [message]
    for tensor_name, tensor in RIGHT[name].items():
        shape = draw(st.just(tensor["shape"]) | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
        added = message.inputs.add(
            name=tensor_name, datatype=draw(st.just(tensor["datatype"]) | DATATYPES), shape=shape
        )
        holders.append(added)
        if not raw:
            field = draw(st.just(FIELDS[tensor["datatype"]]) | st.sampled_from(sorted(FIELDS.values())))
            getattr(added.contents, field).extend(tensor["data"])
    if draw(st.booleans()):
        holders.append(message.outputs.add(name=draw(NAMES)))
    for holder in draw(st.lists(st.sampled_from(range(len(holders))), max_size=2)):
        for key, value in draw(PARAMETERS).items():
            holders[holder].parameters[key].CopyFrom(service_pb2.InferParameter(**value))
    return message


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_infer_over_grpc(models, data):
    name = data.draw(st.sampled_from(sorted(models)))

    ends_well(models[name], MessageExchange(data.draw(messages(name))))


@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "01", "1_0", "+1", ".5"]
)
def test_a_literal_that_is_not_a_json_number_is_refused(models, literal):
    inputs = json.dumps([{"name": name, **tensor} for name, tensor in RIGHT["tiny"].items()])
    body = f'{{"inputs":{inputs.replace("[1, 2, 3]", f"[1, 2, {literal}]")}}}'.encode()
    with pytest.raises(HotrowError) as refusal:
        InferExchange(body, {}, 1 << 20, Decoders(InferDecoder, SharedMemory(), BOUNDS)).read(models["tiny"])

    assert codes_of(refusal.value)[0] == 400


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_dense_feature_that_is_not_finite_is_refused(models, number):
    inputs = [
        {"name": "DES", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}},
        {"name": "CATCOLUMN", **RIGHT["tiny"]["CATCOLUMN"]},
        {"name": "ROWINDEX", **RIGHT["tiny"]["ROWINDEX"]},
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {b"inference-header-content-length": str(len(head)).encode()}
    body = head + np.array([1, number, 3], "<f4").tobytes()
    exchange = InferExchange(body, headers, 1 << 20, Decoders(InferDecoder, SharedMemory(), BOUNDS))

    with pytest.raises(HotrowError) as refusal:
        models["tiny"].answer([exchange.read(models["tiny"])])

    assert codes_of(refusal.value)[0] == 400
