"""`hotrow ready` against servers that are ready, not ready, silent or absent; `tests/e2e` asks real ones."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from serving.cli import ready
from serving.cli.main import main


@contextmanager
def answering(*codes):
    """A server that answers each request with the next code, the last again and again; yields its port and paths."""
    left, asked = list(codes), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Host"], self.headers["Authorization"]))
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(ready, "_INTERVAL_S", 0)


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [(200, 0, ""), (503, 1, "not ready"), (404, 1, "404 Not Found")],
)
def test_the_exit_code_is_0_for_a_ready_server_only(capsys, code, expected, message):
    with answering(code) as (port, asked):
        assert main(["ready", "--http-port", str(port)]) == expected

    assert capsys.readouterr().err == (message and f"hotrow ready: http://127.0.0.1:{port}: {message}\n")
    assert asked[0][0] == "/v2/health/ready"


def test_live_asks_whether_the_server_answers_at_all():
    with answering(200) as (port, asked):
        assert main(["ready", "--live", "--http-port", str(port)]) == 0

    assert asked[0][0] == "/v2/health/live"


def test_the_variables_of_the_server_say_where_it_is_and_it_gets_no_token(monkeypatch):
    with answering(200) as (port, asked):
        monkeypatch.setenv("HOTROW_HTTP_PORT", str(port))
        monkeypatch.setenv("HOTROW_HOST", "0.0.0.0")
        monkeypatch.setenv("HOTROW_TOKEN", "secret")
        assert main(["ready"]) == 0

    assert asked == [("/v2/health/ready", f"127.0.0.1:{port}", None)]


def test_a_bad_variable_and_a_misspelt_variable_are_named(monkeypatch, capsys, caplog):
    monkeypatch.setenv("HOTROW_HTTP_PROT", "1")
    with answering(200) as (port, _):
        main(["ready", "--http-port", str(port)])
    monkeypatch.setenv("HOTROW_HTTP_PORT", "http")

    with pytest.raises(SystemExit):
        main(["ready"])

    assert "the variable HOTROW_HTTP_PROT has no effect; did you mean 'HOTROW_HTTP_PORT'?" in caplog.text
    assert "got 'http' in the variable HOTROW_HTTP_PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.7", "10.0.0.7"), ("db-1", "db-1")],
)
def test_a_server_on_every_address_is_asked_on_this_machine(host, address):
    assert ready._within_reach(host) == address


def test_it_waits_for_a_server_that_loads_models():
    with answering(503, 503, 200) as (port, asked):
        assert main(["ready", "--wait-s", "60", "--http-port", str(port)]) == 0

    assert len(asked) == 3


def test_it_does_not_wait_for_a_server_that_has_ended(monkeypatch, capsys):
    monkeypatch.setattr(ready, "_ABSENT_S", 0)
    with answering(200) as (port, _):
        pass

    assert main(["ready", "--wait-s", "60", "--http-port", str(port)]) == 1
    assert "no server answers: Connection refused; `hotrow serve` starts a server" in capsys.readouterr().err


def test_the_wait_ends(capsys):
    with answering(503) as (port, asked):
        assert main(["ready", "--wait-s", "0.05", "--http-port", str(port)]) == 1

    assert asked
    assert "not ready" in capsys.readouterr().err


@pytest.mark.parametrize("wait", ["-1", "nan", "soon"])
def test_a_wait_that_is_no_time_is_refused(capsys, wait):
    with pytest.raises(SystemExit):
        main(["ready", f"--wait-s={wait}"])

    assert "expected a number from 0 to 86,400 seconds" in capsys.readouterr().err


def test_a_key_without_a_certificate_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("HOTROW_SSL_KEYFILE", "key.pem")

    assert main(["ready"]) == 1
    assert capsys.readouterr().err == "hotrow ready: --ssl-keyfile needs --ssl-certfile\n"


def test_a_certificate_that_cannot_be_read_is_named(tmp_path, capsys):
    assert main(["ready", "--ssl-certfile", str(tmp_path / "none.pem")]) == 1

    expected = "expected a certificate and its key, in PEM form and without a password: No such file or directory"
    assert capsys.readouterr().err == f"hotrow ready: --ssl-certfile {tmp_path}/none.pem: {expected}\n"
