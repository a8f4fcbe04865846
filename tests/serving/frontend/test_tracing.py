"""The spans of requests, as OpenTelemetry's own exporter for tests receives them."""

import asyncio
import json
import re
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
import tritonclient.grpc
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2

from serving.cli.main import main
from serving.errors import StoreUnreachableError
from serving.frontend import tracing
from serving.frontend.exchange import answer_together
from serving.frontend.front_end import FrontEnd
from serving.frontend.grpc import _Inference
from serving.frontend.http.app import create_app
from serving.frontend.tracing import Tracing
from serving.opening import Runtime
from serving.protocol.messages import read_message
from serving.repository import ModelRepository
from serving.storage.rocksdb.table import RocksDbTable
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

MODEL = TinyModel(tables={"user": 1, "item": 2}, rows=200, max_batchsize=8)
BODY = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2, 3], [150]]}]}
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced:
    """An application, and the spans that it has made."""

    def __init__(self, front, exporter):
        self.client, self.front, self._exporter = Client(create_app(front)), front, exporter

    def ask(self, path="/predict/ctr", body=BODY, **headers):
        return self.client.ask("POST", path, json=body, headers=headers)

    def spans(self):
        """The spans in the order of their starts, parents first."""
        self.front.tracing.flush()
        spans = sorted(self._exporter.get_finished_spans(), key=lambda span: (span.start_time, span.parent is not None))
        self._exporter.clear()
        return spans


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    MODEL.write(folder, "ctr", 3)
    rocksdb = {"type": "rocks_db", "path": "rows", "num_threads": 1}
    write_ps(folder, volatile_db={"type": "hash_map", "capacity_rows": 100}, persistent_db=rocksdb)
    with ModelRepository(folder, Runtime(device="cpu")) as repository:
        repository.load()
        yield repository


@pytest.fixture
def traced(repository, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # the tests flush
    exporter = InMemorySpanExporter()
    front = FrontEnd(repository, tracing=Tracing(3, exporter))
    yield Traced(front, exporter)
    front.close()


def test_a_request_is_a_span_with_its_stages_inside(traced):
    assert traced.ask().status_code == 200

    request, *stages = traced.spans()
    names = [span.name for span in stages]
    assert (request.name, request.kind, request.parent) == ("POST /predict/{model}", SpanKind.SERVER, None)
    assert request.attributes == {"hotrow.model": "ctr", "http.response.status_code": 200}
    assert request.status.status_code is StatusCode.UNSET
    assert names[:2] == ["queue", "decode"]
    assert names[-2:] == ["network", "encode"]
    assert set(names[2:-2]) == {"lookup"}
    for before, after in pairwise(stages):
        assert before.start_time <= before.end_time <= after.end_time
        assert request.start_time <= before.start_time
        assert after.end_time <= request.end_time
    assert {span.parent.span_id for span in stages} == {request.context.span_id}
    assert stages[-2].attributes == {"hotrow.samples": 1}


def test_each_call_of_a_tier_is_a_lookup_with_its_tier_and_keys(traced):
    unknown = {"samples": [{"dense": [1, 2, 3], "keys": [[5000], [], []]}]}
    assert traced.ask(body=unknown).json()["defaulted_keys"] == 1

    lookups = [dict(span.attributes) for span in traced.spans() if span.name == "lookup"]
    assert lookups[0] == {"hotrow.tier": "memory", "hotrow.keys": 1}
    assert lookups[-1].pop("hotrow.table").endswith(".user")
    assert lookups[-1] == {"hotrow.tier": "rocksdb", "hotrow.keys": 1}


def test_a_callers_context_is_the_parent(traced):
    assert traced.ask(traceparent=f"00-{TRACE}-{CALLER}-01").status_code == 200

    request, *stages = traced.spans()
    assert format(request.parent.span_id, "016x") == CALLER
    assert {format(span.context.trace_id, "032x") for span in (request, *stages)} == {TRACE}
    assert stages


def test_a_trace_that_the_caller_does_not_keep_has_no_spans(traced):
    assert traced.ask(traceparent=f"00-{TRACE}-{CALLER}-00").status_code == 200

    assert traced.spans() == []


@pytest.mark.parametrize("wrong", ["nonsense", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{'0' * 16}-01"])
def test_a_context_that_is_not_valid_begins_a_trace(traced, wrong):
    assert traced.ask(traceparent=wrong).status_code == 200

    assert traced.spans()[0].parent is None


def test_kserves_route_has_its_name_and_the_id_of_the_request(traced):
    answer = traced.ask("/v2/models/ctr/infer", body={"inputs": []})

    [request, *stages] = traced.spans()
    assert answer.status_code == 400
    assert request.name == "POST /v2/models/{model}/infer"
    assert request.attributes["http.response.status_code"] == 400
    assert request.status.status_code is StatusCode.UNSET  # a client's error
    assert [span.name for span in stages] == ["queue"]  # it was not decoded


def test_a_request_for_no_model_has_a_span_without_stages(traced):
    assert traced.ask("/predict/none").status_code == 404

    [request] = traced.spans()
    assert request.attributes == {"hotrow.model": "", "http.response.status_code": 404}


def test_a_call_that_a_tier_does_not_answer_is_an_error(traced, monkeypatch):
    def silent(self, keys, out):
        raise StoreUnreachableError("rocksdb", "ctr@3.user", "no reply")

    monkeypatch.setattr(RocksDbTable, "fetch", silent)
    body = {"samples": [{"dense": [1, 2, 3], "keys": [[4711], [], []]}]}
    assert traced.ask(body=body).status_code == 503

    request, *stages = traced.spans()
    assert request.status.status_code is StatusCode.ERROR
    failed = [span for span in stages if span.status.status_code is StatusCode.ERROR]
    assert [(span.name, span.attributes["hotrow.tier"]) for span in failed] == [("lookup", "rocksdb")]
    assert "no reply" in failed[0].attributes["exception.message"]


def test_requests_that_are_answered_together_have_the_same_lookups(repository, traced):
    from serving.frontend.http.infer import Decoders, InferDecoder, SamplesExchange

    decoders = Decoders(InferDecoder, traced.front.control.regions, traced.front.limits.bounds)
    model, exchanges = repository.loaded("ctr"), []
    for _ in range(3):
        exchanges.append(SamplesExchange(json.dumps(BODY).encode(), {}, 1 << 20, decoders))
    traces = [traced.front.tracing.begin("request", [], "") for _ in exchanges[:2]]
    for exchange, trace in zip(exchanges, [*traces, None], strict=True):
        exchange.traced_by(trace)

    answer_together(model, exchanges, 8)
    for trace in traces:
        trace.end("ctr", 200)

    spans = traced.spans()
    requests = [span for span in spans if span.parent is None]
    assert len(requests) == 2
    for request in requests:
        inside = [span for span in spans if span.parent and span.parent.span_id == request.context.span_id]
        assert [span.attributes["hotrow.samples"] for span in inside if span.name == "network"] == [3]
    assert all(exchange.error is None for exchange in exchanges)


def test_the_operators_resource_wins(repository, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=ranker,deployment.environment=test")
    exporter = InMemorySpanExporter()
    front = FrontEnd(repository, tracing=Tracing(3, exporter))
    traced = Traced(front, exporter)
    traced.ask()
    [request, *_] = traced.spans()
    front.close()

    found = request.resource.attributes
    assert (found["service.name"], found["deployment.environment"], found["hotrow.worker"]) == ("ranker", "test", 3)


def test_a_sampler_of_the_environment_leaves_traces_out(repository, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = InMemorySpanExporter()
    front = FrontEnd(repository, tracing=Tracing(exporter=exporter))
    traced = Traced(front, exporter)

    assert traced.ask().status_code == 200
    assert traced.spans() == []
    front.close()


def exemplars(client):
    """The ids of traces next to the buckets of response times."""
    page = client.ask("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    samples = [sample for family in text_string_to_metric_families(page.text) for sample in family.samples]
    return {sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar}


def test_the_response_times_have_the_ids_of_traces(traced):
    assert traced.ask().status_code == 200

    [request, *_] = traced.spans()
    assert exemplars(traced.client) == {format(request.context.trace_id, "032x")}


def test_the_response_times_have_the_ids_of_the_callers_traces_without_spans_too(repository):
    client = Client(create_app(FrontEnd(repository)))
    for flags, trace in (("01", TRACE), ("00", TRACE[::-1])):
        headers = {"traceparent": f"00-{trace}-{CALLER}-{flags}"}
        assert client.ask("POST", "/predict/ctr", json=BODY, headers=headers).status_code == 200

    assert exemplars(client) <= {TRACE}


def test_a_stop_does_not_wait_for_a_collector_that_does_not_answer(repository, monkeypatch):
    monkeypatch.setattr(tracing, "_LAST_SPANS_S", 0.01)
    answers, asked = threading.Event(), threading.Event()

    class Silent(SpanExporter):
        def export(self, spans):
            asked.set()
            answers.wait()
            return SpanExportResult.SUCCESS

    front = FrontEnd(repository, tracing=Tracing(exporter=Silent()))
    assert Client(create_app(front)).ask("POST", "/predict/ctr", json=BODY).status_code == 200

    front.close()
    assert asked.wait(60)
    answers.set()


def test_a_request_over_grpc_is_a_span_of_the_caller(traced):
    arrays, expected = request_of(MODEL, 2)
    tensors = inputs_of(arrays, tritonclient.grpc)
    message = service_pb2.ModelInferRequest(model_name="ctr", inputs=[tensor._get_tensor() for tensor in tensors])
    message.raw_input_contents.extend(tensor._get_content() for tensor in tensors)
    ids = [(b"traceparent", f"00-{TRACE}-{CALLER}-01".encode())]

    read = read_message(message.SerializeToString())
    answer = asyncio.run(_Inference(traced.front)._infer(read, "", ids, "a7"))

    request, *stages = traced.spans()
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_allclose(found, expected.reshape(-1), atol=2e-6)
    assert (request.name, format(request.parent.span_id, "016x")) == ("ModelInfer", CALLER)
    assert request.attributes["hotrow.request_id"] == "a7"
    assert [span.name for span in stages][-2:] == ["network", "encode"]


def test_without_the_extra_the_server_does_not_start(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    assert main(["serve", str(tmp_path), "--http-port", "0", "--traces"]) == 2
    assert re.search(r"--traces needs .*hotrow\[otel\]", capfd.readouterr().err)
