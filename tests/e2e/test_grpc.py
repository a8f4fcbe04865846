"""A real server's gRPC: NVIDIA's client, the health protocol, reflection, streams, and bad messages."""

import queue
import re

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as system_memory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.kserve_requests import DATATYPES, inputs_of, request_of

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def address(repository, tmp_path_factory):
    from tests.e2e.conftest import serving

    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(repository, log, "--grpc-port", "0", "--max-body-bytes", "200000") as served:
        yield re.search(r"listening for gRPC on (\S+)", served.printed)[1]


@pytest.fixture
def client(address):
    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture
def channel(address):
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.mark.parametrize("samples", [1, 7, 64])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_an_answer_is_that_of_the_model(client, model, samples, compression):
    arrays, expected = request_of(model, samples)

    result = client.infer("tiny", inputs_of(arrays, triton), request_id="r7", compression_algorithm=compression)

    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected, atol=TOLERANCE)
    answer = result.get_response()
    assert (answer.id, answer.model_name, answer.model_version) == ("r7", "tiny", "2")
    assert answer.parameters["defaulted_keys"].int64_param >= 0


def test_numbers_may_be_in_the_messages_fields(channel, model):
    arrays, expected = request_of(model, 3)
    message = service_pb2.ModelInferRequest(model_name="tiny")
    fields = {"float32": "fp32_contents", "int64": "int64_contents", "int32": "int_contents"}
    for name, array in arrays.items():
        tensor = message.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        getattr(tensor.contents, fields[array.dtype.name]).extend(array.reshape(-1).tolist())

    answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)

    got = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)


def test_a_stream_answers_in_order_and_an_error_does_not_end_it(client, model):
    answers = queue.Queue()
    requests = [request_of(model, samples, seed=samples) for samples in (1, 5, 2)]
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("tiny", inputs_of(requests[0][0], triton))
    client.async_stream_infer("tiny", inputs_of(requests[1][0], triton)[:2], request_id="bad")
    for arrays, _ in requests[1:]:
        client.async_stream_infer("tiny", inputs_of(arrays, triton))
    received = [answers.get(timeout=60) for _ in range(4)]
    client.stop_stream()

    assert "because ROWINDEX is missing" in str(received[1][1])
    assert received[0][0].get_response().parameters["triton_final_response"].bool_param
    for (result, error), (_, expected) in zip([received[0], *received[2:]], requests, strict=True):
        assert error is None
        np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected, atol=TOLERANCE)


def test_tensors_in_shared_memory_are_read_and_written(client, model):
    arrays, expected = request_of(model, 4)
    total = sum(array.nbytes for array in arrays.values()) + 64
    handle = system_memory.create_shared_memory_region("data", "/hotrow-grpc-test", total)
    try:
        client.register_system_shared_memory("data", "/hotrow-grpc-test", total)
        assert client.get_system_shared_memory_status().regions["data"].byte_size == total
        inputs, offset = inputs_of(arrays, triton), 0
        for tensor, array in zip(inputs, arrays.values(), strict=True):
            system_memory.set_shared_memory_region(handle, [array], offset=offset)
            tensor.set_shared_memory("data", array.nbytes, offset)
            offset += array.nbytes
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("data", 64, offset)

        result = client.infer("tiny", inputs, outputs=[output])

        shape = list(result.get_output("OUTPUT0").shape)
        assert list(result.get_response().raw_output_contents) == [b""]  # clients find bytes by an output's position
        written = system_memory.get_contents_as_numpy(handle, np.float32, shape, offset=offset)
        np.testing.assert_allclose(written, expected, atol=TOLERANCE)
        client.unregister_system_shared_memory("data")
        with pytest.raises(InferenceServerException, match="shared memory region 'data': not registered"):
            client.infer("tiny", inputs, outputs=[output])
    finally:
        client.unregister_system_shared_memory()
        system_memory.destroy_shared_memory_region(handle)


def test_the_server_describes_itself_and_its_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("tiny", "9")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata().name == "hotrow"
    assert [one.name for one in client.get_model_metadata("tiny").inputs] == ["DES", "CATCOLUMN", "ROWINDEX"]
    assert client.get_model_config("tiny").config.parameters["max_batchsize"].string_value == "64"
    assert [model.name for model in client.get_model_repository_index().models] == ["small", "tiny"]
    assert client.get_inference_statistics("small").model_stats[0].name == "small"
    assert client.get_log_settings().settings["log_info"].bool_param
    assert client.update_log_settings({"log_verbose_level": 0}).settings["log_file"].string_param == ""
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert dict(client.get_cuda_shared_memory_status().regions) == {}
    client.unregister_cuda_shared_memory()


@pytest.mark.parametrize(
    ("ask", "status", "message"),
    [
        (lambda client: client.infer("none", []), "NOT_FOUND", "no model 'none' is served; there is 'small', 'tiny'"),
        (lambda client: client.infer("tiny", [], "9"), "NOT_FOUND", "no version '9' of model 'tiny' is served"),
        (lambda client: client.infer("tiny", []), "INVALID_ARGUMENT", "inputs: missing 'DES', 'CATCOLUMN'"),
        (lambda client: client.get_model_metadata("none"), "NOT_FOUND", "no model 'none' is served"),
        (
            lambda client: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
            "INVALID_ARGUMENT",
            "trace_level: expected OFF",
        ),
        (
            lambda client: client.update_log_settings({"log_info": None}),
            "INVALID_ARGUMENT",
            "log_info: expected a value",
        ),
        (lambda client: client.register_cuda_shared_memory("g", b"", 0, 1), "INVALID_ARGUMENT", "CUDA shared memory"),
    ],
)
def test_an_error_has_its_status_and_says_what_is_wrong(client, ask, status, message):
    with pytest.raises(InferenceServerException) as caught:
        ask(client)

    assert caught.value.status() == f"StatusCode.{status}"
    assert message in caught.value.message()


def described(**changes):
    """A message with one tensor, which is changed."""
    message = service_pb2.ModelInferRequest(model_name="tiny")
    tensor = {"name": "DES", "datatype": "FP32", "shape": [1, 3]} | changes
    raw = tensor.pop("raw", [bytes(12)])
    message.inputs.add(**tensor)
    message.raw_input_contents.extend(raw)
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "X"}, "inputs[0].name: the model has no input 'X'"),
        ({"datatype": "FP64"}, "DES (inputs[0].datatype): expected FP32, but 'FP64' came"),
        ({"shape": []}, "DES (inputs[0].shape): expected 1 to 8 extents, but 0 came"),
        (
            {"shape": [-1, 3]},
            "DES (inputs[0].shape[0]): expected a whole number from 0 to 2147483647, but the number -1 came",
        ),
        ({"raw": []}, "DES (inputs[0]): neither contents, raw_input_contents nor shared memory is there"),
        ({"raw": [bytes(11)]}, "raw_input_contents: shape [1, 3] of FP32 needs 12 bytes, but 11 came"),
        ({"raw": [bytes(12)] * 2}, "raw_input_contents: more entries than tensors without contents"),
        ({"contents": {"fp32_contents": [1, 2]}, "raw": []}, "contents.fp32_contents: shape [1, 3] needs 3 numbers"),
        (
            {"contents": {"fp32_contents": [1, 2, 3], "int64_contents": [1]}, "raw": []},
            "contents: FP32 needs fp32_contents and nothing else, but int64_contents and fp32_contents came",
        ),
        (
            {"contents": {"int64_contents": [1, 2, 3]}, "raw": []},
            "contents: FP32 needs fp32_contents and nothing else, but int64_contents came",
        ),
        (
            {
                "contents": {"fp32_contents": [1, 2, 3]},
                "raw": [],
                "parameters": {
                    "shared_memory_region": {"string_param": "r"},
                    "shared_memory_byte_size": {"int64_param": 12},
                },
            },
            "DES (inputs[0]): a tensor in shared memory has no contents",
        ),
        ({"parameters": {"priority": {}}}, "DES (inputs[0]): parameters.priority: expected a value, but none came"),
        ({"parameters": {"shared_memory_region": {"bool_param": True}}}, "shared_memory_region: expected a string"),
    ],
)
def test_a_wrong_message_is_refused_with_the_place(channel, changes, message):
    with pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(described(**changes))

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in caught.value.details()


def test_a_message_beyond_the_limit_is_refused(client):
    too_large = {"DES": np.zeros((64, 3), np.float32), "CATCOLUMN": np.zeros((1, 40_000), np.int64)}

    with pytest.raises(InferenceServerException, match=r"larger than max|RESOURCE_EXHAUSTED"):
        client.infer("tiny", inputs_of(too_large, triton))


def test_health_and_reflection_follow_their_protocols(channel):
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING

    assert health.Check(health_pb2.HealthCheckRequest()).status == serving
    assert health.Check(health_pb2.HealthCheckRequest(service="tiny")).status == serving
    assert next(iter(health.Watch(health_pb2.HealthCheckRequest(service="tiny")))).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="none"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    listed = next(iter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)))
    names = {service.name for service in listed.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names


def test_a_port_in_use_is_an_error_before_the_server_is_ready(address, repository, tmp_path):
    from tests.e2e.conftest import serving

    port = address.rpartition(":")[2]
    with (
        pytest.raises(AssertionError, match=f":{port}: cannot listen for gRPC"),
        serving(repository, tmp_path / "stderr", "--grpc-port", port),
    ):
        pass


def test_a_client_that_watches_the_health_hears_of_the_stop_and_does_not_delay_it(repository, tmp_path):
    from tests.e2e.conftest import serving

    statuses = health_pb2.HealthCheckResponse
    with serving(repository, tmp_path / "stderr", "--grpc-port", "0") as served:
        address = re.search(r"listening for gRPC on (\S+)", served.printed)[1]
        with grpc.insecure_channel(address) as channel:
            watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watched).status == statuses.SERVING
            assert served.stop() == 0
            assert [answer.status for answer in watched] == [statuses.NOT_SERVING]
