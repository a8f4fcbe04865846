"""The application without a server: answers that clients get when something behind it fails."""

import asyncio
import gzip
import json
import logging
import math
import re
import threading
from contextlib import closing
from functools import partial

import httpx
import pytest

from kernels.errors import HotrowError, ReservedKeyError
from serving import errors
from serving.frontend.access import Access
from serving.frontend.batcher import Batcher
from serving.frontend.codes import CODES, codes_of
from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.http.app import create_app
from serving.frontend.limits import Limits
from serving.frontend.tokens import INFER as INFER_SCOPE
from serving.frontend.tokens import Tokens, add_token
from serving.model.names import MODEL_NAME
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.tools.tiny_model import TinyModel

SAMPLES = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]}
INFER = {
    "inputs": [
        {"name": "DES", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]},
        {"name": "CATCOLUMN", "datatype": "INT64", "shape": [2], "data": [1, 2]},
        {"name": "ROWINDEX", "datatype": "INT32", "shape": [4], "data": [0, 1, 2, 2]},
    ]
}
ROUTES = [("/predict/tiny", SAMPLES), ("/v2/models/tiny/infer", INFER)]


@pytest.fixture
def repository(tmp_path):
    TinyModel().write(tmp_path)
    with ModelRepository(tmp_path) as repository:
        repository.load()
        yield repository


@pytest.fixture
def ask(repository):
    """Ask the application, without a server or a socket."""
    return Client(create_app(FrontEnd(repository, Settings(limits=Limits(max_body_bytes=1000))))).ask


@pytest.fixture
def failing(repository, monkeypatch):
    """Make every prediction raise an error."""

    def fail_with(error):
        def raise_it(_self, _batch):
            raise error

        monkeypatch.setattr(type(repository.session("tiny")), "predict_batch", raise_it)

    return fail_with


def all_errors(base=HotrowError):
    return [base, *(error for child in base.__subclasses__() for error in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_that_tells_client_faults_from_server_faults(kind):
    code, _ = codes_of(kind.__new__(kind))

    assert (code < 500) == issubclass(kind, errors.RequestError | ReservedKeyError | errors.OverloadedError)


def test_no_entry_of_the_table_is_shadowed_by_a_nearer_class():
    assert all(codes_of(kind.__new__(kind)) == codes for kind, codes in CODES.items())


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_bug_is_a_500_without_a_traceback_for_the_client_and_one_in_the_log(ask, failing, caplog, path, body):
    failing(ZeroDivisionError("secret detail"))

    response = ask("POST", path, json=body)

    assert response.status_code == 500
    assert response.json() == {"error": "internal error; see the server's log"}
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_tier_that_is_down_is_a_503_with_a_retry_time(ask, failing, caplog, path, body):
    failing(errors.StoreError("rocksdb", "tiny.user", "no answer"))

    with caplog.at_level(logging.ERROR):
        response = ask("POST", path, json=body)

    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    assert response.json() == {"error": "rocksdb: table 'tiny.user': no answer"}
    assert not caplog.records


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_failures_are_counted_under_their_model(ask, failing, path, body):
    failing(ZeroDivisionError())
    ask("POST", path, json=body)

    page = ask("GET", "/metrics").text

    assert 'hotrow_requests_total{code="500",model="tiny"} 1.0' in page
    assert "hotrow_requests_in_flight 0.0" in page


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_body_beyond_the_limit_is_counted_and_refused(ask, path, body):
    response = ask("POST", path, content=json.dumps(body).ljust(1001))

    assert response.status_code == 413
    assert 'code="413",model="tiny"' in ask("GET", "/metrics").text
    [counted] = ask("GET", "/v2/models/tiny/stats").json()["model_stats"]
    assert counted["inference_stats"]["fail"]["count"] == 1


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(("encoding", "is_inline"), [("identity", True), ("gzip", False)])
def test_a_compressed_body_never_runs_on_the_event_loop(repository, ask, monkeypatch, path, body, encoding, is_inline):
    """The length of a compressed body does not tell how long the request takes."""
    monkeypatch.setattr("serving.frontend.runner.INLINE_S", math.inf)  # every request counts as short, except the first
    session, threads = repository.session("tiny"), []
    predict_batch = session.predict_batch

    def watched(_self, batch):
        threads.append(threading.get_ident())
        return predict_batch(batch)

    monkeypatch.setattr(type(session), "predict_batch", watched)
    content = json.dumps(body).encode()
    if encoding == "gzip":
        content = gzip.compress(content)
    for _ in range(3):
        ask("POST", path, content=content, headers={"Content-Encoding": encoding})

    assert (threading.get_ident() in threads) == is_inline


@pytest.fixture
def overloaded(repository, monkeypatch):
    """A front end whose threads have no time."""

    def refuse(_self):
        raise errors.OverloadedError("too many")

    monkeypatch.setattr(Batcher, "check_wait", refuse)
    with closing(FrontEnd(repository)) as front:
        yield front


def infer_scope(method="POST", path="/v2/models/tiny/infer", headers=()):
    return {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers)}


def test_an_infer_request_is_refused_at_once_and_counted(overloaded):
    start, body = create_app(overloaded).refusal(infer_scope(headers=[(b"x-request-id", b"a1")]))

    assert (start["status"], json.loads(body["body"])) == (429, {"error": "too many"})
    assert {(b"retry-after", b"1"), (b"x-request-id", b"a1")} <= set(start["headers"])
    counts = {(sample.name, *dict(sample.labels).values()): sample.value for sample in overloaded.metrics.samples()}
    assert counts["hotrow_requests", "tiny", "429"] == 1
    assert counts["hotrow_requests_in_flight",] == 0


@pytest.mark.parametrize(
    "scope",
    [
        pytest.param(infer_scope(method="GET"), id="another method"),
        pytest.param(infer_scope(path="/predict/tiny"), id="another route"),
        pytest.param(infer_scope(path="/v2/models/other/infer"), id="an unknown model"),
        pytest.param(infer_scope(headers=[(b"host", b"evil.com")]), id="a forbidden host"),
    ],
)
def test_only_infer_requests_that_could_be_answered_are_refused_at_once(overloaded, scope):
    assert create_app(overloaded, Access(None, "127.0.0.1")).refusal(scope) is None
    assert not [sample for sample in overloaded.metrics.samples() if sample.name == "hotrow_requests"]


def test_a_request_with_a_line_in_the_log_is_refused_as_it_is_answered(overloaded, repository):
    with closing(FrontEnd(repository, Settings(access_log=True))) as front:
        assert create_app(front).refusal(infer_scope()) is None


def test_a_request_beyond_max_inflight_gets_429(repository, monkeypatch):
    app = create_app(FrontEnd(repository, Settings(threads=1, limits=Limits(max_inflight=2))))
    session, release = repository.session("tiny"), threading.Event()
    predict_batch = session.predict_batch

    def held(_self, batch):
        release.wait(60)
        return predict_batch(batch)

    monkeypatch.setattr(type(session), "predict_batch", held)

    async def exchange():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            requests = [asyncio.ensure_future(client.post("/predict/tiny", json=SAMPLES)) for _ in range(3)]
            done, _ = await asyncio.wait(requests, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            release.set()
            refused = done.pop().result()
            return refused, [(await request).status_code for request in requests]

    refused, codes = asyncio.run(exchange())

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json() == {"error": "2 requests are running; the server accepts no more at a time"}
    assert sorted(codes) == [200, 200, 429]


def test_a_request_counts_for_its_token_from_its_whole_body_to_its_answer(repository, tmp_path, monkeypatch):
    session, release, begun = repository.session("tiny"), threading.Event(), threading.Semaphore(0)
    predict_batch = session.predict_batch

    def held(_self, batch):
        begun.release()
        release.wait(60)
        return predict_batch(batch)

    monkeypatch.setattr(type(session), "predict_batch", held)
    shown = []
    for name in ("one", "two"):
        add_token(tmp_path / "tokens", name, [INFER_SCOPE], shown.append)

    async def exchange(app):
        is_sending, may_send = asyncio.Event(), asyncio.Event()

        async def slow_body():
            is_sending.set()
            await may_send.wait()
            yield json.dumps(SAMPLES).encode()

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            one, two = (
                partial(client.post, "/predict/tiny", headers={"Authorization": f"Bearer {token}"}) for token in shown
            )
            uploads = [asyncio.ensure_future(one(content=slow_body())) for _ in range(3)]
            await is_sending.wait()
            running = [asyncio.ensure_future(of_token(json=SAMPLES)) for of_token in (one, two)]
            for _ in running:
                assert await asyncio.to_thread(begun.acquire, timeout=60)
            refused = await one(json=SAMPLES)
            release.set()
            answered = [(await request).status_code for request in running]
            may_send.set()
            return refused, answered, [(await upload).status_code for upload in uploads]

    settings = Settings(threads=2, limits=Limits(max_inflight_per_token=1))
    with closing(Tokens(tmp_path / "tokens")) as tokens:
        refused, answered, uploaded = asyncio.run(exchange(create_app(FrontEnd(repository, settings), Access(tokens))))

    assert refused.status_code == 429
    assert refused.json() == {"error": "1 requests of the token 'one' are running; it may have no more at a time"}
    assert answered == [200, 200]
    assert 200 in uploaded


def test_a_metrics_page_that_waits_for_a_gpu_delays_no_request(repository, monkeypatch):
    is_asked, live_is_answered = threading.Event(), threading.Event()

    def waiting_readings():
        is_asked.set()
        assert live_is_answered.wait(60)
        return []

    monkeypatch.setattr(repository, "readings", waiting_readings)
    app = create_app(FrontEnd(repository))

    async def exchange():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            page = asyncio.ensure_future(client.get("/metrics"))
            while not is_asked.is_set():
                await asyncio.sleep(0)
            code = (await client.get("/v2/health/live")).status_code
            live_is_answered.set()
            return [code, (await page).status_code]

    assert asyncio.run(exchange()) == [200, 200]


@pytest.mark.parametrize("path", ["/metrics", "/status"])
def test_requests_for_a_page_that_is_being_made_share_it(repository, monkeypatch, path):
    is_asked, all_have_come, readings = threading.Event(), threading.Event(), []

    def waiting_readings():
        is_asked.set()
        assert all_have_come.wait(60)
        readings.append(1)
        return []

    monkeypatch.setattr(repository, "readings", waiting_readings)
    app = create_app(FrontEnd(repository))

    async def exchange():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            pages = [asyncio.ensure_future(client.get(path)) for _ in range(50)]
            assert await asyncio.to_thread(is_asked.wait, 60)
            all_have_come.set()
            return [(await page).text for page in pages], (await client.get(path)).status_code

    pages, later = asyncio.run(exchange())

    assert len(set(pages)) == 1
    assert (later, len(readings)) == (200, 2)


def test_a_server_without_models_is_live_but_not_ready(tmp_path):
    client = Client(create_app(FrontEnd(ModelRepository(tmp_path))))

    assert [client.get(f"/v2/health/{what}").status_code for what in ("live", "ready")] == [200, 503]


def test_two_applications_have_separate_counters(repository, ask):
    ask("POST", "/predict/tiny", json=SAMPLES)

    assert "hotrow_requests_total{" not in Client(create_app(FrontEnd(repository))).get("/metrics").text


def test_the_openapi_document_describes_every_route_for_people(ask):
    paths = ask("GET", "/openapi.json").json()["paths"]

    assert {"/v2", "/v2/health/live", "/v2/models/{model}", "/predict/{model}", "/metrics"} <= set(paths)
    responses = paths["/predict/{model}"]["post"]["responses"]
    assert responses["200"]["content"]["application/json"]["schema"]["example"]["predictions"] == [[0.731]]


def test_the_page_of_the_routes_begins_with_predict_and_has_groups(ask):
    document = ask("GET", "/openapi.json").json()
    groups = {path: operation["tags"] for path, methods in document["paths"].items() for operation in methods.values()}

    assert next(iter(document["paths"])) == "/predict/{model}"
    assert [tag["name"] for tag in document["tags"]] == ["Predict", "Models", "Settings", "Server"]
    assert groups["/v2/models/{model}/infer"] == ["Predict"]
    assert groups["/v2/models/{model}/versions/{version}/ready"] == ["Models"]
    assert groups["/v2/repository/index"] == ["Models"]
    assert groups["/v2/systemsharedmemory/status"] == ["Settings"]
    assert groups["/v2/health/ready"] == groups["/metrics"] == groups["/status"] == ["Server"]


def test_the_openapi_document_describes_infer_with_its_errors_and_an_example_that_is_answered(ask):
    infer = ask("GET", "/openapi.json").json()["paths"]["/v2/models/{model}/infer"]["post"]

    example = infer["requestBody"]["content"]["application/json"]["schema"]["example"]
    assert {"200", "400", "404", "413", "415", "429", "503"} <= set(infer["responses"])
    assert [tensor["name"] for tensor in example["inputs"]] == ["DES", "CATCOLUMN", "ROWINDEX"]
    example["inputs"][0] |= {"shape": [1, 3], "data": [1, 2, 3]}  # the model's number of features
    assert ask("POST", "/v2/models/tiny/infer", json=example).status_code == 200


def test_the_openapi_document_has_the_parts_of_paths_and_no_other_parameters(ask):
    for path, methods in ask("GET", "/openapi.json").json()["paths"].items():
        for described in methods.values():
            parameters = {(one["in"], one["name"]) for one in described.get("parameters", ())}
            assert parameters == {("path", name) for name in re.findall(r"{(\w+)}", path)}, path


def test_no_route_has_the_path_of_a_route_of_some_model(ask):
    paths = ask("GET", "/openapi.json").json()["paths"]
    of_models = [re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)) for path in paths if "{model}" in path]

    for path in paths:
        names = [match["model"] for match in (re.fullmatch(of_model, path) for of_model in of_models) if match]
        assert not any(map(MODEL_NAME.fullmatch, names)), path


def test_the_page_of_docs_needs_nothing_from_the_internet(ask):
    page = ask("GET", "/docs").text

    assert "://" not in page
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(files) >= 2
    assert all(ask("GET", file).status_code == 200 for file in files)


def test_the_openapi_document_describes_the_tensors_of_several_tables(ask):
    description = ask("GET", "/openapi.json").json()["info"]["description"]

    assert all(f"`{name}`" in description for name in ("DES", "CATCOLUMN", "ROWINDEX"))
    assert "sample-major" in description
