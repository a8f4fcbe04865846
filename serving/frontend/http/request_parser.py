"""Splits the bytes of a connection into requests, one at a time."""

from dataclasses import dataclass
from typing import Protocol

import httptools

#: Largest head of a request: its first line and its headers.
MAX_HEAD_BYTES = 64 << 10

#: Most headers of a request.
MAX_HEADERS = 100

_LINE_END = b"\r\n"
_BLANK_LINE = 2 * _LINE_END
_MOST_BYTES_AT_ONCE = 4 << 10  # of heads and chunks
_SHOWN_BYTES = 32


class RefusedBytesError(Exception):
    """The bytes are not a request that the server accepts, so nothing after them can be parsed."""

    def __init__(self, code: int, message: str) -> None:
        """Keep the status code and the message of the answer."""
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the headers of a request.

    Attributes:
        method: such as ``"POST"``.
        path: as sent; its percent signs are not decoded.
        query: what follows the path and a question mark.
        version: ``"1.0"`` or ``"1.1"``.
        headers: names in lower case.
        keeps_alive: whether the client may send another request on the connection.
        expects_continue: whether the client waits for ``100 Continue`` before it sends the body.
    """

    method: str
    path: bytes
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keeps_alive: bool
    expects_continue: bool


class ParserEvents(Protocol):
    """Receives what the parser finds."""

    def on_head(self, head: Head) -> None:
        """A head is complete."""

    def on_body(self, body: bytes) -> None:
        """A piece of the body has arrived."""

    def on_end(self) -> None:
        """The request is whole."""


class RequestParser:
    """httptools' parser, which stops at the end of each request and ignores requests to change the protocol.

    httptools parses all bytes that it gets, so it must not get bytes after the end of a request. It gets a body of
    known length by its length. It gets other bytes up to the next blank line, which ends heads and chunked bodies.

    Attributes:
        structure_bytes: how many bytes were parsed, except bodies of known length. They take most of the time.
    """

    def __init__(self, events: ParserEvents) -> None:
        """Report to ``events``."""
        self._events = events
        self.structure_bytes = 0
        self._begin()
        # Bytes since a head was complete or a piece of a body was found: an unfinished head, trailers or chunk
        # extensions. httptools keeps these bytes, so they need a bound.
        self._unfinished_bytes = 0
        self._has_head = False  # the head is complete, and the request is not
        self._body_bytes = 0  # of a request with a head: bytes that the body still has; 0 if it has no length
        self._tail = b""  # the last bytes, if a blank line may have begun in them
        self._may_begin_empty = True  # an empty line may come before a request, as some clients end a body with it

    def close(self) -> None:
        """Release the callbacks, which form a reference cycle."""
        del self._parser, self._events

    @property
    def is_between_requests(self) -> bool:
        """Whether no byte of a next request has been parsed."""
        return not self._unfinished_bytes

    def feed(self, data: bytes, begin: int) -> int:
        """Parse ``data`` from ``begin`` on, at most to the end of a request; return where the parser stopped.

        Raises:
            RefusedBytesError: the parser cannot go on.
        """
        if self._may_begin_empty:
            self._may_begin_empty = False
            if data.startswith(_LINE_END, begin):
                return begin + len(_LINE_END)
        is_of_known_length = self._has_head and self._body_bytes > 0
        end = begin + self._body_bytes if is_of_known_length else self._after_blank_line(data, begin)
        piece = memoryview(data)[begin:end]
        size_bytes = len(piece)
        if is_of_known_length:
            self._body_bytes -= size_bytes
        else:
            self.structure_bytes += size_bytes
            self._unfinished_bytes += size_bytes
            if self._unfinished_bytes > MAX_HEAD_BYTES and not self._has_head:
                raise _too_large("head")
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._parse_head_without_upgrade()
        except httptools.HttpParserCallbackError as err:
            raise err.__context__ or err from None
        except httptools.HttpParserError as err:
            begins_head = not self._has_head and self._unfinished_bytes == size_bytes
            raise _not_http(err, _wrong_line(bytes(piece)) if begins_head else b"", self._has_head) from None
        if self._unfinished_bytes > MAX_HEAD_BYTES:
            raise _too_large("trailers or chunk extensions")
        return begin + size_bytes

    def _after_blank_line(self, data: bytes, begin: int) -> int:
        """Return where the first blank line of ``data`` ends, or a place before."""
        tail, self._tail = self._tail, b""
        if tail:
            seam = tail + data[begin : begin + len(_BLANK_LINE) - 1]
            found = seam.find(_BLANK_LINE)
            if found >= 0:
                return begin + found + len(_BLANK_LINE) - len(tail)
        end = min(len(data), begin + _MOST_BYTES_AT_ONCE)
        found = data.find(_BLANK_LINE, begin, end)
        if found >= 0:
            return found + len(_BLANK_LINE)
        self._tail = (tail + data[max(begin, end - 3) : end])[-3:]
        return end

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def _parse_head_without_upgrade(self) -> None:
        """Parse the head again without its ``Upgrade``, which a server may ignore (RFC 9110, 7.8).

        httptools takes the bytes behind such a head for another protocol.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise RefusedBytesError(501, "CONNECT: the server is not a proxy")
        lines = [b"%s %s HTTP/%s" % (method, self._target, self._parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self._headers if header[0] != b"upgrade"]
        self._begin()
        self._parser.feed_data(b"\r\n".join(lines) + _BLANK_LINE)

    # httptools' callbacks. It refuses a request with two lengths, or with a length and chunks.

    def on_message_begin(self) -> None:
        """See httptools' callbacks."""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body_bytes = 0
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        """See httptools' callbacks."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools' callbacks."""
        if self._has_head:  # a trailer
            return
        if len(self._headers) == MAX_HEADERS:
            raise RefusedBytesError(431, f"the request has more than the {MAX_HEADERS} headers that the server accepts")
        name = name.lower()
        self._headers.append((name, value))
        if name == b"content-length":
            self._body_bytes = int(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                came = value[:_SHOWN_BYTES].decode("latin-1")
                raise RefusedBytesError(501, f"Transfer-Encoding: expected chunked, got {came!r}")
            if self._parser.get_http_version() == "1.0":  # whose proxies may not know chunks (RFC 9112, 6.1)
                raise RefusedBytesError(400, "Transfer-Encoding: expected HTTP/1.1, got HTTP/1.0")
        elif name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = self._parser.get_http_version() != "1.0"  # RFC 9110, 10.1.1

    def on_headers_complete(self) -> None:
        """See httptools' callbacks."""
        parser = self._parser
        if parser.should_upgrade():
            return
        self._has_head = True
        self._unfinished_bytes = 0
        if b"#" in self._target:  # clients never send a fragment; a proxy may take the fragment for a part of the path
            raise RefusedBytesError(400, "the request's path has the character '#'")
        try:
            url = httptools.parse_url(self._target)
        except httptools.HttpParserInvalidURLError as err:
            raise _not_http(err, self._target) from None
        if url.host is not None:  # an absolute form; its authority replaces the header (RFC 9112, 3.2.2)
            self._headers = [header for header in self._headers if header[0] != b"host"]
            self._headers.append((b"host", _authority(url.host, url.port)))
        version = parser.get_http_version()
        keeps_alive = version != "1.0" and parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        path, query = url.path or b"/", url.query or b""
        head = Head(method, path, query, version, self._headers, keeps_alive, self._expects_continue)
        self._events.on_head(head)

    def on_body(self, body: bytes) -> None:
        """See httptools' callbacks."""
        self._unfinished_bytes = 0
        self._events.on_body(body)

    def on_message_complete(self) -> None:
        """See httptools' callbacks."""
        if self._has_head:
            self._has_head = False
            self._unfinished_bytes = 0
            self._tail = b""
            self._may_begin_empty = True
            self._events.on_end()


def _too_large(what: str) -> RefusedBytesError:
    return RefusedBytesError(
        431, f"the request's {what} has more than the {MAX_HEAD_BYTES:,} bytes that the server accepts"
    )


def _not_http(err: Exception, came: bytes, is_body: bool = False) -> RefusedBytesError:
    """Return the error of bytes that are not HTTP; ``came`` is the wrong line, or empty if it is not known."""
    dots = "..." if len(came) > _SHOWN_BYTES else ""
    shown = f", got {str(came[:_SHOWN_BYTES])[1:]}{dots}" if came else ""
    return RefusedBytesError(400, f"expected {'a chunk of a body' if is_body else 'HTTP/1.1'}{shown}: {err}")


def _wrong_line(head: bytes) -> bytes:
    """Return the line at which httptools refuses a head that it has refused."""
    parser = httptools.HttpRequestParser(object())
    for line in head.splitlines(keepends=True):
        try:
            parser.feed_data(line)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return line.rstrip(b"\r\n") or head
    return head


def _authority(host: bytes, port: int | None) -> bytes:
    name = b"[%s]" % host if b":" in host else host
    return name if port is None else b"%s:%d" % (name, port)
