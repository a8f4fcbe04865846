"""One client connection: uvicorn's own, extended only through the callbacks of asyncio and of the httptools parser."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import orjson
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

#: Largest head of a request (its first line and headers), to the precision of one read of the event loop.
MAX_HEAD_BYTES = 64 << 10

_LINGER_S = 0.25  # how long a refused connection stays open
_CONNECTION = "hotrow.connection"  # key of the ASGI scope's state
_HEAD_TOO_LARGE = orjson.dumps(
    {"error": f"the request's head has more than the {MAX_HEAD_BYTES:,} bytes that the server accepts"}
)
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_HEAD_TOO_LARGE), _HEAD_TOO_LARGE)
)


class OneWrite:
    """A transport that sends everything written in one turn of the event loop with one system call.

    uvicorn writes an answer's head and its body separately, and uvloop sends each at once. For a small answer the
    second system call, and waking the client twice, cost about a tenth of the requests per second.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Write to ``transport``, which belongs to ``loop``."""
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """See ``asyncio.WriteTransport.write``."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def write_eof(self) -> None:
        """See ``asyncio.WriteTransport.write_eof``; TLS has no half-closed connections."""
        self._flush()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        """See ``asyncio.BaseTransport.close``."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Pass everything else to the transport."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            if not self._transport.is_closing():  # uvloop raises if the client has reset the connection
                self._transport.write(data)


class Backlog:
    """The requests of all connections that have arrived and not begun. Belongs to one event loop.

    Attributes:
        requests: how many there are.
    """

    def __init__(self) -> None:
        """Begin with no request."""
        self.requests = 0


class Connection(HttpToolsProtocol):
    """uvicorn's connection with four additions.

    An answer is one write. The size of a request's head is limited. A client that closes its sending side still gets
    its answers, except over TLS, and an error about a body that it cut short. Whole requests that have not begun are
    counted.
    """

    def __init__(
        self,
        backlog: Backlog,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Put the connection into the ASGI scope's state, where ``connection_of`` finds it."""
        super().__init__(config, server_state, {**app_state, _CONNECTION: self}, _loop)
        self.backlog = backlog
        self._is_in_backlog = False
        self._client_has_ended = False
        self._is_answering = self._is_refused = False
        self._closing: asyncio.Handle | None = None  # the close that follows the last answer
        self._body_deadline: asyncio.Timeout | None = None
        # Bytes since a head was complete or a piece of a body was found: an unfinished head, trailers or chunk
        # extensions. The parser keeps these bytes, so they need a bound.
        self._unfinished_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the connection open for one request's answer, even after the client has closed its side."""
        self._is_answering = True
        self._leave_backlog()
        if self._closing is not None:
            self._closing.cancel()
        try:
            yield
        finally:
            self._is_answering = False
            if self._client_has_ended:
                self._close_soon()

    @contextmanager
    def reading(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """End ``deadline`` early if the client closes its side before the body is whole."""
        self._body_deadline = deadline
        if self._client_has_ended:
            deadline.reschedule(0)
        try:
            yield
        finally:
            self._body_deadline = None

    @property
    def client_has_ended(self) -> bool:
        """Whether the client has closed its side."""
        return self._client_has_ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol.connection_made``."""
        super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol.data_received``."""
        if self._is_refused:
            return
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._is_refused = True
            self.transport.write(_REFUSAL)
            # Closing at once would reset the connection if the client is still sending, and the answer could be lost.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's returns nothing, which closes the transport
        """See ``asyncio.Protocol.eof_received``."""
        self._client_has_ended = True
        if self._body_deadline is not None:
            self._body_deadline.reschedule(0)
        if not self._is_answering:
            self._close_soon()
        return self.scheme == "http"  # under TLS both sides end together, and True would be a warning in the log

    def on_headers_complete(self) -> None:
        """See httptools' callbacks."""
        self._unfinished_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools' callbacks."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools' callbacks."""
        super().on_message_complete()
        is_answered = self.cycle is None or self.cycle.response_complete  # before its body was whole
        if not self._is_answering and not self._is_in_backlog and not is_answered:
            self._is_in_backlog = True
            self.backlog.requests += 1

    def _leave_backlog(self) -> None:
        if self._is_in_backlog:
            self._is_in_backlog = False
            self.backlog.requests -= 1

    def _close_soon(self) -> None:
        """Close the connection, unless a request that has arrived begins first."""
        self._closing = self.loop.call_soon(self.transport.close)


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None without a server, as in tests."""
    connection: Connection | None = scope.get("state", {}).get(_CONNECTION)
    return connection
