"""Tokens, control and browsers at real servers: HTTP and gRPC, one and two workers, TCP and Unix sockets."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import socket
import time

import grpc
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import serving
from tests.e2e.kserve_requests import inputs_of, request_of

SECRETS = {"infer": "secret-of-ranker", "control": "secret-of-operator", "metrics": "secret-of-grafana"}
SAMPLES = json.dumps({"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]})
REQUESTS = {  # one of each scope, that succeeds with it
    "infer": ("POST", "/predict/tiny", SAMPLES),
    "control": ("POST", "/v2/logging", "{}"),
    "metrics": ("GET", "/metrics", None),
}
CONTROLS = [
    ("POST", "/v2/repository/models/tiny/load"),
    ("POST", "/v2/repository/models/tiny/unload"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/models/tiny/trace/setting"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/a/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("POST", "/v2/cudasharedmemory/unregister"),
]
GUARDED = [
    *CONTROLS,
    ("GET", "/v2"),
    ("GET", "/v2/models/tiny"),
    ("GET", "/v2/models/tiny/ready"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/models/tiny/infer"),
    ("GET", "/v2/models/tiny/infer"),
    ("POST", "/predict/tiny"),
    ("POST", "/v2/repository/index"),
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]
DEADLINE_S = 120


def write_tokens(file, **tokens):
    """Replace a file of tokens: name=scope, whose token is SECRETS[scope]."""
    document = {
        name: {"sha256": hashlib.sha256(SECRETS[scope].encode()).hexdigest(), "scopes": [scope]}
        for name, scope in tokens.items()
    }
    new = file.with_suffix(".new")
    new.write_text(json.dumps(document))
    new.replace(file)


def bearer(scope):
    return [("Authorization", f"Bearer {SECRETS[scope]}")]


class Guarded:
    """A server with a file of tokens."""

    def __init__(self, served, file, uds):
        self.log, self.file = served.log, file
        self.grpc_address = re.search(r"listening for gRPC on (\S+)", served.printed)[1]
        self.host, self.port, self.uds = served.host or "localhost", served.port, uds

    def ask(self, method, path, body=None, headers=None):
        """One request on a new connection, which any worker may accept: the answer, with its ``body``."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        if self.uds is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(self.uds))
        connection.putrequest(method, path)
        for name, value in [("Content-Length", len(body or "")), *(headers or [])]:
            connection.putheader(name, value)
        connection.endheaders((body or "").encode())
        with contextlib.closing(connection):
            answer = connection.getresponse()
            answer.body = answer.read()
            return answer


@pytest.fixture(scope="module", params=["two workers", "a Unix socket"])
def guarded(request, repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "tokens.json"
    write_tokens(file, ranker="infer", operator="control", grafana="metrics")
    uds = folder / "hotrow.sock" if request.param == "a Unix socket" else None
    options = ["--workers", "2"] if uds is None else ["--uds", str(uds)]
    with serving(repository, folder / "stderr", "--tokens", str(file), "--grpc-port", "0", *options) as served:
        yield Guarded(served, file, uds)


@pytest.fixture(scope="module")
def beyond(repository, tmp_path_factory):
    """A server without tokens that listens on every address."""
    log = tmp_path_factory.mktemp("beyond") / "stderr"
    with serving(repository, log, "--host", "0.0.0.0", "--grpc-port", "0") as served:
        served.host = "127.0.0.1"  # as a proxy on the same machine would ask
        yield served


@pytest.fixture
def stub(guarded):
    with grpc.insecure_channel(guarded.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def grpc_code(call, *arguments, **options):
    """The code of a call that fails."""
    try:
        list(call(*arguments, **options))  # calls that answer with a stream fail in list()
    except grpc.RpcError as failed:
        return failed.code().name
    raise AssertionError("the call succeeded")


class TestTokens:
    def test_only_live_ready_and_the_empty_page_need_no_token(self, guarded, stub):
        for path in ("/v2/health/live", "/v2/health/ready", "/"):
            assert guarded.ask("GET", path).status == 200
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready

    def test_every_other_route_answers_401_without_a_known_token(self, guarded):
        for method, path in GUARDED:
            for headers in ([], [("Authorization", "Bearer unknown")], [("Authorization", "Basic c2VjcmV0")]):
                answer = guarded.ask(method, path, headers=headers)

                assert (path, answer.status) == (path, 401)
                assert answer.getheader("WWW-Authenticate") == "Bearer"
                assert "token" in json.loads(answer.body)["error"]

    @pytest.mark.parametrize("needed", REQUESTS)
    def test_a_token_allows_its_scope_only(self, guarded, needed):
        codes = {scope: guarded.ask(*REQUESTS[needed], bearer(scope)).status for scope in SECRETS}

        assert codes == {scope: 200 if scope == needed else 403 for scope in SECRETS}

    def test_every_token_may_read_metadata(self, guarded, stub):
        for scope in SECRETS:
            assert b'"name":"tiny"' in guarded.ask("GET", "/v2/models/tiny", headers=bearer(scope)).body
            metadata = [("authorization", f"Bearer {SECRETS[scope]}")]
            assert stub.ModelReady(service_pb2.ModelReadyRequest(name="tiny"), metadata=metadata).ready

    def test_a_repeated_header_is_refused(self, guarded):
        headers = [*bearer("infer"), *bearer("control")]

        answer = guarded.ask("POST", "/v2/logging", "{}", headers)

        assert answer.status == 400
        assert json.loads(answer.body)["error"] == "header authorization: expected one value, got two different values"

    def test_grpc_calls_need_the_same_tokens(self, guarded, stub, model):
        calls = {
            "infer": (stub.ModelInfer, service_pb2.ModelInferRequest(model_name="none")),
            "control": (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest(model_name="none")),
            "metrics": (stub.ModelStatistics, service_pb2.ModelStatisticsRequest(name="none")),
        }
        for needed, (call, request) in calls.items():
            for metadata in ([], [("authorization", "Bearer unknown")]):
                assert grpc_code(call, request, metadata=metadata) == "UNAUTHENTICATED"
            for scope, secret in SECRETS.items():
                code = grpc_code(call, request, metadata=[("authorization", f"Bearer {secret}")])
                assert code == "PERMISSION_DENIED" if scope != needed else code != "PERMISSION_DENIED"
        assert grpc_code(stub.ModelStreamInfer, iter([])) == "UNAUTHENTICATED"
        assert grpc_code(stub.ServerMetadata, service_pb2.ServerMetadataRequest()) == "UNAUTHENTICATED"

    def test_health_of_a_model_and_reflection_need_a_token_and_health_of_the_server_does_not(self, guarded):
        with grpc.insecure_channel(guarded.grpc_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
            assert grpc_code(health.Check, health_pb2.HealthCheckRequest(service="tiny")) == "UNAUTHENTICATED"
            assert grpc_code(health.Watch, health_pb2.HealthCheckRequest()) == "UNAUTHENTICATED"
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            assert grpc_code(reflection.ServerReflectionInfo, iter([listing])) == "UNAUTHENTICATED"

    def test_nvidias_client_sends_the_token_as_a_header(self, guarded, model):
        arrays, _ = request_of(model, 2)
        with triton.InferenceServerClient(guarded.grpc_address) as client:
            headers = {"authorization": bearer("infer")[0][1]}
            assert client.infer("tiny", inputs_of(arrays, triton), headers=headers)
            with pytest.raises(InferenceServerException, match="a token is needed"):
                client.infer("tiny", inputs_of(arrays, triton))

    def test_every_worker_uses_a_changed_file_and_ignores_a_broken_file(self, guarded):
        def codes():
            return {guarded.ask(*REQUESTS["infer"], bearer("infer")).status for _ in range(8)}

        def wait_for(expected):
            end = time.monotonic() + DEADLINE_S
            while codes() != {expected}:
                assert time.monotonic() < end
                time.sleep(0.1)

        write_tokens(guarded.file, operator="control")
        wait_for(401)
        guarded.file.write_text("{")
        workers = 2 if guarded.uds is None else 1
        end = time.monotonic() + DEADLINE_S
        while guarded.log.read_text().count("the server continues with the previous contents") < workers:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert guarded.ask(*REQUESTS["control"], bearer("control")).status == 200
        write_tokens(guarded.file, ranker="infer", operator="control", grafana="metrics")
        wait_for(200)
        assert guarded.log.read_text().count("the server continues with the previous contents") == workers

    def test_a_stream_ends_when_its_token_is_revoked(self, guarded, stub):
        def requests():
            yield service_pb2.ModelInferRequest(model_name="none")
            write_tokens(guarded.file, operator="control")
            end = time.monotonic() + DEADLINE_S
            while time.monotonic() < end:
                time.sleep(0.2)
                yield service_pb2.ModelInferRequest(model_name="none")

        metadata = [("authorization", f"Bearer {SECRETS['infer']}")]
        assert grpc_code(stub.ModelStreamInfer, requests(), metadata=metadata) == "UNAUTHENTICATED"
        write_tokens(guarded.file, ranker="infer", operator="control", grafana="metrics")

    def test_the_origin_is_checked_with_tokens_too(self, guarded):
        headers = [*bearer("infer"), ("Origin", "https://evil.example")]

        assert guarded.ask(*REQUESTS["infer"], headers).status == 403

    def test_no_token_is_in_the_log(self, guarded):
        assert not any(secret in guarded.log.read_text() for secret in SECRETS.values())


class TestControlWithoutTokens:
    def test_control_is_closed_beyond_loopback_even_for_local_clients(self, beyond):
        for method, path in CONTROLS:
            code, _, body = beyond.ask(path, b"{}" if method == "POST" else None, method=method)

            assert (path, code) == (path, 403)
            assert "the server listens on 0.0.0.0: start it with --tokens FILE" in json.loads(body)["error"]

    def test_everything_else_stays_open(self, beyond):
        for path in ("/", "/v2", "/v2/models/tiny", "/v2/models/stats", "/metrics", "/status", "/docs"):
            assert beyond.ask(path)[0] == 200
        assert beyond.ask("/predict/tiny", SAMPLES.encode())[0] == 200
        assert beyond.ask("/v2/repository/index", b"")[0] == 200

    def test_the_origin_is_checked_beyond_loopback_too(self, beyond):
        headers = {"Origin": "https://evil.example", "Host": "api.example"}

        assert beyond.ask("/predict/tiny", SAMPLES.encode(), headers)[0] == 403
        assert beyond.ask("/predict/tiny", SAMPLES.encode(), headers | {"Origin": "https://api.example"})[0] == 200

    def test_control_is_closed_over_grpc_too(self, beyond):
        address = re.search(r"listening for gRPC on \S+:(\d+)", beyond.printed)
        with triton.InferenceServerClient(f"127.0.0.1:{address[1]}") as client:
            for refused in (
                lambda: client.load_model("tiny"),
                lambda: client.unload_model("tiny"),
                lambda: client.get_log_settings(),
                lambda: client.update_trace_settings("", {}),
                lambda: client.register_system_shared_memory("a", "/a", 8),
                lambda: client.get_cuda_shared_memory_status(),
            ):
                with pytest.raises(InferenceServerException, match=r"StatusCode.PERMISSION_DENIED.*--tokens FILE"):
                    refused()
            assert client.is_server_live()
            assert client.get_model_metadata("tiny").name == "tiny"

    def test_control_is_open_on_loopback(self, served):
        assert served.ask("/v2/logging")[0] == 200

    def test_errors_cannot_be_switched_off_in_the_log(self, served):
        code, _, body = served.ask("/v2/logging", {"log_error": False, "log_info": False})

        assert (code, json.loads(body)["error"]) == (400, "log_error: expected true: errors are always logged")


class TestBrowsers:
    def test_a_page_of_another_site_cannot_send_requests_or_read_answers(self, served):
        evil = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        for path in ("/predict/tiny", "/v2/models/tiny/infer", "/v2/repository/index", "/v2/logging"):
            assert served.ask(path, b"{}", evil)[0] == 403
            assert served.ask(path, b"{}", {"Origin": "null"})[0] == 403
        for path in ("/", "/v2", "/status", "/v2/health/live"):
            assert served.ask(path, headers={"Host": "evil.example"})[0] == 403

    def test_the_host_of_an_absolute_target_counts(self, served):
        with served.connect() as connection:
            connection.sendall(b"GET http://evil.example/v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))

        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"got 'evil.example'" in answer

    def test_a_page_of_the_server_can_predict(self, served):
        assert served.ask("/predict/tiny", SAMPLES.encode(), {"Origin": served.url})[0] == 200

    def test_pages_have_security_headers(self, served):
        for path in ("/", "/docs"):
            headers = served.ask(path)[1]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Referrer-Policy"] == "no-referrer"

    def test_the_status_page_may_run_its_own_script_and_style_only_and_no_page_may_frame_it(self, served):
        _, headers, page = served.ask("/")
        policy = dict(one.strip().split(" ", 1) for one in headers["Content-Security-Policy"].split(";"))

        for tag in ("script", "style"):
            [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page.decode(), re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
        assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
        assert policy["frame-ancestors"] == "'none'"
        assert b"style=" not in page

    def test_a_request_in_absolute_form_means_its_path(self, served):
        connection = http.client.HTTPConnection(served.host, served.port)
        connection.putrequest("GET", "http://evil.example/v2", skip_host=True)
        connection.putheader("Host", "evil.example")
        connection.endheaders()
        assert connection.getresponse().status == 403
        connection.close()
        with socket.create_connection((served.host, served.port)) as plain:
            plain.sendall(b"GET http://localhost/v2/other HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert plain.recv(1000).startswith(b"HTTP/1.1 404 ")
