"""What a server answers before it has loaded its models. `tests/e2e/test_process.py` asks a real one."""

import socket
from contextlib import closing, contextmanager

import pytest

from serving.frontend.http import early
from serving.frontend.http.early import EarlyAnswers
from serving.frontend.http.listening import listen


@contextmanager
def answering(tls=None):
    """Answer early on a free port; yields a function that sends bytes and returns what comes."""
    with listen("127.0.0.1", 0) as listener, closing(EarlyAnswers(listener, tls)):

        def ask(*parts):
            with socket.create_connection(listener.getsockname(), timeout=30) as client:
                for part in parts:
                    client.sendall(part)
                return b"".join(iter(lambda: client.recv(1 << 16), b""))

        yield ask


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /v2/health/live", b"200 OK"),
        (b"HEAD /v2/health/live", b"200 OK"),
        (b"GET /v2/health/live?now", b"200 OK"),
        (b"POST /v2/health/live", b"503 Service Unavailable"),
        (b"GET /v2/health/ready", b"503 Service Unavailable"),
        (b"GET /v2/health/live/x", b"503 Service Unavailable"),
        (b"POST /predict/ctr", b"503 Service Unavailable"),
    ],
)
def test_a_server_that_loads_its_models_is_live_and_nothing_else(request_line, status):
    with answering() as ask:
        answer = ask(request_line + b" HTTP/1.1\r\nHost: x\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
    assert b"connection: close\r\n" in answer
    assert (b"retry-after: 1\r\n" in answer) == (b"the models are being loaded" in answer) == status.startswith(b"503")


def test_a_head_may_come_in_parts_and_a_body_may_follow():
    with answering() as ask:
        answer = ask(b"GET /v2/health", b"/live HTTP/1.1\r\n", b"\r\n" + b"x" * 10_000)

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("sent", [b"\r\n\r\n", b"x" * 20_000])
def test_what_is_no_request_does_not_end_the_answers(sent):
    with answering() as ask:
        assert ask(sent).startswith(b"HTTP/1.1 503 ")
        assert ask(b"GET /v2/health/live HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")


def test_clients_that_send_nothing_do_not_keep_others_from_an_answer(monkeypatch):
    monkeypatch.setattr(early, "_TIMEOUT_S", 60)
    with listen("127.0.0.1", 0) as listener, closing(EarlyAnswers(listener, None)):
        silent = [socket.create_connection(listener.getsockname()) for _ in range(20)]
        with socket.create_connection(listener.getsockname(), timeout=30) as client:
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        for one in silent:
            one.close()


def test_after_its_end_the_next_server_gets_the_connections():
    with listen("127.0.0.1", 0) as listener:
        answers = EarlyAnswers(listener, None)
        answers.close()
        answers.close()
        with socket.create_connection(listener.getsockname()) as client:
            listener.setblocking(True)
            accepted, address = listener.accept()
            accepted.close()
            assert address == client.getsockname()
