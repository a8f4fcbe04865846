"""Parts of the server that can be tested without a running server."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop

from serving.errors import ConfigError
from serving.frontend.http.edge import Edge
from serving.frontend.http.listening import listen, listening_on_path, url_of
from serving.frontend.http.server import Server, Stop
from serving.frontend.limits import Limits
from serving.metrics import RequestMetrics


def test_a_free_port_is_taken_and_reported():
    with listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            pass
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [("h" * 64, 0, "no such address"), ("192.0.2.1", 0, "cannot listen")],
)
def test_an_address_that_cannot_be_listened_on_is_refused(host, port, expected):
    with pytest.raises(ConfigError, match=f"{host}:{port}: {expected}"):
        listen(host, port)


def test_the_end_of_a_server_leaves_the_socket_of_its_successor(tmp_path):
    path = tmp_path / "hotrow.sock"
    with ExitStack() as successor:
        with listening_on_path(path) as listener:
            listener.close()  # it answers its last requests
            successor.enter_context(listening_on_path(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def stop_while_in_hand(app, request):
    """Serve ``app``, send ``request``, stop the server once the app has it; return what the client received."""

    async def run():
        in_hand = asyncio.Event()

        async def watched(scope, receive, send):
            if scope["type"] == "http":
                in_hand.set()
            await app(scope, receive, send)

        with listen("127.0.0.1", 0) as listener:
            limits = Limits(body_timeout_s=1)  # afterwards an answered connection is closed
            server = Server(Edge(watched, RequestMetrics()), ready=lambda: None, stop=Stop(1), limits=limits)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(request)
            await in_hand.wait()
            server.should_exit = True
            async with asyncio.timeout(60):
                await serving
            answer = await reader.read()
            writer.close()
            return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def lifespan_only(scope, receive, send):
    """Start and stop as an application does."""
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


def test_a_client_that_never_sends_its_body_does_not_keep_the_server_from_stopping(caplog):
    async def wait_for_the_body(scope, receive, send):
        if scope["type"] == "lifespan":
            await lifespan_only(scope, receive, send)
        while scope["type"] == "http":
            await receive()

    answer = stop_while_in_hand(wait_for_the_body, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b'{"error":"the server stops"}')
    assert "Traceback" not in caplog.text


def test_a_client_that_never_takes_its_answer_does_not_keep_the_server_from_stopping(caplog):
    async def send_without_end(scope, receive, send):
        if scope["type"] == "lifespan":
            await lifespan_only(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)

    stop_while_in_hand(send_without_end, b"GET / HTTP/1.1\r\n\r\n")

    assert "Traceback" not in caplog.text
