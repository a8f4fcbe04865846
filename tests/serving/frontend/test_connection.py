"""One connection that gets input no client library would send."""

import asyncio
import gc
import json
import logging
import resource
import shutil
import socket
import ssl
import struct
import subprocess
import time
import tracemalloc
from contextlib import closing, contextmanager, suppress

import pytest
import uvloop
from uvicorn.server import ServerState

from serving.frontend.http.acceptor import Acceptor
from serving.frontend.http.body import Arriving, read_body
from serving.frontend.http.connection import Connection, OpenConnections
from serving.frontend.http.edge import Edge, error_messages
from serving.frontend.http.listening import listen
from serving.frontend.http.request_parser import MAX_HEAD_BYTES, MAX_HEADERS
from serving.frontend.limits import Limits
from serving.frontend.tls import Tls
from serving.metrics import RequestMetrics

LIMITS = Limits()
DEADLINE_S = 30  # for a client in a thread, which the loop cannot end


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


def served(client, app=echo, limits=LIMITS, tls=None, refusal=None):
    """Serve ``app`` with uvloop as in production, run ``client(address)``, and return its result."""

    async def run():
        edge, state, open_connections = Edge(app, RequestMetrics()), ServerState(), OpenConnections(limits)

        def connection():
            return Connection(edge, state, {}, open_connections, refusal)

        with listen("127.0.0.1", 0) as listener:
            acceptor = Acceptor(listener, connection, open_connections, tls)
            async with asyncio.timeout(60):
                result = await client(listener.getsockname())
                while len(open_connections):  # the server's end of the connection closes by itself
                    await asyncio.sleep(0)
            acceptor.close()
        assert open_connections.backlog == 0
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


def answers(*pieces, end=False, app=echo, limits=LIMITS):
    """Send ``pieces`` in order, close our side if ``end``, and return everything received until the server closes."""

    async def client(address):
        received = Received()
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: received, *address)
        transport.writelines(pieces)
        if end:
            transport.write_eof()
        await received.all
        return b"".join(received.parts)

    return served(client, app, limits)


def head_of(size_bytes, lines=1, more=b""):
    """The head of a request, with ``lines`` headers and ``more`` headers; it has ``size_bytes``."""
    begin, end = b"POST / HTTP/1.1\r\n", more + b"\r\n"
    sizes = [(size_bytes - len(begin) - len(end)) // lines] * lines
    sizes[0] += size_bytes - len(begin) - len(end) - sum(sizes)
    return begin + b"".join(b"n: " + b"v" * (size - 5) + b"\r\n" for size in sizes) + end


ENDLESS = [
    pytest.param(b"GET / HTTP/1.1\r\nHost: " + b"x" * (2 * MAX_HEAD_BYTES), id="a header"),
    pytest.param(b"GET /" + b"x" * (2 * MAX_HEAD_BYTES), id="a URL"),
    pytest.param(b"\r\n" * MAX_HEAD_BYTES, id="empty lines"),
    pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 999999\r\nA: " + b"x" * (2 * MAX_HEAD_BYTES), id="with a length"),
    pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nA: " + b"x" * (2 * MAX_HEAD_BYTES), id="of chunks"),
]


@pytest.mark.parametrize("head", ENDLESS)
def test_a_head_without_an_end_is_refused(head):
    refusal, _, body = answers(head).partition(b"\r\n\r\n")

    assert refusal.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"connection: close" in refusal
    assert json.loads(body) == {"error": "the request's head has more than the 65,536 bytes that the server accepts"}


@pytest.mark.parametrize("lines", [1, MAX_HEADERS - 1])
def test_a_head_of_exactly_the_limit_is_answered_though_the_body_comes_with_it(lines):
    body = b"x" * 150_000
    head = head_of(MAX_HEAD_BYTES, lines, b"Content-Length: %d\r\n" % len(body))

    answer = answers(head + body, end=True)

    assert len(head) == MAX_HEAD_BYTES
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"/ 150000")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        pytest.param(head_of(MAX_HEAD_BYTES + 1), b"65,536 bytes", id="bytes"),
        pytest.param(head_of(MAX_HEAD_BYTES, MAX_HEADERS + 1), b"100 headers", id="headers"),
    ],
)
def test_a_head_beyond_the_limit_is_refused(head, expected):
    answer = answers(head)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert expected in answer


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


def refuse_busy(scope):
    return error_messages("busy", 429) if scope["path"] == "/busy" else None


def test_a_request_is_refused_before_its_body_arrives_and_the_next_request_is_answered():
    busy = b"POST /busy HTTP/1.1\r\nContent-Length: 3\r\n\r\n"

    async def client(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(busy)
        first = await reader.readuntil(b'"busy"}')
        writer.write(b"abc" + busy + b"abc" + FIRST)
        writer.write_eof()
        rest = await reader.read()
        writer.close()
        return first, rest

    first, rest = served(client, refusal=refuse_busy)

    second, _, last = rest.partition(b'"busy"}')
    assert first.startswith(b"HTTP/1.1 429 ")
    assert second.startswith(b"HTTP/1.1 429 ")
    assert last.startswith(b"HTTP/1.1 200 ")
    assert last.endswith(b"/first 3")


def test_a_refused_request_whose_client_wants_no_other_closes_the_connection():
    async def client(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /busy HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    assert b"connection: close" in served(client, refusal=refuse_busy)


def test_a_client_that_closes_its_side_gets_its_answer():
    assert answers(b"GET /first HTTP/1.1\r\n\r\n", end=True).endswith(b"/first 0")


def test_a_client_that_closes_its_side_without_a_request_is_disconnected():
    assert answers(b"GET / HTT", end=True) == b""


def test_any_number_of_requests_may_be_sent_without_waiting_for_answers():
    requests = b"".join(b"POST /%d HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc" % number for number in range(1000))

    answer = answers(requests, end=True)

    assert [int(line.split()[0]) for line in answer.split(b"\r\n\r\n/")[1:]] == list(range(1000))


@pytest.mark.parametrize("connections", [2, 7, 8, 30])
def test_requests_of_many_connections_that_arrive_together_are_all_answered(connections):
    endings = (b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n", b"GARBAGE\r\n\r\n")

    async def client(address):
        loop = asyncio.get_running_loop()
        clients = [await loop.create_connection(Received, *address) for _ in range(connections)]
        for number, (transport, _) in enumerate(clients):
            transport.write(FIRST + endings[number % 2])
        await asyncio.gather(*(received.all for _, received in clients))
        return [b"".join(received.parts) for _, received in clients]

    for number, answer in enumerate(served(client)):
        first, _, last = answer.partition(b"/first 3")
        assert first.startswith(b"HTTP/1.1 200")
        assert last.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")[number % 2])


def test_invalid_bytes_that_arrive_while_an_answer_waits_for_others_do_not_prevent_it():
    transports = []

    async def echo_and_continue(scope, receive, send):
        await echo(scope, receive, send)
        transports.pop(0).write(b"GARBAGE\r\n\r\n")

    async def client(address):
        loop = asyncio.get_running_loop()
        clients = [await loop.create_connection(Received, *address) for _ in range(2)]
        for transport, _ in clients:
            transports.append(transport)
            transport.write(FIRST)
        await asyncio.gather(*(received.all for _, received in clients))
        return [b"".join(received.parts) for _, received in clients]

    for answer in served(client, echo_and_continue):
        first, _, last = answer.partition(b"/first 3")
        assert first.startswith(b"HTTP/1.1 200")
        assert last.startswith(b"HTTP/1.1 400")


def test_empty_lines_between_requests_are_ignored():
    answer = answers(b"\r\n" + FIRST + 3 * b"\r\n" + FIRST, end=True)

    assert answer.count(b"HTTP/1.1 200") == answer.count(b"/first 3") == 2


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_only_a_client_of_http_1_1_gets_a_continue(version):
    async def receive_once(_scope, receive, send):
        await asyncio.wait([asyncio.ensure_future(receive())], timeout=0.1)
        await refuse_early(_scope, receive, send)

    request = b"POST / HTTP/%s\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n" % version

    answer = answers(request, app=receive_once, limits=Limits(body_timeout_s=0.2))

    assert answer.count(b"100 Continue") == (version == b"1.1")
    assert b" 429 " in answer


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


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"foo/2"])
@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"\r\n", id="no body"),
        pytest.param(b"Content-Length: 3\r\n\r\nabc", id="a body"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n", id="chunks"),
    ],
)
def test_a_request_to_change_the_protocol_is_answered_without_the_change(protocol, rest, caplog):
    head = b"POST /first HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\nUpgrade: %s\r\n"
    size = 0 if rest == b"\r\n" else 3
    with caplog.at_level(logging.INFO):
        answer = answers(head % protocol + rest, b"GET /second HTTP/1.1\r\n\r\n", end=True)

    assert b"/first %d" % size in answer
    assert answer.endswith(b"/second 0")
    assert not caplog.records


def test_a_proxy_request_is_refused():
    assert answers(b"CONNECT example.org:80 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 501 ")


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


FIRST = b"POST /first HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        pytest.param(b"GARBAGE\r\n\r\n", b"400", id="garbage"),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"a" * 300_000, b"431", id="a large head"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400", id="HTTP/2"),
    ],
)
def test_invalid_bytes_do_not_prevent_earlier_answers(rest, code):
    answer = answers(FIRST, FIRST, rest)

    assert answer.count(b"/first 3") == 2
    assert b"HTTP/1.1 " + code in answer.partition(b"/first 3HTTP/1.1 200 OK")[2]


def test_the_error_shows_bytes_that_are_not_http():
    assert b"expected HTTP/1.1, got 'hello world" in answers(b"hello world\r\n\r\n")


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (
            b"Content-Length: ten\r\n\r\n",
            b"expected HTTP/1.1, got 'Content-Length: ten': Invalid character in Content-",
        ),
        (b"Host : x\r\n\r\n", b"expected HTTP/1.1, got 'Host : x': Invalid header token"),
        (b"Transfer-Encoding: chunked\r\n\r\ng\r\n", b"expected a chunk of a body: Invalid character in chunk size"),
    ],
)
def test_the_error_shows_the_line_that_is_not_http(rest, expected):
    assert expected in answers(b"POST / HTTP/1.1\r\n" + rest)


def test_a_client_that_does_not_read_its_answers_gets_no_more_answers():
    begun = []

    async def large(scope, receive, send):
        begun.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (8 << 20)})

    async def client(address):
        _, writer = await asyncio.open_connection(*address, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000)
        while not begun:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        writer.transport.abort()

    served(client, large)

    assert len(begun) <= 3  # the kernel takes one or two


def test_a_client_that_sends_many_requests_at_once_leaves_other_clients_their_turns():
    answered = []

    async def noted(scope, receive, send):
        answered.append(scope["path"])
        await echo(scope, receive, send)

    async def client(address):
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /many HTTP/1.1\r\n\r\n" * 3000)
        other_reader, other_writer = await asyncio.open_connection(*address)
        while not answered:
            await asyncio.sleep(0)
        for _ in range(20):
            other_writer.write(b"GET /other HTTP/1.1\r\n\r\n")
            await other_reader.readuntil(b"/other 0")
        counted = answered.count("/many")
        writer.transport.abort()
        other_writer.close()
        return counted

    assert served(client, noted) < 60


class TestTime:
    limits = Limits(head_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=0.2, answer_timeout_s=0.2)
    patient = Limits(head_timeout_s=0.2, body_timeout_s=60, idle_timeout_s=60, answer_timeout_s=60)

    def test_a_connection_without_a_byte_is_closed(self):
        assert answers(limits=self.limits) == b""

    def test_a_connection_without_a_next_request_is_closed(self):
        assert answers(FIRST, limits=self.limits).endswith(b"/first 3")

    @pytest.mark.parametrize("before", [b"", FIRST])
    @pytest.mark.parametrize("part", [b"G", b"GET / HTTP/1.1\r\nHo", b"\r\n\r\nG"])
    def test_a_head_that_does_not_end_is_refused_with_a_reason(self, before, part):
        answer = answers(before, part, limits=self.patient)

        assert answer.count(b"/first 3") == bool(before)
        assert b"HTTP/1.1 408 Request Timeout\r\n" in answer
        assert answer.endswith(b'{"error":"the request\'s head did not arrive within 0.2 s"}')

    @pytest.mark.parametrize("before", [b"", FIRST])
    def test_an_empty_line_is_no_request(self, before):
        answer = answers(before + b"\r\n", limits=self.limits)

        assert answer.count(b"HTTP/1.1") == answer.count(b"/first 3") == bool(before)

    def test_a_head_that_arrives_byte_by_byte_gets_no_extra_time(self):
        async def client(address):
            reader, writer = await asyncio.open_connection(*address)
            reading = asyncio.ensure_future(reader.read())
            while not reading.done():
                writer.write(b"a")
                await asyncio.sleep(0.01)
            writer.close()
            return await reading

        assert served(client, limits=self.patient).startswith(b"HTTP/1.1 4")

    def test_a_body_that_does_not_end_is_refused_with_a_reason(self):
        async def read(_scope, receive, _send):
            await read_body(receive, {}, self.limits, Arriving(self.limits))

        answer = answers(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", app=read, limits=self.limits)

        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"connection: close\r\n" in answer
        assert answer.endswith(b'{"error":"the body did not arrive within 0.2 s"}')

    @pytest.mark.parametrize(
        "request_",
        [
            pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", id="a body"),
            pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nT: a\r\n", id="trailers"),
        ],
    )
    def test_the_rest_of_an_answered_request_has_a_time_limit(self, request_):
        answer = answers(request_, app=refuse_early, limits=self.limits)

        assert answer.startswith(b"HTTP/1.1 429 ")

    def test_an_answer_may_take_longer_than_the_time_limits_of_clients(self):
        async def slow(scope, receive, send):
            await asyncio.sleep(0.6)
            await echo(scope, receive, send)

        assert answers(FIRST, app=slow, limits=self.limits).endswith(b"/first 3")


SIZE = 16 << 20


async def large_answer(_scope, _receive, send):
    """An application whose answers fill the buffers of the kernel and wait in the server."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


class Unread:
    """Clients that ask for an answer and do not read it."""

    def __init__(self, address):
        self.address = address
        self.sockets = []

    async def ask(self):
        client = socket.socket()
        client.setblocking(False)
        self.sockets.append(client)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, self.address)
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return client

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.sockets:
            one.close()


async def received(client, pause_s=0.0):
    """How many bytes of an answer arrive before the server closes or the answer is whole."""
    loop, count = asyncio.get_running_loop(), 0
    try:
        while count < SIZE and (data := await loop.sock_recv(client, 1 << 20)):
            count += len(data)
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass
    return count


def test_a_client_that_does_not_read_its_answer_is_cut():
    async def client(address):
        with Unread(address) as clients:
            one = await clients.ask()
            await asyncio.sleep(1)
            return await received(one)

    assert served(client, large_answer, Limits(answer_timeout_s=0.2)) < SIZE


@pytest.fixture
def tls(tmp_path):
    """TLS of a server, and of its clients."""
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not installed")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command += " -keyout key.pem -out certificate.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    with closing(Tls(tmp_path / "certificate.pem", tmp_path / "key.pem", None)) as server:
        yield server, ssl.create_default_context(cafile=tmp_path / "certificate.pem")


def test_a_client_that_does_not_read_its_answer_is_cut_under_tls_too(tls):
    def client(address):
        with (
            socket.create_connection(address, DEADLINE_S) as one,
            tls[1].wrap_socket(one, server_hostname="localhost") as wrapped,
        ):
            wrapped.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(1)
            count = 0
            with suppress(OSError):
                while data := wrapped.recv(1 << 20):
                    count += len(data)
            return count

    limits = Limits(answer_timeout_s=0.2)

    assert served(lambda address: asyncio.to_thread(client, address), large_answer, limits, tls[0]) < SIZE


class WithoutSocket(asyncio.Transport):
    """The transport of a client that does not read; it has lost its socket, as uvloop's TLS may."""

    def __init__(self):
        super().__init__()
        self.aborted = asyncio.Event()

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_write_buffer_size(self):
        return 1

    def is_closing(self):
        return False

    def abort(self):
        self.aborted.set()


def test_a_connection_without_a_socket_does_not_end_the_time_limits_of_others():
    async def run():
        open_connections = OpenConnections(Limits(answer_timeout_s=0.01))
        transports = [WithoutSocket() for _ in range(3)]
        connections = [Connection(echo, ServerState(), {}, open_connections) for _ in transports]
        for connection, transport in zip(connections, transports, strict=True):
            connection.connection_made(transport)
        async with asyncio.timeout(DEADLINE_S):
            for connection, transport in zip(connections, transports, strict=True):
                await transport.aborted.wait()
                connection.connection_lost(None)

    asyncio.run(run())


def test_a_tls_handshake_has_a_time_limit(tls):
    def client(address):
        with socket.create_connection(address, DEADLINE_S) as one:
            one.sendall(b"\x16\x03\x01")
            return one.recv(1)

    limits = Limits(head_timeout_s=0.2)

    assert served(lambda address: asyncio.to_thread(client, address), limits=limits, tls=tls[0]) == b""


def test_a_client_that_reads_slowly_gets_its_whole_answer():
    async def client(address):
        with Unread(address) as clients:
            return await received(await clients.ask(), pause_s=0.02)

    assert served(client, large_answer, Limits(answer_timeout_s=0.4)) >= SIZE


def test_the_client_that_waits_longest_is_cut_if_too_many_bytes_wait():
    async def client(address):
        with Unread(address) as clients:
            asked = [await clients.ask() for _ in range(4)]
            await asyncio.sleep(0.3)
            return [await received(one) for one in asked]

    first, second, third, last = served(client, large_answer, Limits(max_unread_bytes=0, max_answer_bytes=SIZE))

    assert first < SIZE
    assert second < SIZE
    assert third >= SIZE
    assert last >= SIZE


def test_connections_beyond_the_limit_are_refused_until_another_closes():
    async def client(address):
        first = await asyncio.open_connection(*address)
        second = await asyncio.open_connection(*address)
        third_reader, third = await asyncio.open_connection(*address)
        refusal = await third_reader.read()
        first[1].close()
        await asyncio.sleep(0.05)
        reader, fourth = await asyncio.open_connection(*address)
        fourth.write(FIRST)
        await reader.readuntil(b"/first 3")
        for writer in (second[1], third, fourth):
            writer.close()
        return refusal

    refusal = served(client, limits=Limits(max_connections=2))

    assert refusal.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: ")
    assert refusal.endswith(b'{"error":"2 connections are open; the server accepts no more"}')


@contextmanager
def descriptors(limit):
    """Let the process open as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def next_descriptor():
    gc.collect()  # files that earlier tests left open would be closed later, and make room
    with socket.socket() as one:
        return one.fileno()


def test_connections_leave_some_descriptors_to_others():
    async def client(address):
        with descriptors(next_descriptor() + 4):
            reader, writer = await asyncio.open_connection(*address)
            refusal = await reader.read()
            writer.close()
            return refusal

    refusal = served(client)

    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert b"(ulimit -n)" in refusal


def test_a_process_without_descriptors_waits_for_one_and_logs_a_line(caplog):
    async def client(address):
        with socket.socket() as one:
            one.setblocking(False)
            with descriptors(next_descriptor()):
                await asyncio.get_running_loop().sock_connect(one, address)
                await asyncio.sleep(0.5)
            await asyncio.get_running_loop().sock_sendall(one, FIRST)
            return await asyncio.get_running_loop().sock_recv(one, 4096)

    with caplog.at_level(logging.WARNING):
        answer = served(client)

    assert answer.endswith(b"/first 3")
    # Other loggers may have lines too: the garbage collector reports the futures that gRPC left in an earlier test.
    lines = [record.message.partition(";")[0] for record in caplog.records if record.name == "hotrow.http"]
    assert lines == ["cannot accept a connection: Too many open files"]
