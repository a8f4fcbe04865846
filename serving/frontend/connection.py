"""One client connection: uvicorn's, with the few things it leaves undone when a client misbehaves or stops early."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.frontend.body import CUT_SHORT

#: How long a connection that is done with stays open for what is on its way: after the signal to stop, requests
#: that are still answered; after a refusal, bytes that nobody looks at.
LINGER_S = 0.25
#: Largest head of a request, its first line and its headers. What is read before it is refused is at most one read of
#: the event loop (256 KiB in uvloop) more.
MAX_HEAD_BYTES = 64 << 10

_log = logging.getLogger("hotrow.http")


class HeadTooLargeError(Exception):
    """A request's head exceeds ``MAX_HEAD_BYTES``."""


class OneWrite:
    """A transport that sends what is written to it in one turn of the event loop with one system call.

    uvicorn writes an answer's head and its body one after the other, and uvloop sends each at once. For a small answer
    the second system call, and waking the client twice, cost about a tenth of the requests per second.
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
        """See ``asyncio.WriteTransport.write_eof``."""
        self._flush()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """See ``asyncio.BaseTransport.close``."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            if not self._transport.is_closing():  # uvloop raises where the client has reset the connection
                self._transport.write(data)


class Connection(HttpToolsProtocol):
    """One client connection.

    Differs from uvicorn's in six ways. An answer is one write. A request's head has a largest size, and a client that
    never finishes one does not keep its connection for ever. A client that closes its side in the middle of a body gets
    an answer that says so. A request to change the protocol is answered as if it did not ask. Nothing that a client
    sends writes to the log. And a connection that is idle when the server is told to stop stays open for a moment: what
    the client sent before it could know is answered, with ``Connection: close``, instead of being reset.
    """

    _stopping = False
    #: Nothing more is read; what was accepted before is still answered.
    _refused = False
    #: Bytes that came since a head was complete or a piece of a body was found: those of an unfinished head, of
    #: trailers or of chunk extensions. The parser keeps them or makes the client's next one wait, so they are bounded.
    _unfinished_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``HttpToolsProtocol.connection_made``."""
        super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Replaces ``HttpToolsProtocol.data_received``, which logs a warning for whatever it does not understand."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._unfinished_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as err:
            too_large = isinstance(err.__context__, HeadTooLargeError)
        else:
            too_large = self._unfinished_bytes > MAX_HEAD_BYTES
            if not too_large:
                self._wait_for_head()
                return
        if too_large:
            self._refuse(431, f"the request's head has more than the {MAX_HEAD_BYTES:,} bytes that the server accepts")
        else:
            self._refuse(400, "Invalid HTTP request received.")

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            else:
                return

    def _should_upgrade(self) -> bool:
        """Have uvicorn ignore a request to change the protocol, whose body the parser does not read; see ``_parse``."""
        return True

    def _head_without_upgrade(self) -> bytes:
        """The head just read, as it would be had the client not asked to change the protocol."""
        method = self.scope["method"].encode()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("CONNECT changes the protocol, whatever the headers say")
        headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        version = self.scope["http_version"].encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(headers))

    def _refuse(self, code: int, reason: str) -> None:
        """Answer what is no request like every other error, and close the connection."""
        _log.debug("%s: refused with %d: %s", self.client, code, reason)
        self._refused = True
        if self._answers_last_request():
            return
        body = orjson.dumps({"error": reason})
        head = f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\ncontent-type: application/json\r\n"
        length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((head + length).encode() + body)
        # Closing at once would reset the connection if the client is still sending, and the answer could be lost.
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _wait_for_head(self) -> None:
        """Wait for the next piece of a request's head as long as an idle connection may live; bodies have a limit."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own may return True, uvicorn's never does
        """The client will send no more; True keeps our side open for the answer that it may still wait for."""
        if self._answers_last_request():
            return True
        self.transport.close()  # and not uvloop's transport by itself, which has not seen a last answer yet
        return False

    def _answers_last_request(self) -> bool:
        """Nothing more will be read: is a request in hand, whose answer is then the last? Its body may be cut short."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        cycle.keep_alive = False
        if cycle.more_body:
            cast(dict[str, Any], cycle.scope)[CUT_SHORT] = True
            cycle.more_body = False
            cycle.message_event.set()
        return True

    def on_headers_complete(self) -> None:
        """See ``HttpToolsProtocol.on_headers_complete``."""
        # Only a head that came with so many bytes can be too large, so most are never measured.
        if self._unfinished_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            raise HeadTooLargeError
        self._unfinished_bytes = 0
        super().on_headers_complete()
        if self._stopping and self.cycle is not None:
            self.cycle.keep_alive = False

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        """See ``HttpToolsProtocol.on_body``."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def shutdown(self) -> None:
        """See ``HttpToolsProtocol.shutdown``."""
        self._stopping = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_S, self._close_if_idle)
        else:
            self.cycle.keep_alive = False

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
