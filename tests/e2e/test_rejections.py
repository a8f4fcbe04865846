"""A wrong request gets a 4xx that names the tensor or the path, and does not affect other clients."""

import gzip
import json
import socket
import struct

import httpx
import numpy as np
import pytest

from tests.tools.tiny_model import flatten

INFER = "/v2/models/tiny/infer"


@pytest.fixture(autouse=True)
def _still_right_afterwards(served, model):
    """After every refusal the server answers correctly and has logged nothing: a client could fill the disk."""
    yield
    dense, bags = model.sample_requests(2, seed=1)
    samples = [{"dense": row.tolist(), "keys": slots} for row, slots in zip(dense, bags, strict=True)]
    code, _, body = served.ask("/predict/tiny", {"samples": samples})
    assert code == 200
    np.testing.assert_allclose(json.loads(body)["predictions"], model.probabilities(dense, bags), atol=2e-6)
    log = served.log.read_text()
    assert not any(what in log for what in ("WARNING", "ERROR", "Traceback"))


def request(**changes):
    """A valid request of two samples as JSON, with some inputs replaced: ``CATCOLUMN={"data": [...]}``."""
    inputs = {
        "DES": {"datatype": "FP32", "shape": [1, 6], "data": [0.5] * 6},
        "CATCOLUMN": {"datatype": "INT64", "shape": [4], "data": [1, 2, 3, 4]},
        "ROWINDEX": {"datatype": "INT32", "shape": [7], "data": [0, 1, 1, 2, 3, 3, 4]},
    }
    for name, change in changes.items():
        inputs[name] = inputs[name] | change
        inputs[name].setdefault("shape", [len(inputs[name]["data"])])
        if "data" in change and "shape" not in change:
            inputs[name]["shape"] = [len(change["data"])]
    return {"inputs": [{"name": name, **tensor} for name, tensor in inputs.items()]}


def refused(served, body, path=INFER, headers=None):
    """The code and message of a refusal."""
    code, _, answer = served.ask(path, body, headers)
    document = json.loads(answer)
    assert list(document) == ["error"]
    return code, document["error"]


def test_the_request_that_later_tests_break_is_valid(served):
    assert served.ask(INFER, request())[0] == 200


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"DES": {"datatype": "FP64"}}, "DES (inputs[0].datatype): expected FP32", id="wrong dtype"),
        pytest.param(
            {"DES": {"data": [0.5] * 5, "shape": [1, 6]}},
            "DES (inputs[0].data): shape [1, 6]",
            id="wrong length",
        ),
        pytest.param(
            {"DES": {"data": [0.5] * 9}},
            "DES (inputs[0].data): expected 2 samples of 3 features",
            id="more dense features",
        ),
        pytest.param({"DES": {"data": [0.5] * 6, "shape": [3, 2]}}, "DES", id="dense features of another width"),
        pytest.param({"DES": {"data": [0.5] * 5 + [1e39]}}, "DES (inputs[0].data[5]): 1e+39", id="beyond float32"),
        pytest.param(
            {"ROWINDEX": {"data": [0, 1, 1, 3, 2, 3, 4]}},
            "ROWINDEX (inputs[2].data): falls from 3 to 2",
            id="falling offsets",
        ),
        pytest.param(
            {"ROWINDEX": {"data": [0, 1, 1, 2, 3, 3, 3]}},
            "ROWINDEX (inputs[2].data): the offsets end at 3",
            id="offsets end early",
        ),
        pytest.param(
            {"ROWINDEX": {"data": [0, 1, 1, 2, 3, 3, 5]}},
            "ROWINDEX (inputs[2].data): the offsets end at 5",
            id="offsets end late",
        ),
        pytest.param(
            {"ROWINDEX": {"data": [1, 1, 1, 2, 3, 3, 4]}},
            "ROWINDEX (inputs[2].data): expected 0",
            id="offsets start at 1",
        ),
        pytest.param(
            {"ROWINDEX": {"data": [0, 1, 1, 2, 3, 4]}},
            "ROWINDEX (inputs[2].data): expected",
            id="half a sample",
        ),
        pytest.param(
            {"ROWINDEX": {"data": [0] * 196}},
            "ROWINDEX (inputs[2].data): 65 samples, but the model takes at most 64",
            id="many",
        ),
        pytest.param({"ROWINDEX": {"data": [0]}}, "ROWINDEX", id="no sample"),
        pytest.param(
            {"CATCOLUMN": {"data": [1, 2, 3, 2**63 - 1]}},
            "CATCOLUMN (inputs[1].data): 9223372036854775807",
            id="largest key",
        ),
        pytest.param(
            {"CATCOLUMN": {"data": [1, 2, 3, -(2**63)]}},
            "CATCOLUMN (inputs[1].data): -9223372036854775808",
            id="smallest key",
        ),
        pytest.param({"CATCOLUMN": {"data": [1, 2, 3, 2**64]}}, "inputs[1].data[3]", id="no int64"),
        pytest.param({"CATCOLUMN": {"data": [1, 2, 3]}}, "CATCOLUMN has 3 keys", id="one key too few"),
    ],
)
def test_a_wrong_tensor_is_refused(served, changes, expected):
    code, error = refused(served, request(**changes))

    assert code == 400
    assert expected in error


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_dense_features_in_binary_form_are_refused(served, value):
    dense = np.array([0, 0, 0, 0, value, 0], np.float32)
    body = request()
    body["inputs"][0] = {
        "name": "DES",
        "datatype": "FP32",
        "shape": [1, 6],
        "parameters": {"binary_data_size": 24},
    }
    head = json.dumps(body).encode()

    code, error = refused(served, head + dense.tobytes(), headers={"Inference-Header-Content-Length": str(len(head))})

    assert (code, error) == (400, f"DES (inputs[0]): sample 1, feature 1 is {np.float32(value)} in float32")


def test_a_key_beyond_uint32_is_refused_by_a_uint32_model(served):
    keys, row_ptrs = flatten([[[2**32], []]])
    body = {
        "inputs": [
            {"name": "CATCOLUMN", "datatype": "INT64", "shape": [1], "data": keys.tolist()},
            {"name": "ROWINDEX", "datatype": "INT32", "shape": [3], "data": row_ptrs.tolist()},
        ]
    }

    code, error = refused(served, body, "/v2/models/small/infer")

    assert code == 400
    assert "CATCOLUMN (inputs[0].data): 4294967296 at position 0" in error


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("/v2/models/nope/infer", 404, "no model 'nope' is served; there is 'small', 'tiny'"),
        ("/v2/models/tiny/versions/1/infer", 404, "no version '1' of model 'tiny' is served; there is version 2"),
        ("/v2/models/tiny/versions/x/infer", 404, "no version 'x'"),
        ("/predict/nope", 404, "no model 'nope' is served"),
        ("/v2/models/nope%2Fx/infer", 404, ""),
        ("/nowhere", 404, "/nowhere: no such path"),
        ("/v2/models//infer", 404, "/v2/models//infer: no such path"),
        ("/a%0Ab?c", 404, "/a%0Ab: no such path"),
        ("/metrics", 405, "/metrics: expected GET, got POST"),
        ("/v2/health/live", 405, "/v2/health/live: expected GET or HEAD, got POST"),
    ],
)
def test_a_path_to_nothing_is_refused(served, path, code, expected):
    answered, error = refused(served, request(), path)

    assert answered == code
    assert expected in error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", INFER, ["POST"]),
        ("PUT", "/v2/models/tiny/versions/2/infer", ["POST"]),
        ("GET", "/predict/tiny", ["POST"]),
        ("DELETE", "/v2/logging", ["GET", "POST"]),
        ("PUT", "/v2/models/tiny/ready", ["GET", "HEAD"]),
        ("POST", "/static-offline-docs/none.js", ["GET", "HEAD"]),
    ],
)
def test_a_wrong_method_is_refused_with_the_allowed_methods(served, method, path, allowed):
    answer = httpx.request(method, f"http://127.0.0.1:{served.port}{path}")

    assert (answer.status_code, answer.headers["Allow"]) == (405, ", ".join(allowed))
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json() == {"error": f"{path}: expected {' or '.join(allowed)}, got {method}"}


def test_a_file_of_the_documentation_that_is_not_there_is_refused(served):
    code, _, body = served.ask("/static-offline-docs/none.js")

    assert code == 404
    assert json.loads(body) == {"error": "/static-offline-docs/none.js: no such path"}


@pytest.mark.parametrize("path", ["/v2/models/nope", "/v2/models/nope/ready", "/v2/models/nope/config"])
def test_metadata_of_an_unknown_model_is_refused(served, path):
    code, _, body = served.ask(path)

    assert code == 404
    assert "'nope'" in json.loads(body)["error"]


LOAD = "/v2/repository/models/tiny/load"


@pytest.mark.parametrize("path", [INFER, "/predict/tiny", LOAD])
class TestBodies:
    def test_bad_json(self, served, path):
        assert refused(served, b'{"inputs": [', path)[0] == 400

    def test_no_body(self, served, path):
        assert refused(served, b"", path)[0] == 400

    def test_an_oversized_body_is_refused(self, served, path):
        code, error = refused(served, b" " * 200_001, path)

        assert code == 413
        assert "the server accepts 200,000" in error

    def test_an_oversized_body_is_refused_before_the_client_sends_it(self, served, path):
        with served.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n".encode())
            answer = connection.recv(65536)

        assert answer.startswith(b"HTTP/1.1 413 ")

    def test_an_oversized_chunked_body_is_refused_while_it_arrives(self, served, path):
        chunk = b"%x\r\n%s\r\n" % (50_000, b" " * 50_000)
        with served.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            connection.sendall(chunk * 5)  # without the end of the body
            answer = connection.recv(65536)

        assert answer.startswith(b"HTTP/1.1 413 ")

    def test_a_small_body_that_unpacks_to_an_oversized_body_is_refused(self, served, path):
        code, error = refused(served, gzip.compress(b" " * 200_001), path, {"Content-Encoding": "gzip"})

        assert code == 413
        assert "once decompressed" in error

    def test_an_unknown_encoding_is_refused(self, served, path):
        assert refused(served, b"x", path, {"Content-Encoding": "br"})[0] == 415

    def test_a_body_that_does_not_match_its_encoding_is_refused(self, served, path):
        assert refused(served, b"x", path, {"Content-Encoding": "gzip"})[0] == 400

    @pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
    def test_a_truncated_body_is_refused(self, served, path, chunked):
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 100"
        body = b'40\r\n{"inputs"' if chunked else b'{"inputs"'
        with served.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + body)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"the body was cut short after 9" in answer
        assert 'hotrow_requests_total{code="499",model="tiny"}' in served.ask("/metrics")[2].decode()

    def test_a_client_that_disconnects_in_the_middle_of_a_body_does_no_harm(self, served, path):
        with served.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc".encode())
            # No linger: close sends a reset, not an orderly end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def test_a_body_longer_than_its_content_length_is_refused(self, served, path):
        with served.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}} trailing".encode())
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))

        assert answer.startswith(b"HTTP/1.1 400 ")

    @pytest.mark.parametrize("length", ["-1", "ten", "1" * 40])
    def test_an_invalid_content_length_is_refused(self, served, path, length):
        with served.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
            answer = connection.recv(65536)

        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))


@pytest.mark.parametrize("length", ["-5", "100000", "ten", "3"])
def test_a_wrong_inference_header_length_is_refused(served, length):
    assert refused(served, request(), headers={"Inference-Header-Content-Length": length})[0] == 400


def test_a_client_that_closes_its_side_after_a_whole_request_gets_an_answer(served):
    body = json.dumps(request()).encode()
    with served.connect() as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), len(body)) + body
        )
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"OUTPUT0"' in answer


def test_requests_sent_without_waiting_for_answers_are_answered_in_order(served):
    bodies = [json.dumps(request() | {"id": str(number)}).encode() for number in range(5)]
    with served.connect() as connection:
        for body in bodies:
            connection.sendall(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), len(body)) + body
            )
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.count(b"HTTP/1.1 200 ") == 5
    assert [answer.find(b'"id":"%d"' % number) for number in range(5)] == sorted(
        answer.find(b'"id":"%d"' % number) for number in range(5)
    )
    assert b'"id":"4"' in answer


def test_bytes_that_are_not_http_are_refused(served):
    with served.connect() as connection:
        connection.sendall(b"\x16\x03\x01 what a TLS client would say\r\n\r\n")
        answer = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("head", "most"),
    [
        pytest.param(b"GET /v2 HTTP/1.1\r\nHost: " + b"x" * 1_000_000, b"65,536 bytes", id="a header"),
        pytest.param(b"GET /" + b"x" * 1_000_000, b"65,536 bytes", id="a URL"),
        pytest.param(b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 50_000, b"100 headers", id="many headers"),
    ],
)
def test_a_head_without_an_end_is_refused(served, head, most):
    with served.connect() as connection:
        connection.sendall(head)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert most in answer


def test_a_websocket_is_not_opened(served):
    with served.connect() as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        answer = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 200 ")


def test_clients_that_reset_the_connection_with_open_requests_do_no_harm(served):
    for _ in range(20):
        with served.connect() as connection:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            # No linger: close sends a reset, not an orderly end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
