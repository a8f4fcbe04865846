"""What Hotrow adds to a connection of redis-py's: one deadline for all of a call, and rows that are not parsed."""

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis import exceptions
from redis._parsers import _HiredisParser
from redis.connection import Connection

from serving.config import RedisTlsConfig

# SO_LINGER, struct linger of socket(7): on, for 0 s.
NO_LINGERING = struct.pack("ii", 1, 0)

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let whatever this thread waits for inside end after ``seconds``, or sooner where an outer block says so."""
    token = _deadline.set(min(time.monotonic() + seconds, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def allowed(seconds: float) -> Iterator[None]:
    """Let what this thread waits for inside take ``seconds``, even where an outer block says less."""
    token = _deadline.set(max(time.monotonic() + seconds, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float:
    """Seconds that this thread may still wait.

    Raises:
        TimeoutError: there are none.
    """
    left = _deadline.get() - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class RowParser(_HiredisParser):
    """Reads replies; those that are rows of one size, one after the other, it does not parse."""

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        """The exception for an error reply, with all of the server's words."""
        error: Exception = super().parse_error(response)
        error.args = (response,)
        return error

    def read_from_socket(self, *args: Any, **options: Any) -> Any:
        """Receive something before the deadline."""
        if self._sock is not None:
            self._sock.settimeout(seconds_left())
        return super().read_from_socket(*args, **options)

    def read_uniform(self, start: bytes, count: int, value_bytes: int) -> NDArray[np.void] | None:
        """Receive exactly as much as ``start`` and ``count`` values make; None, with the reader fed, if it is not that.

        What has come is compared as it comes: a reply with an absent value is shorter, and waiting for more of it would
        never end.
        """
        head = b"$%d\r\n" % value_bytes
        stride = len(head) + value_bytes + 2
        needed = len(start) + count * stride
        if self._reader.has_data():
            return None
        if len(self._buffer) < needed:
            self._buffer = bytearray(needed)
        values = np.ndarray(count, _value_dtype(len(head), value_bytes), self._buffer, offset=len(start))
        received = compared = 0
        while received < needed:
            received += self._receive_into(memoryview(self._buffer)[received:needed])
            whole = max(received - len(start), 0) // stride
            rest_at = len(start) + whole * stride
            is_uniform = (
                start.startswith(bytes(self._buffer[: min(received, len(start))]))
                and (values["head"][compared:whole] == head).all()
                and head.startswith(bytes(self._buffer[rest_at : min(received, rest_at + len(head))]))
            )
            if not is_uniform:
                self._reader.feed(bytes(self._buffer[:received]))
                return None
            compared = whole
        return values["value"]

    def _receive_into(self, room: memoryview) -> int:
        self._sock.settimeout(seconds_left())
        received: int = self._sock.recv_into(room)
        if not received:
            raise exceptions.ConnectionError("the node closed the connection")
        return received


@lru_cache
def _value_dtype(head_bytes: int, value_bytes: int) -> np.dtype[np.void]:
    r"""One value of a reply: ``$<length>\r\n``, its bytes, ``\r\n``."""
    return np.dtype([("head", f"S{head_bytes}"), ("value", f"V{value_bytes}"), ("end", "S2")])


class RowConnection(Connection):
    """A connection of redis-py's that waits no longer than its thread may, and speaks TLS under a name of its own.

    Attributes:
        unread: replies outstanding; a connection with any cannot be used for another command.
        holder: the thread to which its pool has lent it.
    """

    def __init__(self, *, connect_timeout_s: float, tls: ssl.SSLContext | None, tls_name: str, **options: Any) -> None:
        """Take redis-py's options; connect nowhere yet."""
        super().__init__(parser_class=RowParser, **options)
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._tls_name = tls_name
        self.unread = 0
        self.holder: int | None = None

    def connect(self) -> None:
        """Connect and authenticate, all of it within the time of one connection, for the thread that asks its pool."""
        self.holder = get_ident()
        if self._sock is None:
            self.unread = 0
            with within(self._connect_timeout_s):
                self.socket_connect_timeout = self.socket_timeout = seconds_left()
                super().connect()

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there is a reply that nobody asked for, as redis-py looks for before it lends a connection.

        A server that speaks TLS 1.3 sends tickets for later sessions; redis-py would take them for a reply.
        """
        if not super().can_read(timeout):
            return False
        secure = self._sock
        if isinstance(secure, ssl.SSLSocket):
            secure.settimeout(0)
            try:
                secure.recv(1)
            except ssl.SSLWantReadError:
                return False
        return True

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send bytes before the deadline."""
        if self._sock is not None:
            self._sock.settimeout(seconds_left())
        super().send_packed_command(command, check_health)

    def read_values(self, count: int, value_bytes: int) -> NDArray[np.void] | Any:
        """The next reply, of HMGET: the fast path where every value is there and has ``value_bytes`` bytes.

        Returns:
            void[count] of ``value_bytes`` bytes each, strided, valid until the connection is used again; or, where a
            value is absent or has another size, what redis-py's ``read_response`` returns.
        """
        values = self._parser.read_uniform(b"*%d\r\n" % count, count, value_bytes)
        return self.read_response() if values is None else values

    def read_separate(self, count: int, value_bytes: int | None) -> NDArray[np.void] | list[Any]:
        """The next ``count`` replies; of GETs, the same fast path where ``value_bytes`` is given.

        Returns:
            What ``read_values`` does; or the list of replies, with error replies as exceptions.
        """
        values = None if value_bytes is None else self._parser.read_uniform(b"", count, value_bytes)
        return [self._reply_or_error() for _ in range(count)] if values is None else values

    def _reply_or_error(self) -> Any:
        try:
            return self.read_response()
        except exceptions.ResponseError as err:
            return err

    def _connect(self) -> Any:
        connected = super()._connect()
        # Where the network fails, what was sent waits in the system, and still goes out after the connection was given
        # up and closed: an update would come behind a later one, which was acknowledged over another connection.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGERING)
        if self._tls is None:
            return connected
        try:
            connected.settimeout(seconds_left())
            return self._tls.wrap_socket(connected, server_hostname=self._tls_name or None)
        except BaseException:
            connected.close()
            raise


def tls_context(tls: RedisTlsConfig) -> ssl.SSLContext:
    """What a server's certificate must fulfil, and the client's own.

    The certificate must come from one of the given authorities (the system's, where none are given) and, where
    ``server_name`` is given, be for that name. redis-py's own TLS asks for the name of the host only, and reads the
    files at every connection.

    Raises:
        OSError: a file cannot be read, or is not what it should be; the message names it.
    """
    authorities = tls.ca_certificate
    is_folder = authorities is not None and authorities.is_dir()
    with _naming(authorities):
        context = ssl.create_default_context(
            cafile=None if is_folder else authorities, capath=authorities if is_folder else None
        )
    context.check_hostname = bool(tls.server_name)
    if tls.client_certificate is not None:
        with _naming(tls.client_certificate, tls.client_key):
            context.load_cert_chain(tls.client_certificate, tls.client_key, password="")  # else OpenSSL would ask
    return context


@contextmanager
def _naming(*files: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise OSError(f"{', '.join(str(file) for file in files if file)}: {reason_of(err)}") from err


def reason_of(error: BaseException) -> str:
    """What the system or the server said, without redis-py's words around it."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
