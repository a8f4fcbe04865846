"""Made-up requests: whatever a client sends, it gets an answer below 500, and the server goes on serving.

Schemathesis makes requests from the OpenAPI document. Hypothesis makes bodies and messages that are almost right.
"""

import json

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from benchmarks.http_client import request_of
from benchmarks.scale import field_bytes
from tests.e2e.conftest import serving
from tests.tools.tiny_model import TinyModel, flatten

MODEL = TinyModel(rows=50)
MIB = 2**20
SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    MODEL.write(folder / "models")
    options = ("--grpc-port", "0", "--max-body-bytes", "100000", "--log-level", "error")
    with serving(folder / "models", folder / "stderr", *options) as served:
        yield served
        assert served.process.poll() is None, served.log.read_text()
        assert "Traceback" not in served.log.read_text()


@pytest.fixture(scope="module")
def openapi(fuzzed):
    """The server's own OpenAPI document."""
    import schemathesis  # not when tests are collected: it takes half a second

    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


@pytest.mark.parametrize("examples", [2, pytest.param(40, marks=pytest.mark.long)])
def test_no_request_of_the_openapi_document_is_a_server_error(openapi, examples):
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    operations = [result.ok() for result in openapi.get_all_operations()]
    assert len(operations) > 20

    for operation in operations:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def is_answered(case):
            case.call_and_validate(checks=checks)

        is_answered()


def valid_body():
    dense, bags = MODEL.sample_requests(3, seed=0)
    head, _, body = request_of(dense, *flatten(bags)).partition(b"\r\n\r\n")
    return body, int(head.split(b"Inference-Header-Content-Length: ")[1].split(b"\r\n")[0])


BODY, HEAD_BYTES = valid_body()
CHANGES = st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.binary(max_size=3)), max_size=5)


def changed(changes, data):
    data = bytearray(data)
    for at, piece in changes:
        data[at : at + 1] = piece
    return bytes(data)


@settings(max_examples=50, deadline=None)
@given(changes=CHANGES, head_bytes=st.just(HEAD_BYTES) | st.integers(-1, len(BODY) + 1), end=st.integers(0, len(BODY)))
def test_no_changed_binary_body_is_a_server_error(fuzzed, changes, head_bytes, end):
    body = changed(changes, BODY)[: end + len(BODY) // 2]

    headers = {"Inference-Header-Content-Length": str(head_bytes)}
    status, _, answer = fuzzed.ask("/v2/models/tiny/infer", body, headers, method="POST")

    assert status < 500, answer
    assert status == 200 or json.loads(answer)["error"]


def test_a_thousand_wrong_requests_leave_the_memory_as_it_was(fuzzed):
    def ask(count):
        for number in range(count):
            fuzzed.ask("/v2/models/tiny/infer", BODY[: number % len(BODY)], method="POST")
        return field_bytes(f"/proc/{fuzzed.process.pid}/status", "RssAnon")

    before = ask(300)

    assert ask(1000) - before < 6 * MIB


def message():
    dense, bags = MODEL.sample_requests(2, seed=1)
    keys, row_ptrs = flatten(bags)
    request = service_pb2.ModelInferRequest(model_name="tiny", id="fuzz")
    for name, datatype, array in (
        ("DES", "FP32", dense.astype("float32")),
        ("CATCOLUMN", "INT64", keys.astype("int64")),
        ("ROWINDEX", "INT32", row_ptrs.astype("int32")),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request.SerializeToString()


MESSAGE = message()
#: The codes of right requests and of callers' mistakes.
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def code_of(call):
    try:
        call()
    except grpc.RpcError as err:
        return err.code()
    return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def channel(fuzzed):
    address = fuzzed.printed.split("listening for gRPC on ")[1].split()[0]
    with grpc.insecure_channel(address) as channel:
        yield channel


@settings(max_examples=50, deadline=None)
@given(
    data=st.binary(max_size=200)
    | st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.binary(max_size=2)), max_size=4).map(
        lambda changes: changed(changes, MESSAGE)
    )
)
def test_no_changed_protobuf_is_a_server_error(channel, data):
    ask = channel.unary_unary(f"{SERVICE}ModelInfer")  # bytes in, bytes out

    assert code_of(lambda: ask(data, timeout=60)) in EXPECTED


@pytest.mark.parametrize("method", ["RepositoryIndex", "ModelStatistics", "TraceSetting", "LogSettings", "ModelConfig"])
@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=60))
def test_no_protobuf_of_the_other_calls_is_a_server_error(channel, method, data):
    assert code_of(lambda: channel.unary_unary(f"{SERVICE}{method}")(data, timeout=60)) in EXPECTED


def test_a_stream_ends_with_an_error_at_bytes_that_are_no_message(channel):
    answers = channel.stream_stream(f"{SERVICE}ModelStreamInfer")(iter([MESSAGE, b"\xff\xff"]))

    assert next(answers)
    assert code_of(lambda: next(answers)) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_server_still_answers_after_all_of_that(fuzzed):
    status, _, answer = fuzzed.ask(
        "/v2/models/tiny/infer", BODY, {"Inference-Header-Content-Length": str(HEAD_BYTES)}, method="POST"
    )

    assert status == 200, answer
