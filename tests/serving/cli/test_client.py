"""`hotrow predict` and `hotrow stats` say the same about a server that does not answer them."""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from serving.cli.main import main
from tests.serving.cli.status_server import status, status_server

GRPC_SETTINGS = b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00d"
ELSEWHERE = "a server with TLS needs https://, and gRPC has another port"


@contextmanager
def answering(data):
    """A server that answers one connection with these bytes, and closes it; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(data)
                with suppress(OSError):  # the client may be gone
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # unread bytes would reset the connection, and take the answer along
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


@pytest.fixture
def commands(tmp_path):
    """Both commands for the server at a URL, without options."""
    (tmp_path / "samples.json").write_text('{"samples": []}')
    return {
        "predict": lambda url: ["predict", "m", str(tmp_path / "samples.json"), "--url", url],
        "stats": lambda url: ["stats", url],
    }


@pytest.mark.parametrize("name", ["predict", "stats"])
@pytest.mark.parametrize(
    ("data", "scheme", "expected"),
    [
        pytest.param(GRPC_SETTINGS, "http", f"the answer is not HTTP/1.1; {ELSEWHERE}", id="gRPC"),
        pytest.param(b"", "http", f"the server closes the connection without an answer; {ELSEWHERE}", id="closed"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "http", "the answer ends too early", id="half"),
        pytest.param(
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "https",
            "no TLS connection: wrong version number; a server without TLS needs http://",
            id="no TLS",
        ),
        pytest.param(
            b"",
            "https",
            "the server closes the connection without an answer; a server with --ssl-ca-certs needs --certfile, "
            "and gRPC has another port",
            id="closed TLS",
        ),
    ],
)
def test_an_answer_that_is_no_answer_is_explained(commands, capsys, name, data, scheme, expected):
    with answering(data) as port:
        url = f"{scheme}://127.0.0.1:{port}"
        assert main(commands[name](url)) == 1

    assert capsys.readouterr().err == f"hotrow {name}: {url}: {expected}\n"


@pytest.mark.parametrize(("name", "scope"), [("predict", "infer"), ("stats", "metrics")])
@pytest.mark.parametrize(
    ("code", "advice"), [(401, "; set HOTROW_TOKEN to a token with the scope {scope}"), (403, "")], ids=["401", "403"]
)
def test_a_refused_token_is_explained(commands, capsys, name, scope, code, advice):
    body = b'{"error": "the token is refused"}'
    with answering(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%s" % (code, len(body), body)) as port:
        url = f"http://127.0.0.1:{port}"
        assert main(commands[name](url)) == 1

    expected = f"the token is refused{advice.format(scope=scope)}"
    assert capsys.readouterr().err == f"hotrow {name}: {url}: {expected}\n"


@pytest.mark.parametrize("name", ["predict", "stats"])
def test_a_port_without_a_server_is_explained(commands, capsys, name):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    assert main(commands[name](url)) == 1

    expected = "no server answers: Connection refused; `hotrow serve` starts a server"
    assert capsys.readouterr().err == f"hotrow {name}: {url}: {expected}\n"


@pytest.mark.parametrize("name", ["predict", "stats"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "none.sock",
            "no server answers: No such file or directory; `hotrow serve --uds {path}` starts a server",
        ),
        ("dead.sock", "no server answers: Connection refused; `hotrow serve --uds {path}` starts a server"),
        ("samples.json", "expected a Unix socket"),
        ("a" * 200, "no server answers: AF_UNIX path too long"),
    ],
    ids=["absent", "dead", "a file", "too long"],
)
def test_a_unix_socket_is_named_instead_of_the_url(commands, capsys, tmp_path, monkeypatch, name, path, expected):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("dead.sock")

    assert main([*commands[name]("http://localhost"), "--uds", path]) == 1

    assert capsys.readouterr().err == f"hotrow {name}: {path}: {expected.format(path=path)}\n"


def test_a_server_that_is_late_is_named_with_the_time(commands, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main([*commands["predict"](url), "--timeout", "0.01"]) == 1

    assert capsys.readouterr().err == f"hotrow predict: {url}: no answer within 0.01 s\n"


def test_another_path_is_not_the_servers(commands, capsys):
    with status_server(status()) as server:
        assert main(commands["predict"](server.url)) == 1

    assert capsys.readouterr().err.startswith(f"hotrow predict: {server.url}: 501 ")
