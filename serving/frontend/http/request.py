"""One request and its answer, between a connection and an ASGI application."""

import asyncio
import http
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson
from starlette.types import ASGIApp, Message, Scope

if TYPE_CHECKING:
    from serving.frontend.http.connection import Connection

_log = logging.getLogger("hotrow.http")
_STATUS_LINES = {int(status): b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})
#: Parts of an answer up to this size are copied together, and sent with one system call.
_MOST_COPIED_BYTES = 64 << 10
#: The transport gets no larger piece of an answer at once, because uvloop's TLS buffers any number of bytes.
_PIECE_BYTES = 256 << 10

Header = tuple[bytes, bytes]


def error_bytes(status: int, message: str, headers: Sequence[Header] = ()) -> bytes:
    """Return a whole answer ``{"error": message}``, after which the server closes the connection."""
    body = orjson.dumps({"error": message})
    more = [b"content-type: application/json\r\n", b"content-length: %d\r\n" % len(body), b"connection: close\r\n"]
    return _head(status, headers, more) + body


def _head(status: int, headers: Sequence[Header], more: list[bytes]) -> bytes:
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    lines += [b"%s: %s\r\n" % header for header in headers]
    lines += more
    lines.append(b"\r\n")
    head = b"".join(lines)
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
        raise ValueError("a header of the answer has a line end")
    return head


class Request:
    """One request and its answer, as ASGI sees them.

    Attributes:
        scope: ASGI's scope.
        keeps_alive: whether the connection stays open after the answer.
        has_begun: whether the application has begun to answer.
        is_whole: whether all of the request has arrived.
        is_answered: whether the answer is complete.
        has_answer: whether the answer has begun.
        waiting_bytes: size of the body that has arrived and that the application has not taken.
        unsent_bytes: size of the answer that waits here, because the client does not take it.
    """

    def __init__(self, connection: "Connection", scope: Scope, keeps_alive: bool, expects_continue: bool) -> None:
        """Answer the request that ``scope`` describes, to a client that may expect ``100 Continue``."""
        self.scope = scope
        self.keeps_alive = keeps_alive
        self.has_begun = self.is_whole = self.is_answered = self.has_answer = False
        self.waiting_bytes = self.unsent_bytes = 0
        self._connection = connection
        self._expects_continue = expects_continue
        self._body: list[bytes] = []
        self._is_taken = False  # the application knows that the body is whole
        self._is_cut_short = self._is_lost = False  # the client sends no more, or is gone, before the answer
        self._news: asyncio.Future[None] | None = None
        self._start: Message | None = None
        self._left_bytes: int | None = None  # what the body of the answer still needs; None: chunks

    async def run(self, app: ASGIApp) -> None:
        """Let ``app`` answer."""
        self.has_begun = True
        self._connection.begun(self)
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            pass  # the stop timeout is over
        except Exception:  # noqa: BLE001  # the application answers its errors itself, unless its answer had begun
            _log.exception("%s %s failed", self.scope["method"], self.scope["path"])
        if not self.is_answered and not self._is_lost:
            if not self.has_answer:
                self._connection.write(error_bytes(500, "internal error; see the server's log"))
            self._connection.cut()

    # What the connection calls

    def add(self, body: bytes) -> None:
        """Keep a piece of the body that has arrived."""
        if not self.is_answered:
            self._body.append(body)
            self.waiting_bytes += len(body)
            self._wake()

    def complete(self) -> None:
        """The request is whole."""
        self.is_whole = True
        self._wake()

    def cut_short(self) -> None:
        """The client has closed its side before the request was whole; it may wait for an answer."""
        self._is_cut_short = True
        self._wake()

    def lose(self) -> None:
        """The client is gone; nothing can be sent."""
        self._is_lost = True
        self._wake()

    # ASGI

    async def receive(self) -> Message:
        """See ASGI's receive."""
        if self._expects_continue and not (self._body or self.is_whole or self.has_answer):
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._body or (self.is_whole and not self._is_taken)):
            if self._is_cut_short or self._is_lost or self.is_answered:
                return {"type": "http.disconnect"}
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self.waiting_bytes = 0
        self._is_taken = self.is_whole
        if not self.is_whole:
            self._connection.taken()
        return {"type": "http.request", "body": body, "more_body": not self._is_taken}

    def answer(self, start: Message, body: Message) -> None:
        """Send a small answer at once, with ASGI's two messages; the application is not asked."""
        self._connection.write(b"".join(self._parts(start, body["body"], is_last=True)))
        self.is_answered = True

    async def send(self, message: Message) -> None:
        """See ASGI's send. The head is sent with the first piece of the body."""
        if not self._connection.is_writable:
            await self._connection.writable()
        if self._is_lost:
            return
        if message["type"] == "http.response.start" and self._start is None:
            self._start = message
            return
        if self._start is None or self.is_answered or message["type"] != "http.response.body":
            raise RuntimeError(f"ASGI: {message['type']} is out of order")
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        parts = self._parts(self._start, body, is_last)
        if sum(map(len, parts)) <= _MOST_COPIED_BYTES:
            self._connection.write(b"".join(parts))
        else:
            await self._send_in_pieces(parts)
        if is_last and not self._is_lost:
            self.is_answered = True
            self._body.clear()
            self._wake()
            self._connection.answered(self)

    async def _send_in_pieces(self, parts: list[bytes]) -> None:
        self.unsent_bytes = sum(map(len, parts))
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(part), _PIECE_BYTES):
                piece = view[begin : begin + _PIECE_BYTES]
                if not self._connection.is_writable:
                    await self._connection.writable()
                if self._is_lost:
                    return
                self.unsent_bytes -= len(piece)
                self._connection.write(piece)

    def _parts(self, start: Message, body: bytes, is_last: bool) -> list[bytes]:
        """Return what to send for a piece of the answer's body."""
        parts = []
        if not self.has_answer:
            parts.append(self._head_of(start, len(body) if is_last else None))
            self.has_answer = True
        if self.scope["method"] == "HEAD" or start["status"] in _WITHOUT_BODY:
            return parts
        if self._left_bytes is None:
            if body:
                parts += [b"%x\r\n" % len(body), body, b"\r\n"]
            if is_last:
                parts.append(b"0\r\n\r\n")
            return parts
        self._left_bytes -= len(body)
        if self._left_bytes < 0 or (is_last and self._left_bytes):
            raise RuntimeError(f"the answer's body differs from its Content-Length by {-self._left_bytes} bytes")
        return [*parts, body]

    def _head_of(self, start: Message, size_bytes: int | None) -> bytes:
        """Return the head of the answer. Its body has ``size_bytes``, or a Content-Length, or is sent in chunks."""
        headers: Sequence[Header] = start.get("headers", ())
        more, length, says_close = [], None, False
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value.lower() == b"close":
                says_close = True
        if start["status"] in _WITHOUT_BODY:
            length = 0
        elif length is None and size_bytes is not None:
            length = size_bytes
            more.append(b"content-length: %d\r\n" % size_bytes)
        elif length is None:
            more.append(b"transfer-encoding: chunked\r\n")
        self._left_bytes = length
        self.keeps_alive = self.keeps_alive and not says_close
        if not self.keeps_alive and not says_close:
            more.append(b"connection: close\r\n")
        return _head(start["status"], [*self._connection.default_headers, *headers], more)

    def _wake(self) -> None:
        news = self._news
        if news is not None and not news.done():
            news.set_result(None)
