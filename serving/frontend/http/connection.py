"""One client connection, and what all connections of a process hold together."""

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

# uvicorn documents neither module, so pyproject.toml allows only the versions of uvicorn that were tested.
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from serving.frontend.http.request import Header, Request, error_bytes
from serving.frontend.http.request_parser import Head, RefusedBytesError, RequestParser
from serving.frontend.limits import Limits
from serving.frontend.rare_warnings import RareWarnings

#: How many bytes of a connection may wait to be parsed, and how many bytes of a body may wait for the application,
#: give or take one read of the event loop.
READ_AHEAD_BYTES = 64 << 10

#: Bytes of heads and of chunked bodies that one turn of the event loop parses. Tiny chunks take a microsecond each.
_PARSED_BYTES_PER_TURN = 8 << 10
#: If the next request of a connection has arrived already, other connections get so many turns of the event loop first.
#: They need about as many turns to take an answer and to send their next request.
_REST_TURNS = 16
#: The most answers that wait for each other. Each answer that leaves alone wakes its client, which costs the kernel
#: about 20 us if both are on one machine.
_ANSWERS_TOGETHER = 8
#: Answers of this size may wait for the client while its next request begins.
_UNREAD_BYTES = 64 << 10
#: A client that takes fewer bytes in ``answer_timeout_s`` does not read.
_LEAST_TAKEN_BYTES = 64 << 10
_LINGER_S = 1.0  # how long a refused connection stays open
_LONGEST_CHECK_INTERVAL_S = 1.0
_CONNECTION = "hotrow.connection"  # key of the ASGI scope
_log = logging.getLogger("hotrow.http")


#: Returns ASGI's two messages of the answer to a request that is refused at once; None: the application answers. Under
#: overload most requests are refused, so a refusal has no task and waits for no turn of the event loop.
Refusal = Callable[[Scope], tuple[Message, Message] | None]


class OpenConnections:
    """The connections of one event loop: their number, what they hold together, and their time limits.

    One timer checks the time limits of all connections, so a request sets no timer.

    Attributes:
        limits: of each connection, and of all.
        backlog: how many requests have arrived and not begun.
        is_draining: whether connections close after their next answer, because the server is about to stop.
        warn: logs what happens to connections; see ``RareWarnings``.
    """

    def __init__(self, limits: Limits) -> None:
        """Begin without connections."""
        self.limits = limits
        self.backlog = 0
        self.is_draining = False
        self.warn = RareWarnings(_log).warn
        self._connections: set[Connection] = set()
        self._answers: list[tuple[Connection, bytes | memoryview]] = []  # of this turn of the event loop, not sent yet
        self._unread: dict[Connection, None] = {}  # with answers that wait for clients, the longest wait first
        shortest_s = min(limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.answer_timeout_s)
        self._interval_s = min(shortest_s / 4, _LONGEST_CHECK_INTERVAL_S)
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def add(self, connection: "Connection") -> None:
        """Count a connection, and watch its time limits."""
        self._connections.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def remove(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        self._connections.discard(connection)
        self._unread.pop(connection, None)

    def write(self, connection: "Connection", data: bytes | memoryview) -> None:
        """Send ``data``, at once or with the answers of other requests that have arrived."""
        if not self._answers:
            if not self.backlog:
                connection.send(data)
                return
            asyncio.get_running_loop().call_soon(self.send_answers)
        self._answers.append((connection, data))
        if len(self._answers) == _ANSWERS_TOGETHER:
            self.send_answers()

    def send_answers(self) -> None:
        """Send the answers that wait for others."""
        answers, self._answers = self._answers, []
        for connection, data in answers:
            connection.send(data)

    def add_unread(self, connection: "Connection") -> None:
        """An answer waits for its client."""
        self._unread[connection] = None
        self._cut_excess()

    def remove_unread(self, connection: "Connection") -> None:
        """The client has taken its answer."""
        self._unread.pop(connection, None)

    def _cut_excess(self) -> None:
        """Cut the connections that wait longest for their clients, if all that wait hold too many bytes."""
        limit = self.limits.most_unread_bytes
        excess_bytes = sum(connection.held_bytes for connection in self._unread) - limit
        while excess_bytes > 0:
            longest_waiting = next(iter(self._unread))
            del self._unread[longest_waiting]
            excess_bytes -= longest_waiting.held_bytes
            longest_waiting.abort(f"unread answers take more than {limit:,} bytes, and it has waited longest")

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        # First, so that no error below ends the time limits.
        self._timer = loop.call_later(self._interval_s, self._check) if self._connections else None
        self._cut_excess()
        for connection in tuple(self._connections):
            connection.check_time(loop.time())


class Connection(asyncio.Protocol):
    """One client connection: answers its requests one after another.

    A request is parsed once the client takes the previous answer. Until then its bytes wait, and the transport is not
    read if many bytes wait. So a client that sends requests ahead takes little memory. It gets about as much of the
    event loop as other clients do, because its next request rests for some turns.

    A client that closes its sending side still gets its answers, except over TLS. For an incomplete body it gets an
    error.

    Attributes:
        is_writable: whether the client takes what is sent.
        open_connections: all connections of the event loop.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: ServerState,
        app_state: dict[str, Any],
        open_connections: OpenConnections,
        refusal: Refusal | None = None,
    ) -> None:
        """Let ``app`` answer, with uvicorn's ``server`` and the application's state; ``refusal`` is asked first."""
        self.is_writable = True
        self.open_connections = open_connections
        self._app = app
        self._refusal = refusal
        self._server = server
        self._app_state = app_state
        self._limits = open_connections.limits
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._unparsed, self._parsed_bytes = b"", 0  # what has arrived, and how much of it is parsed
        self._request: Request | None = None  # from its head until it is whole and answered
        self._is_resting = False  # until the event loop has turned to other connections
        self._is_reading = True
        self._is_refused = self._is_stopping = self._client_has_ended = False
        self._drained: asyncio.Future[None] | None = None
        self._since = self._loop.time()  # when the head, the idle time or the wait for the rest of a request began
        self._marked_bytes, self._marked_s = 0, 0.0  # how many bytes of answers waited, and when

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_UNREAD_BYTES)
        self._local, self._remote = get_local_addr(self._transport), get_remote_addr(self._transport)
        self._scheme = "https" if is_ssl(self._transport) else "http"
        self._since = self._loop.time()
        self._server.connections.add(cast(Any, self))  # uvicorn calls ``shutdown``
        self.open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._server.connections.discard(cast(Any, self))
        self.open_connections.remove(self)
        self._transport = None
        self._parser.close()
        self._unparsed = b""
        if self._request is not None:
            self._request.lose()
            self._request = None
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._is_refused:
            return
        if self._request is None and self._parser.is_between_requests:
            self._since = self._loop.time()
        self._unparsed = self._unparsed[self._parsed_bytes :] + data if self._unparsed else data
        self._parsed_bytes = 0
        self._parse()

    def eof_received(self) -> bool:
        """See ``asyncio.Protocol``."""
        self._client_has_ended = True
        self._parse()
        return self._scheme == "http"  # under TLS both sides end together, and True would be a warning in the log

    def pause_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self.is_writable = False
        self.open_connections.add_unread(self)

    def resume_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self.is_writable = True
        self._marked_bytes = 0
        self.open_connections.remove_unread(self)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._request is None:
            self._rest(_REST_TURNS)

    # The parser's events

    def on_head(self, head: Head) -> None:
        """See ``ParserEvents``."""
        path = head.path.decode("ascii")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "server": self._local,
            "client": self._remote,
            "state": self._app_state.copy(),
            _CONNECTION: self,
        }
        keeps_alive = head.keeps_alive and not self._is_stopping and not self.open_connections.is_draining
        self._request = request = Request(self, scope, keeps_alive, head.expects_continue)
        refusal = None if self._refusal is None else self._refusal(scope)
        if refusal is not None:
            request.answer(*refusal)
            self._since = self._loop.time()
            return
        task = self._loop.create_task(request.run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def on_body(self, body: bytes) -> None:
        """See ``ParserEvents``."""
        if self._request is not None:
            self._request.add(body)

    def on_end(self) -> None:
        """See ``ParserEvents``."""
        request = self._request
        if request is None:
            return
        request.complete()
        if not request.is_answered and not request.has_begun:
            self.open_connections.backlog += 1

    # What a request calls

    @property
    def default_headers(self) -> Sequence[Header]:
        """The headers that every answer has."""
        return self._server.default_headers

    @property
    def has_whole_request(self) -> bool:
        """Whether the request that is answered now has arrived."""
        return self._request is not None and self._request.is_whole

    def begun(self, request: Request) -> None:
        """The application has begun to answer ``request``."""
        if request.is_whole:
            self.open_connections.backlog -= 1

    def write(self, data: bytes | memoryview) -> None:
        """Send ``data``, perhaps a little later; see ``OpenConnections.write``."""
        self.open_connections.write(self, data)

    def send(self, data: bytes | memoryview) -> None:
        """Send ``data`` at once."""
        if self._transport is not None and not self._transport.is_closing():  # uvloop raises if the client has reset it
            self._transport.write(data)

    async def writable(self) -> None:
        """Wait until the client has taken what was sent before, or has gone."""
        while not self.is_writable:
            self._drained = self._loop.create_future()
            await self._drained

    def taken(self) -> None:
        """The application has taken the body as far as it has arrived."""
        self._parse()

    def answered(self, request: Request) -> None:
        """The answer to ``request`` is written."""
        self._since = self._loop.time()
        if request.is_whole:
            self._finish(request)
        else:
            self._rest(1)  # for the rest of its body

    def cut(self) -> None:
        """Close the connection, for example because an answer cannot be completed."""
        self.open_connections.send_answers()
        if self._transport is not None:
            self._transport.close()

    # Others

    def shutdown(self) -> None:
        """Close after the current answer; called by uvicorn."""
        self._is_stopping = True
        if self._request is not None:
            self._request.keeps_alive = False
        elif not self._is_resting:
            self.cut()  # otherwise a request may have arrived, see ``_go_on``

    @property
    def held_bytes(self) -> int:
        """How many bytes of answers wait for the client, and of requests for the server."""
        return self._unread_answer_bytes + len(self._unparsed)

    @property
    def _unread_answer_bytes(self) -> int:
        unsent_bytes = 0 if self._request is None else self._request.unsent_bytes
        return unsent_bytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def abort(self, reason: str) -> None:
        """Close at once; the client gets no more of its answer."""
        self.open_connections.warn("cut the connection of %s: %s", self._remote, reason)
        if self._transport is not None:
            self._transport.abort()

    def check_time(self, now_s: float) -> None:
        """Close the connection if its client is too slow."""
        if self._transport is None:
            return
        unread_bytes = self._unread_answer_bytes
        if unread_bytes:
            self._check_unread(unread_bytes + _kernel_bytes(self._transport), now_s)
        elif not self._is_refused and not self._transport.is_closing():
            self._marked_bytes = 0
            self._check_request(now_s - self._since)

    def _check_unread(self, unread_bytes: int, now_s: float) -> None:
        taken_bytes = self._marked_bytes - unread_bytes  # negative if the server has sent more
        if taken_bytes < 0 or taken_bytes >= _LEAST_TAKEN_BYTES:
            self._marked_bytes, self._marked_s = unread_bytes, now_s
        elif now_s - self._marked_s > self._limits.answer_timeout_s:
            self.abort(f"it took less than {_LEAST_TAKEN_BYTES:,} bytes in {self._limits.answer_timeout_s:g} s")

    def _check_request(self, waits_s: float) -> None:
        request, limits = self._request, self._limits
        if request is not None:
            if request.is_answered and waits_s > limits.body_timeout_s:  # and its body still arrives
                self.cut()
        elif self._parser.is_between_requests:
            if waits_s > limits.idle_timeout_s:
                self.cut()
        elif waits_s > limits.head_timeout_s:
            self._refuse(408, f"the request's head did not arrive within {limits.head_timeout_s:g} s")

    def _parse(self) -> None:
        """Parse what has arrived, as far as the server is ready for it."""
        most_bytes = self._parser.structure_bytes + _PARSED_BYTES_PER_TURN
        try:
            while self._parsed_bytes < len(self._unparsed) and self._may_parse():
                if self._parser.structure_bytes >= most_bytes:
                    self._rest(1)
                    break
                self._parsed_bytes = self._parser.feed(self._unparsed, self._parsed_bytes)
                request = self._request
                if request is not None and request.is_answered and request.is_whole:
                    self._finish(request)
        except RefusedBytesError as err:
            self._refuse(err.code, err.message)
            return
        left_bytes = len(self._unparsed) - self._parsed_bytes
        if not left_bytes:
            self._unparsed, self._parsed_bytes = b"", 0
            if self._client_has_ended:
                self._end()
        self._read(left_bytes < READ_AHEAD_BYTES)

    def _may_parse(self) -> bool:
        request = self._request
        if request is None:
            return self.is_writable and not self._is_resting
        return request.is_answered or (not request.is_whole and request.waiting_bytes < READ_AHEAD_BYTES)

    def _read(self, is_reading: bool) -> None:
        """Start or stop reading the transport."""
        if is_reading == self._is_reading or self._transport is None or self._transport.is_closing():
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _end(self) -> None:
        """The client has closed its side, and everything that it sent is parsed."""
        if self._request is None or self._request.is_answered:
            self.cut()
        elif not self._request.is_whole:
            self._request.keeps_alive = False
            self._request.cut_short()

    def _finish(self, request: Request) -> None:
        """Go on to the next request, once the current request is whole and answered."""
        self._request = None
        if request.keeps_alive:
            if self._parsed_bytes < len(self._unparsed) or self._client_has_ended or not self._is_reading:
                self._rest(_REST_TURNS)
        else:
            self.cut()

    def _rest(self, turns: int) -> None:
        """Go on once the event loop has turned to other connections ``turns`` times."""
        if not self._is_resting:
            self._is_resting = True
            self._loop.call_soon(self._go_on, turns)

    def _go_on(self, turns: int) -> None:
        if turns > 1:
            self._loop.call_soon(self._go_on, turns - 1)
            return
        self._is_resting = False
        if self._transport is None or self._is_refused:
            return
        self._parse()
        if self._is_stopping and self._request is None:
            self.cut()

    def _refuse(self, code: int, message: str) -> None:
        """Answer that the bytes of the client cannot be understood, and close."""
        self._is_refused = True
        self._unparsed, self._parsed_bytes = b"", 0
        request, self._request = self._request, None
        if request is not None:
            request.lose()
        if request is not None and request.has_answer:
            self.cut()
            return
        self.write(error_bytes(code, message))
        self.open_connections.send_answers()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            # Closing at once would reset the connection if the client is still sending, and the answer could be lost.
            if transport.can_write_eof():
                transport.write_eof()
            self._read(True)
            self._loop.call_later(_LINGER_S, transport.close)


def _kernel_bytes(transport: asyncio.Transport) -> int:
    """Return how many bytes the kernel keeps until the client has received them."""
    socket = transport.get_extra_info("socket")
    if socket is None:  # uvloop's TLS, after the connection is lost
        return 0
    with suppress(OSError):
        size_bytes: int = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
        return size_bytes
    return 0


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None without a server, as in tests."""
    connection: Connection | None = scope.get(_CONNECTION)
    return connection
