"""One connection to one Redis node: what is sent, and how its replies are read before a deadline."""

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.config import RedisConfig, RedisTlsConfig
from serving.errors import MissingExtraError

READ_BYTES = 65536
_INCOMPLETE = object()


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """``host:port``, as in messages and in ``ps.json``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedisNodeError(Exception):
    """A node did not answer, or answered with an error; the store makes a StoreError of it."""

    def __init__(self, address: Address, reason: str, is_unreachable: bool = False) -> None:
        """Name the node, what happened, and whether no connection to it could be opened."""
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason
        self.is_unreachable = is_unreachable


def import_hiredis() -> Any:
    """The ``hiredis`` module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import hiredis
    except ModuleNotFoundError as err:
        raise MissingExtraError("hiredis", "redis", "a volatile_db of type redis_cluster") from err
    return hiredis


def tls_context(tls: RedisTlsConfig) -> ssl.SSLContext:
    """What a server's certificate must fulfil, and the client's own.

    The certificate must come from one of the given authorities (the system's, where none are given) and, where
    ``server_name`` is given, be for that name.

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
        raise OSError(f"{', '.join(str(file) for file in files if file)}: {_reason(err)}") from err


def seconds_left(deadline: float) -> float:
    """Seconds until ``deadline``, a time of ``time.monotonic``.

    Raises:
        TimeoutError: there are none.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class RedisConnection:
    """A socket, authenticated, with replies in the order of commands. For one thread at a time.

    After an error, or while a reply is outstanding, ``is_reusable`` is False and the connection can only be closed: no
    reply is ever taken for that of another command.
    """

    def __init__(self, address: Address, config: RedisConfig, tls: ssl.SSLContext | None, deadline: float) -> None:
        """Connect and authenticate.

        Raises:
            RedisNodeError: the node cannot be reached, or refuses the user.
        """
        hiredis = import_hiredis()
        self.address = address
        self._reply_error: type[Exception] = hiredis.ReplyError
        self._protocol_error: type[Exception] = hiredis.ProtocolError
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._buffer = bytearray(READ_BYTES)
        self._outstanding = 0
        self._is_broken = False
        self.waited_in_vain_s = 0.0  # for the reply that did not come
        name = config.tls.server_name if config.tls else None
        connect_deadline = min(deadline, time.monotonic() + config.connect_timeout_ms / 1000)
        try:
            self._socket = _connected(address, tls, name, connect_deadline)
        except OSError as err:
            raise RedisNodeError(address, f"cannot connect: {_reason(err)}", is_unreachable=True) from err
        try:
            self._authenticate(config, connect_deadline, hiredis.pack_command)
        except BaseException:
            self.close()
            raise

    @property
    def is_reusable(self) -> bool:
        """Whether the connection is sound and no reply is outstanding."""
        return not self._is_broken and not self._outstanding

    def send(self, payloads: Sequence[bytes], deadline: float) -> None:
        """Send commands, one payload each.

        Raises:
            RedisNodeError: the node does not take them.
        """
        self._outstanding += len(payloads)
        try:
            self._socket.settimeout(seconds_left(deadline))
            self._socket.sendall(b"".join(payloads))
        except OSError as err:
            raise self._broken(f"cannot send: {_reason(err)}") from err

    def read_reply(self, deadline: float) -> Any:
        """The next reply: bytes, int, None, a list of these, or hiredis's ReplyError, which is returned, not raised.

        Raises:
            RedisNodeError: it does not come whole before ``deadline``.
        """
        try:
            while (reply := self._reader.gets()) is _INCOMPLETE:
                received = self._receive_into(memoryview(self._buffer)[:READ_BYTES], deadline)
                self._reader.feed(self._buffer, 0, received)
        except self._protocol_error as err:
            raise self._broken(f"not a Redis reply: {err}") from err
        self._outstanding -= 1
        return reply

    def read_values(self, count: int, value_bytes: int, deadline: float) -> NDArray[np.void] | Any:
        """The next reply, of HMGET: the fast path where every value is there and has ``value_bytes`` bytes.

        Returns:
            void[count] of ``value_bytes`` bytes each, strided, valid until the connection is used again; or, where a
            value is absent or has another size, what ``read_reply`` returns.
        """
        if not self._reader.has_data():
            values = self._read_uniform(count, value_bytes, deadline)
            if values is not None:
                self._outstanding -= 1
                return values
        return self.read_reply(deadline)

    def close(self) -> None:
        """Close the socket."""
        self._is_broken = True
        self._socket.close()

    def _read_uniform(self, count: int, value_bytes: int, deadline: float) -> NDArray[np.void] | None:
        """Receive exactly as much as ``count`` values make; None, with all of it fed to the reader, if they are not.

        What has come is compared as it comes: a reply with an absent value is shorter, and waiting for more of it would
        never end.
        """
        start, head = b"*%d\r\n" % count, b"$%d\r\n" % value_bytes
        stride = len(head) + value_bytes + 2
        needed = len(start) + count * stride
        if len(self._buffer) < needed:
            self._buffer = bytearray(needed)
        values = np.ndarray(count, _value_dtype(len(head), value_bytes), self._buffer, offset=len(start))
        received = compared = 0
        while received < needed:
            received += self._receive_into(memoryview(self._buffer)[received:needed], deadline)
            whole = max(received - len(start), 0) // stride
            rest_at = len(start) + whole * stride
            is_uniform = (
                start.startswith(bytes(self._buffer[: min(received, len(start))]))
                and (values["head"][compared:whole] == head).all()
                and head.startswith(bytes(self._buffer[rest_at : min(received, rest_at + len(head))]))
            )
            if not is_uniform:
                self._reader.feed(self._buffer, 0, received)
                return None
            compared = whole
        return values["value"]

    def _receive_into(self, room: memoryview, deadline: float) -> int:
        began = time.monotonic()
        try:
            self._socket.settimeout(seconds_left(deadline))
            received = self._socket.recv_into(room)
        except OSError as err:
            if isinstance(err, TimeoutError):
                self.waited_in_vain_s = time.monotonic() - began
            raise self._broken(f"no reply: {_reason(err)}") from err
        if not received:
            raise self._broken("the node closed the connection")
        return received

    def _authenticate(self, config: RedisConfig, deadline: float, pack_command: Any) -> None:
        password = config.password.get_secret_value()
        if not password and config.user_name == "default":
            return
        user = () if config.user_name == "default" else (config.user_name,)
        self.send([pack_command(("AUTH", *user, password))], deadline)
        reply = self.read_reply(deadline)
        if isinstance(reply, self._reply_error):
            raise RedisNodeError(self.address, f"refuses user {config.user_name!r}: {reply}")

    def _broken(self, reason: str) -> RedisNodeError:
        self.close()
        return RedisNodeError(self.address, reason)


def _connected(address: Address, tls: ssl.SSLContext | None, name: str | None, deadline: float) -> socket.socket:
    connected = socket.create_connection(address, timeout=seconds_left(deadline))
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None:
            return connected
        connected.settimeout(seconds_left(deadline))
        return tls.wrap_socket(connected, server_hostname=name or None)
    except BaseException:
        connected.close()
        raise


@lru_cache
def _value_dtype(head_bytes: int, value_bytes: int) -> np.dtype[np.void]:
    r"""One value of a reply: ``$<length>\r\n``, its bytes, ``\r\n``."""
    return np.dtype([("head", f"S{head_bytes}"), ("value", f"V{value_bytes}"), ("end", "S2")])


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
