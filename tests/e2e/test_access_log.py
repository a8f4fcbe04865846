"""The ids of requests in answers, and the access log of a real server."""

import json
import re
import uuid

import grpc
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.kserve_requests import inputs_of, request_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SAMPLES = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]}
INFER = "/v2/models/tiny/infer"


def raw_answer(served, head):
    """Send bytes that no client library would send; return the answer's head."""
    with served.connect() as connection:
        connection.sendall(head)
        return connection.recv(65536).partition(b"\r\n\r\n")[0]


def logged(served):
    """The lines of the access log, as objects."""
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    return [line for line in lines if line["logger"] == "hotrow.access"]


def grpc_address(served):
    return re.search(r"listening for gRPC on (\S+)", served.printed)[1]


@pytest.mark.parametrize(("path", "code"), [("/predict/tiny", 200), (INFER, 400), ("/v2", 405), ("/none", 404)])
def test_every_answer_repeats_the_clients_ids(served, path, code):
    answered, headers, _ = served.ask(path, SAMPLES, {"X-Request-Id": "a/b:7", "traceparent": TRACE})

    assert answered == code
    assert (headers["X-Request-Id"], headers["traceparent"]) == ("a/b:7", TRACE)


def test_an_answer_has_no_ids_if_the_client_sent_none(served):
    _, headers, _ = served.ask("/predict/tiny", SAMPLES)

    assert (headers["X-Request-Id"], headers["traceparent"]) == (None, None)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"X-Request-Id: " + b"a" * 129, id="a long id"),
        pytest.param(b"X-Request-Id: a b", id="a blank"),
        pytest.param(b"X-Request-Id: \xe4\xff", id="bytes beyond ASCII"),
        pytest.param(b"X-Request-Id: ", id="an empty id"),
        pytest.param(b"traceparent: 00-0-0-01", id="a short trace parent"),
        pytest.param(b"traceparent: " + TRACE.upper().encode(), id="a trace parent in capitals"),
    ],
)
def test_an_id_of_another_form_is_not_repeated(served, header):
    head = raw_answer(served, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")
    assert header.partition(b":")[0].lower() not in head.lower()


def test_the_access_log_has_a_line_per_request_whatever_the_level(start, repository):
    served = start(repository, "--access-log", "--log-format", "json", "--log-level", "error")
    served.ask("/predict/tiny", SAMPLES, {"X-Request-Id": "first"})
    served.ask(f"{INFER}?x=1", {})
    _, headers, _ = served.ask("/predict/none", SAMPLES)
    served.ask("/metrics")
    served.stop()

    lines = logged(served)
    assert [(line["method"], line["path"], line["status"], line["model"]) for line in lines] == [
        ("POST", "/predict/tiny", 200, "tiny"),
        ("POST", INFER, 400, "tiny"),
        ("POST", "/predict/none", 404, ""),
        ("GET", "/metrics", 200, ""),
    ]
    assert lines[0]["request_id"] == "first"
    assert lines[2]["request_id"] == headers["X-Request-Id"]
    assert len({line["request_id"] for line in lines}) == 4
    assert all(uuid.UUID(line["request_id"]) for line in lines[1:])
    assert all(line["milliseconds"] > 0 for line in lines)


def test_without_the_option_no_request_is_logged(served):
    served.ask("/predict/tiny", SAMPLES)

    assert "hotrow.access" not in served.log.read_text()


def test_grpc_repeats_the_clients_ids_and_logs_its_requests(start, repository, model):
    served = start(repository, "--grpc-port", "0", "--access-log", "--log-format", "json")
    ids = (("x-request-id", "g1"), ("traceparent", TRACE))
    arrays, _ = request_of(model, 1)
    with grpc.insecure_channel(grpc_address(served)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ServerLive.with_call(service_pb2.ServerLiveRequest(), metadata=ids)
        assert dict(call.initial_metadata()) == dict(ids)
        for bad in ("a b", "a" * 129):
            _, call = stub.ServerLive.with_call(service_pb2.ServerLiveRequest(), metadata=(("x-request-id", bad),))
            assert bad not in dict(call.initial_metadata()).values()
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="a\nb"), metadata=ids)
        assert dict(caught.value.initial_metadata()) == dict(ids)
        _, call = health_pb2_grpc.HealthStub(channel).Check.with_call(health_pb2.HealthCheckRequest())
        made = dict(call.initial_metadata())["x-request-id"]
        stream = stub.ModelStreamInfer(iter([service_pb2.ModelInferRequest(model_name="none")] * 2), metadata=ids)
        assert len(list(stream)) == 2
        assert dict(stream.initial_metadata()) == dict(ids)
    with tritonclient.grpc.InferenceServerClient(grpc_address(served)) as client:
        client.infer("tiny", inputs_of(arrays, tritonclient.grpc), headers={"x-request-id": "g2"})
    served.stop()

    lines = [
        (line["method"], line["path"], line["status"], line["request_id"], line["model"]) for line in logged(served)
    ]
    of_bad_ids = [lines.pop(1) for _ in range(2)]
    assert [line[:3] for line in of_bad_ids] == [("gRPC", "ServerLive", "OK")] * 2
    assert lines == [
        ("gRPC", "ServerLive", "OK", "g1", ""),
        ("gRPC", "ModelInfer", "NOT_FOUND", "g1", ""),
        ("gRPC", "Check", "OK", made, ""),
        ("gRPC", "ModelStreamInfer", "NOT_FOUND", "g1", "none"),
        ("gRPC", "ModelStreamInfer", "NOT_FOUND", "g1", "none"),
        ("gRPC", "ModelInfer", "OK", "g2", "tiny"),
    ]


def test_the_access_log_as_text_is_one_line_per_request_also_for_odd_paths(start, repository, monkeypatch):
    monkeypatch.setenv("HOTROW_ACCESS_LOG", "1")
    served = start(repository)
    served.ask("/v2")
    served.ask("/predict/a%0Ab%00", SAMPLES, {"X-Request-Id": "odd"})
    served.ask("/" + "a" * 2000)
    served.stop()

    lines = [line for line in served.log.read_text().splitlines() if "hotrow.access" in line]
    assert len(lines) == 3
    assert "hotrow.access: GET /v2 200" in lines[0]
    assert re.search(r" POST /predict/a%0Ab%00 404 \d+\.\d{3} ms request_id=odd model=$", lines[1])
    assert "a" * 511 + " 404 " in lines[2]


def test_another_value_in_the_environment_is_refused(hotrow_serve, repository, monkeypatch):
    monkeypatch.setenv("HOTROW_ACCESS_LOG", "yes")
    refused = hotrow_serve(repository)
    assert refused.returncode == 2
    assert "--access-log: expected 1 or 0, got 'yes'" in refused.stderr
