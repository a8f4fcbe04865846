"""One connection that gets input no client library would send."""

import asyncio
import json
import logging
import socket
import struct
import tracemalloc

import pytest
import uvloop
from uvicorn.server import ServerState

from serving.frontend.http.connection import MAX_HEAD_BYTES, Backlog, Connection, OneWrite
from serving.frontend.http.edge import Edge
from serving.frontend.http.server import uvicorn_config
from serving.metrics import RequestMetrics


class Recorder:
    """A transport that records its calls."""

    def __init__(self):
        self.done = []

    def write(self, data):
        self.done.append(data)

    def close(self):
        self.done.append("closed")

    def is_closing(self):
        return "closed" in self.done


def in_one_loop(act):
    """Run ``act(transport)`` and everything it scheduled; return the calls to the underlying transport."""

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


def test_nothing_is_written_to_a_connection_that_is_lost():
    def act(transport):
        transport.write(b"head")
        transport._transport.close()

    assert in_one_loop(act) == ["closed"]


async def echo(scope, receive, send):
    """An application that reads the whole body, then answers with the path and the body's size."""
    size, more_body = 0, True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more_body = message["more_body"]
    body = b"%s %d" % (scope["path"].encode(), size)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def served(client, app=echo):
    """Serve ``app`` with uvloop as in production, run ``client(address)``, and return its result."""

    async def run():
        config = uvicorn_config(Edge(app, RequestMetrics()), stop_timeout_s=1)
        config.load()
        state, backlog = ServerState(), Backlog()
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(backlog, config, state, {}), "127.0.0.1", 0
        )
        async with server, asyncio.timeout(60):
            result = await client(server.sockets[0].getsockname())
            while state.connections:  # the server's end of the connection closes by itself
                await asyncio.sleep(0)
            assert backlog.requests == 0
            return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


class Received(asyncio.Protocol):
    """Collects what a client receives until the server closes, even while the client still sends."""

    def __init__(self):
        self.parts = []
        self.all = asyncio.get_running_loop().create_future()

    def data_received(self, data):
        self.parts.append(data)

    def connection_lost(self, _error):
        self.all.set_result(None)


def answers(*pieces, end=False):
    """Send ``pieces`` in order, close our side if ``end``, and return everything received until the server closes."""

    async def client(address):
        received = Received()
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: received, *address)
        transport.writelines(pieces)
        if end:
            transport.write_eof()
        await received.all
        return b"".join(received.parts)

    return served(client)


def head_of(size, lines=1):
    """A request whose first line and headers have ``size`` bytes, in ``lines`` headers."""
    sizes = [(size - 1) // lines] * (lines - 1)
    sizes.append(size - 1 - sum(sizes))
    return b"GET / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % (b"n" * 8, b"v" * (one - 8)) for one in sizes) + b"\r\n"


ENDLESS = [
    pytest.param(b"GET / HTTP/1.1\r\nHost: " + b"x" * (2 * MAX_HEAD_BYTES), id="a header"),
    pytest.param(b"GET /" + b"x" * (2 * MAX_HEAD_BYTES), id="a URL"),
    pytest.param(b"\r\n" * MAX_HEAD_BYTES, id="empty lines"),
]


@pytest.mark.parametrize("head", ENDLESS)
def test_a_head_without_an_end_is_refused(head):
    refusal, _, body = answers(head).partition(b"\r\n\r\n")

    assert refusal.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"connection: close" in refusal
    assert json.loads(body) == {"error": "the request's head has more than the 65,536 bytes that the server accepts"}


@pytest.mark.parametrize("lines", [1, 1000])
def test_a_head_of_exactly_the_limit_is_answered_though_the_body_comes_with_it(lines):
    body = b"x" * 150_000
    head = head_of(MAX_HEAD_BYTES - 20, lines).replace(b"GET", b"POST")
    length = b"Content-Length:%d\r\n\r\n" % len(body)

    answer = answers(head[:-2] + length + body, end=True)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"/ 150000")


def test_a_head_without_an_end_takes_no_memory():
    async def client(address):
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: ")
        try:
            for _ in range(800):
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    tracemalloc.start()
    try:
        served(client)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 5 << 20


async def refuse_early(_scope, _receive, send):
    """An application that answers before the body has arrived."""
    await send({"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_a_request_that_is_answered_before_its_body_arrives_leaves_the_backlog():
    async def client(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        writer.write(b"body")
        await asyncio.sleep(0.05)
        writer.close()

    served(client, refuse_early)  # which checks the backlog


def test_a_client_that_closes_its_side_gets_its_answer():
    assert answers(b"GET /first HTTP/1.1\r\n\r\n", end=True).endswith(b"/first 0")


def test_a_client_that_closes_its_side_without_a_request_is_disconnected():
    assert answers(b"GET / HTT", end=True) == b""


def test_any_number_of_requests_may_be_sent_without_waiting_for_answers():
    requests = b"".join(b"POST /%d HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc" % number for number in range(5000))

    answer = answers(requests, end=True)

    assert [int(line.split()[0]) for line in answer.split(b"\r\n\r\n/")[1:]] == list(range(5000))


def test_a_body_of_any_number_of_chunks_is_answered():
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert answers(head + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n", end=True).endswith(b"/ 100000")


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param([b"1;" + b"x" * 65536] + [b"x" * 65536] * 9, id="a chunk extension"),
        pytest.param([b"0\r\nTrailer: " + b"x" * 65536] + [b"x" * 65536] * 9, id="a trailer"),
        pytest.param([b"0\r\n" + b"a: b\r\n" * 20_000] + [b"a: b\r\n" * 20_000] * 9, id="many trailers"),
    ],
)
def test_chunk_extensions_and_trailers_are_bounded(rest):
    answer = answers(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", *rest)

    assert b"connection: close" in answer  # the answer arrives although the body never ends


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_request_to_change_the_protocol_is_answered_without_the_change(protocol, caplog):
    head = b"GET /first HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n"
    with caplog.at_level(logging.INFO):
        answer = answers(head % protocol, end=True)

    assert answer.endswith(b"/first 0")
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"no HTTP\r\n\r\n", ENDLESS[0].values[0]])
def test_a_client_that_sends_no_request_writes_nothing_to_the_log(sent, caplog):
    with caplog.at_level(logging.INFO):
        assert b"connection: close" in answers(sent)

    assert not caplog.records


def test_clients_that_reset_the_connection_write_nothing_to_the_log(caplog):
    async def client(address):
        for _ in range(50):
            with socket.create_connection(address) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
                # No linger: close sends a reset, not an orderly end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(0.001)

    with caplog.at_level(logging.INFO):
        served(client)

    assert not caplog.records
