"""The parts of running a server that need no server."""

import asyncio
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from serving.errors import ConfigError
from serving.frontend.server import Connection, OneWrite, listen, url_of


class Recorder:
    """A transport that remembers what is done to it."""

    def __init__(self):
        self.done = []

    def write(self, data):
        self.done.append(data)

    def close(self):
        self.done.append("closed")

    def is_closing(self):
        return "closed" in self.done


def in_one_loop(act):
    """Run ``act(transport)`` and what it scheduled; what was done to the transport beneath."""

    async def run():
        recorder = Recorder()
        act(OneWrite(recorder, asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return recorder.done

    return asyncio.run(run())


def test_what_is_written_in_one_turn_is_sent_at_once():
    def act(transport):
        transport.write(b"head")
        transport.write(b"body")

    assert in_one_loop(act) == [b"headbody"]


def test_what_was_written_is_sent_before_the_transport_closes():
    def act(transport):
        transport.write(b"head")
        transport.write(b"body")
        transport.close()
        assert transport.is_closing()

    assert in_one_loop(act) == [b"headbody", "closed"]


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHos", b"GET / HTTP/1.1\r\n\r\nGET"])
def test_a_client_that_never_finishes_a_head_is_disconnected(sent):
    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def until_closed():
        config = uvicorn.Config(app, http=Connection, ws="none", log_config=None, timeout_keep_alive=0.05)
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(until_closed()).endswith(b"ok" if sent.startswith(b"GET") else b"")


def test_a_free_port_is_taken_and_told():
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
