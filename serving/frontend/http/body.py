"""Reads a request body within limits of its size, its decompressed size and its time to arrive."""

import asyncio
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from serving.errors import (
    LateBodyError,
    OverloadedError,
    PayloadTooLargeError,
    RequestError,
    UnsupportedEncodingError,
)
from serving.frontend.limits import Limits

#: zlib's ``wbits`` for the content encodings that clients send (RFC 1952 and RFC 1950).
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
#: How much of a stream is decompressed at a time.
_PIECE_BYTES = 4096
#: The first byte of a gzip member.
_GZIP_MAGIC = 0x1F
_NO_WEIGHT = re.compile(rb"q\s*=\s*0(\.0*)?")
#: The encoding of a body that is sent as it is.
IDENTITY = b"identity"


class ArrivingBody:
    """A body that arrives in several pieces.

    Attributes:
        chunks: what has arrived.
        deadline: ends the wait.
        is_given_up: whether it must make room for other bodies.
    """

    def __init__(self, limits: Limits) -> None:
        """Wait for the body within ``limits`` from now on."""
        self.chunks = bytearray()
        self.is_given_up = False
        self._limits = limits
        self.deadline = asyncio.timeout(limits.body_timeout_s)

    @property
    def time_s(self) -> float:
        """How long the body may take, as far as it has arrived."""
        return self._limits.body_time_s(len(self.chunks))

    def add(self, chunk: bytes) -> None:
        """Add a piece; a large body gets more time as it arrives."""
        before_s = self.time_s
        self.chunks += chunk
        due_s = self.deadline.when()
        if self.time_s > before_s and due_s is not None and not self.is_given_up and not self.deadline.expired():
            self.deadline.reschedule(due_s + self.time_s - before_s)

    def give_up(self) -> None:
        """End the wait for the body."""
        if not self.deadline.expired():
            self.is_given_up = True
            self.deadline.reschedule(0)


class Arriving:
    """Counts the bytes of bodies that are still arriving. Belongs to one event loop.

    If there are too many bytes, the body that has been arriving longest is given up. So slow clients do not lock out
    other clients.
    """

    def __init__(self, limits: Limits) -> None:
        """Accept bodies within ``limits``; a single body always fits."""
        self.max_bytes = max(limits.max_arriving_bytes, 2 * limits.max_body_bytes)
        self._bytes = 0
        self._bodies: dict[ArrivingBody, None] = {}  # the body that has been arriving longest comes first

    @contextmanager
    def counted(self, body: ArrivingBody) -> Iterator[None]:
        """Count ``body`` until it is complete or abandoned."""
        self._bodies[body] = None
        try:
            yield
        finally:
            self._forget(body)

    def add(self, body: ArrivingBody, chunk: bytes) -> None:
        """Add a piece to ``body``."""
        body.add(chunk)
        if body in self._bodies:
            self._bytes += len(chunk)
        while self._bytes > self.max_bytes:
            longest_arriving = next(iter(self._bodies))
            longest_arriving.give_up()
            self._forget(longest_arriving)

    def _forget(self, body: ArrivingBody) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._bytes -= len(body.chunks)


class ClientDisconnectedError(Exception):
    """The client disconnected before its request was complete. If it closed only one side, it still reads."""


async def read_body(
    receive: Receive, headers: dict[bytes, bytes], limits: Limits, arriving: Arriving, has_arrived: bool = False
) -> bytes:
    """Read a whole body, still with its content encoding.

    Args:
        receive: ASGI's function.
        headers: names are in lower case.
        limits: of the body.
        arriving: counts the bytes of all bodies.
        has_arrived: the whole body has, so there is nothing to wait for.
    """
    encoding_of(headers)  # before anything is read
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limits.max_body_bytes):
        raise PayloadTooLargeError(
            f"the body has {declared[:32].decode()} bytes, but the server accepts {limits.max_body_bytes:,}"
        )
    body: bytes = (await receive())["body"] if has_arrived else await _wait(receive, limits, arriving, declared)
    if len(body) > limits.max_body_bytes:
        raise PayloadTooLargeError(
            f"the body has more than the {limits.max_body_bytes:,} bytes that the server accepts"
        )
    return body


async def _wait(receive: Receive, limits: Limits, arriving: Arriving, declared: bytes) -> bytes:
    arriving_body = ArrivingBody(limits)
    try:
        async with arriving_body.deadline:
            return await _read(receive, arriving_body, limits.max_body_bytes, arriving, declared)
    except TimeoutError as err:
        if arriving_body.is_given_up:
            raise OverloadedError(
                f"more than {arriving.max_bytes:,} bytes of bodies are arriving; this body has been arriving longest"
            ) from err
        raise LateBodyError(f"the body did not arrive within {arriving_body.time_s:g} s") from err


async def _read(receive: Receive, body: ArrivingBody, max_bytes: int, arriving: Arriving, declared: bytes) -> bytes:
    """Return a whole body, or the beginning of a body that is too large."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return bytes(message.get("body", b""))
    with arriving.counted(body):
        while True:
            if message["type"] == "http.disconnect":
                raise _disconnected(len(body.chunks), declared)
            arriving.add(body, message.get("body", b""))
            if not message.get("more_body") or len(body.chunks) > max_bytes:
                return bytes(body.chunks)
            message = await receive()


def _disconnected(size_bytes: int, declared: bytes) -> ClientDisconnectedError:
    of = f" of {int(declared):,}" if declared.isdigit() else ""
    return ClientDisconnectedError(f"the body was cut short after {size_bytes:,}{of} bytes")


def decompress(body: bytes, headers: dict[bytes, bytes], max_bytes: int) -> bytes:
    """Undo a body's content encoding, but unpack at most ``max_bytes``; large bodies take milliseconds."""
    encoding = encoding_of(headers)
    if encoding == IDENTITY:
        return body
    try:
        return _inflate(body, encoding, max_bytes)
    except zlib.error as err:
        raise RequestError(f"the body is not {encoding.decode()}: {err}") from err


def _inflate(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """Unpack a stream; a gzip stream may have several members (RFC 1952, 2.2).

    The stream is read in pieces, because zlib copies everything after a member. That is slow for tiny members.
    """
    plain: list[bytes] = []
    room = max_bytes + 1
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    for begin in range(0, len(body), _PIECE_BYTES):
        piece = body[begin : begin + _PIECE_BYTES]
        while piece:
            if stream.eof:
                if encoding != b"gzip" or piece[0] != _GZIP_MAGIC:
                    raise RequestError(f"the {encoding.decode()} body is too long: bytes follow its end")
                stream = zlib.decompressobj(_WINDOW_BITS[encoding])
            plain.append(stream.decompress(piece, room))
            room -= len(plain[-1])
            if not room:
                raise PayloadTooLargeError(
                    f"the body has more than the {max_bytes:,} bytes that the server accepts, once decompressed"
                )
            piece = stream.unused_data
    if not stream.eof:
        raise RequestError(f"the {encoding.decode()} body is incomplete: it ends too early")
    return b"".join(plain)


def encoding_of(headers: dict[bytes, bytes]) -> bytes:
    """Return the content encoding's name in lower case, or raise UnsupportedEncodingError."""
    encoding = headers.get(b"content-encoding")
    if encoding is None:
        return IDENTITY
    encoding = encoding.strip().lower()
    if encoding != IDENTITY and encoding not in _WINDOW_BITS:
        raise UnsupportedEncodingError(
            f"Content-Encoding: expected gzip, deflate or identity, but {encoding.decode('latin-1')[:32]!r} came"
        )
    return encoding


def accepted_encoding(headers: dict[bytes, bytes]) -> bytes:
    """Return the first encoding of ``Accept-Encoding`` that the server knows, or identity; ``q=0`` refuses one."""
    for entry in headers.get(b"accept-encoding", b"").lower().split(b","):
        name, _, weight = (part.strip() for part in entry.partition(b";"))
        if name in _WINDOW_BITS and not _NO_WEIGHT.fullmatch(weight):
            return name
    return IDENTITY


def compress(body: bytes, encoding: bytes) -> bytes:
    """Apply an encoding that ``accepted_encoding`` returned. Speed counts more than size: answers are numbers."""
    stream = zlib.compressobj(1, wbits=_WINDOW_BITS[encoding])
    return stream.compress(body) + stream.flush()
