"""Reading a request body within bounds: its size, its size once decompressed, and the time it may take to arrive."""

import asyncio
import zlib
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope

from serving.errors import PayloadTooLargeError, RequestError, UnsupportedEncodingError

#: Key of the ASGI scope that the server sets once it knows that the rest of a body will never come.
CUT_SHORT = "hotrow.body_cut_short"

#: zlib's ``wbits`` for the content encodings that clients send (RFC 1952 and RFC 1950).
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the front end accepts.

    Attributes:
        max_body_bytes: largest body, both as it arrives and once decompressed.
        max_inflight: most predict requests in hand at a time; one more is answered 503.
        body_timeout_s: longest time a body may take to arrive.
    """

    max_body_bytes: int = 16 << 20
    max_inflight: int = 256
    body_timeout_s: float = 30.0


class ClientDisconnectedError(Exception):
    """The client went away before its request was complete: there is nobody left to answer."""


async def read_body(scope: Scope, receive: Receive, headers: dict[bytes, bytes], limits: Limits) -> bytes:
    """Read a whole body, as it was sent; ``decompress`` undoes its content encoding.

    Args:
        scope: the request's ASGI scope.
        receive: its ASGI receive function.
        headers: its headers, names in lower case.
        limits: what to accept.

    Raises:
        PayloadTooLargeError: the body exceeds ``limits.max_body_bytes``.
        UnsupportedEncodingError: an unknown Content-Encoding.
        RequestError: the body was cut short, or took too long.
        ClientDisconnectedError: the client is gone.
    """
    _encoding(headers)  # before anything is read
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limits.max_body_bytes):
        raise PayloadTooLargeError(
            f"the body has {declared[:32].decode()} bytes, the server accepts {limits.max_body_bytes:,}"
        )
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read_chunks(receive, limits.max_body_bytes)
    except TimeoutError as err:
        raise RequestError(f"the body did not arrive within {limits.body_timeout_s:g} s") from err
    if len(body) > limits.max_body_bytes:
        raise PayloadTooLargeError(
            f"the body has more than the {limits.max_body_bytes:,} bytes that the server accepts"
        )
    if CUT_SHORT in scope:
        of = f" of {int(declared):,}" if declared.isdigit() else ""
        raise RequestError(f"the body was cut short after {len(body):,}{of} bytes")
    return body


async def _read_chunks(receive: Receive, max_bytes: int) -> bytes:
    """Collect a body's chunks, stopping as soon as they are more than ``max_bytes``."""
    message = await receive()
    body = _chunk(message)
    if not message.get("more_body"):
        return body
    chunks = bytearray(body)
    while message.get("more_body") and len(chunks) <= max_bytes:
        message = await receive()
        chunks += _chunk(message)
    return bytes(chunks)


def _chunk(message: Message) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientDisconnectedError
    chunk: Any = message.get("body", b"")
    return bytes(chunk)


def decompress(body: bytes, headers: dict[bytes, bytes], max_bytes: int) -> bytes:
    """Undo a body's content encoding. Takes milliseconds for large bodies.

    Raises:
        PayloadTooLargeError: what comes out exceeds ``max_bytes``; no more than that is ever unpacked.
        UnsupportedEncodingError: an unknown Content-Encoding.
        RequestError: the body is not what its Content-Encoding says.
    """
    encoding = _encoding(headers)
    if encoding == b"identity":
        return body
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        plain = stream.decompress(body, max_bytes + 1)
    except zlib.error as err:
        raise RequestError(f"the body is not {encoding.decode()}: {err}") from err
    if len(plain) > max_bytes:
        raise PayloadTooLargeError(
            f"the body has more than the {max_bytes:,} bytes that the server accepts, once decompressed"
        )
    if not stream.eof or stream.unused_data:
        what = "bytes follow its end" if stream.eof else "it ends too early"
        raise RequestError(f"the body is not whole {encoding.decode()}: {what}")
    return plain


def _encoding(headers: dict[bytes, bytes]) -> bytes:
    encoding = headers.get(b"content-encoding")
    if encoding is None:
        return b"identity"
    encoding = encoding.strip().lower()
    if encoding != b"identity" and encoding not in _WINDOW_BITS:
        raise UnsupportedEncodingError(
            f"Content-Encoding: expected gzip, deflate or identity, but {encoding.decode('latin-1')[:32]!r} came"
        )
    return encoding
