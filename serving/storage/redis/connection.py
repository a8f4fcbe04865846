"""What Hotrow adds to redis-py's connections to a node.

A connection has a deadline, knows the node's identity and does not parse rows. A pool lends it to one thread at a time.
"""

import re
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from queue import Empty
from threading import get_ident
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis import exceptions

# redis-py documents no parser to extend, so pyproject.toml has an upper bound. The tests of the store run the parser.
from redis._parsers import _HiredisParser
from redis.connection import BlockingConnectionPool, Connection

from serving.config import RedisConfig, RedisTlsConfig

_ASKS_FOR_TLS = "if the server has no TLS, remove enable_tls from the volatile_db of the ps.json"
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
# What Redis 6, and Redis 7 and later, write around the reason of a command that failed in a script.
_SCRIPT_BEFORE = re.compile(r"ERR Error running script \(call to f_\w+\): (?:@?user_script: ?\d+: -?)*")
_SCRIPT_AFTER = re.compile(r" script: \w+, on @\w+:\d+\.?$")
# SO_LINGER, struct linger of socket(7): on, for 0 s.
NO_LINGERING = struct.pack("ii", 1, 0)


def seconds_until(deadline: float) -> float:
    """Seconds until a time of ``time.monotonic``.

    Raises:
        TimeoutError: it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class RowParser(_HiredisParser):
    """Reads replies, but does not parse rows of one size that follow each other.

    Attributes:
        deadline: when waiting for a reply ends, by ``time.monotonic``.
    """

    deadline = float("inf")

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        """The exception for an error reply, with the server's reason: see ``reason_of_reply``."""
        response = reason_of_reply(response)
        error: Exception = super().parse_error(response)
        error.args = (response,)
        return error

    def read_from_socket(self, *args: Any, **options: Any) -> Any:
        """Receive something before the deadline."""
        if self._sock is not None:
            self._sock.settimeout(seconds_until(self.deadline))
        return super().read_from_socket(*args, **options)

    def read_uniform(self, start: bytes, count: int, value_bytes: int) -> NDArray[np.void] | None:
        """Receive exactly ``start`` and ``count`` values; None, with the reader fed, if the reply is another.

        The bytes are compared as they arrive. A reply with an absent value is shorter, so waiting for all bytes would
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
        self._sock.settimeout(seconds_until(self.deadline))
        received: int = self._sock.recv_into(room)
        if not received:
            raise exceptions.ConnectionError("the node closed the connection")
        return received


@lru_cache
def _value_dtype(head_bytes: int, value_bytes: int) -> np.dtype[np.void]:
    r"""One value of a reply: ``$<length>\r\n``, its bytes, ``\r\n``."""
    return np.dtype([("head", f"S{head_bytes}"), ("value", f"V{value_bytes}"), ("end", "S2")])


class RowConnection(Connection):
    """A connection of redis-py that has a deadline, and speaks TLS with a server name of its own.

    Attributes:
        unread: outstanding replies; a connection with any cannot be used for another command.
        holder: the thread to which the pool has lent it.
        run_id: the identity of the node's process; a restarted node has another.
    """

    def __init__(self, *, connect_timeout_s: float, tls: ssl.SSLContext | None, tls_name: str, **options: Any) -> None:
        """Take redis-py's options; connect nowhere yet."""
        super().__init__(parser_class=RowParser, socket_timeout=connect_timeout_s, **options)
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._tls_name = tls_name
        self.unread = 0
        self.holder: int | None = None
        self.run_id = ""
        self.expire_at(float("inf"))

    def expire_at(self, deadline: float) -> None:
        """Let every wait end at ``deadline``, by ``time.monotonic``."""
        self._deadline = self._parser.deadline = deadline

    def connect(self) -> None:
        """See ``connect_check_health``; redis-py would try twice, and take twice the connect timeout."""
        self.connect_check_health(retry_socket_connect=False)

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        """Connect and authenticate, if that is not done: within the connect timeout, and before the deadline."""
        if self._sock is not None:
            return
        self.unread, self.run_id = 0, ""
        deadline = self._deadline
        self.expire_at(min(deadline, time.monotonic() + self._connect_timeout_s))
        try:
            super().connect_check_health(*args, **options)
        except BaseException:
            self.disconnect()
            raise
        finally:
            self.expire_at(deadline)

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Authenticate, and ask for the node's identity."""
        super().on_connect_check_health(check_health)
        self.send_command("INFO", "server", check_health=False)
        try:
            self.run_id = run_id_of(self.read_response())
        except exceptions.NoPermissionError as err:
            reason = "Hotrow needs the right +info to notice that a node was restarted"
            raise exceptions.NoPermissionError(f"{err}; {reason}") from err

    def can_read(self, timeout: float = 0) -> bool:
        """Whether an unexpected reply has arrived; redis-py asks before it lends a connection.

        A TLS 1.3 server sends tickets for later sessions, which redis-py would take for a reply.
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
            self._sock.settimeout(seconds_until(self._deadline))
        super().send_packed_command(command, check_health)

    def read_values(self, count: int, value_bytes: int) -> NDArray[np.void] | Any:
        """The next reply, of HMGET: the fast path if every value is there and has ``value_bytes`` bytes.

        Returns:
            void[count] of ``value_bytes`` bytes each, strided, valid until the connection is used again; or, if a
            value is absent or has another size, what redis-py's ``read_response`` returns.
        """
        values = self._parser.read_uniform(b"*%d\r\n" % count, count, value_bytes)
        return self.read_response() if values is None else values

    def _connect(self) -> Any:
        self.socket_connect_timeout = seconds_until(self._deadline)
        try:
            connected = super()._connect()
        except OSError as err:
            err.__traceback__ = None  # redis-py keeps the error in a variable of a frame there
            raise
        # If the network fails, sent bytes wait in the system and would still go out after the connection was closed.
        # An old update would arrive after a later update that was acknowledged over another connection.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGERING)
        if self._tls is None:
            return connected
        try:
            connected.settimeout(seconds_until(self._deadline))
            with _naming_tls_key():
                return self._tls.wrap_socket(connected, server_hostname=self._tls_name or None)
        except BaseException:
            connected.close()
            raise


class NoConnectionError(exceptions.ConnectionError):
    """No connection is available; the message says why."""


class BusyError(NoConnectionError):
    """Other threads held all connections until the deadline."""


class RowPool(BlockingConnectionPool):
    """redis-py's pool, made safe: no thread touches a connection that another thread holds."""

    def get_connection(self, *_: Any, **__: Any) -> Any:
        """See ``lend``; redis-py calls this."""
        return self.lend(time.monotonic() + self.timeout)

    def lend(self, deadline: float) -> RowConnection:
        """Lend a connection whose every wait ends at ``deadline``, by ``time.monotonic``.

        Raises:
            BusyError: every connection was lent until then.
        """
        self._checkpid()
        try:
            free: RowConnection | None = self.pool.get(timeout=max(deadline - time.monotonic(), 0))
        except Empty as err:
            raise BusyError(f"all {self.max_connections} connections are busy") from err
        connection: RowConnection = free or self.make_connection()
        connection.holder = get_ident()
        connection.expire_at(deadline)
        try:
            connection.connect()
            if not _is_idle(connection):
                connection.disconnect()
                connection.connect()
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: Any) -> None:
        """Take a connection back, once.

        redis-py's cluster pipeline returns connections twice if it finds no node to learn the slots from. After the
        first return another thread may hold the connection, and a third thread must not get it too.
        """
        if connection.holder == get_ident():
            connection.holder = None
            super().release(connection)

    def disconnect_free_connections(self, moving_address_src: str | None = None) -> None:
        """Close the idle connections.

        redis-py may close a connection that was lent in the meantime. Here the idle connections are borrowed first.
        """
        with self._all_free() as connections:
            for connection in connections:
                connection.disconnect()

    @contextmanager
    def _all_free(self) -> Iterator[list[RowConnection]]:
        taken: list[RowConnection | None] = []
        try:
            while True:
                taken.append(self.pool.get_nowait())
        except Empty:
            yield [connection for connection in taken if connection is not None]
        finally:
            for connection in reversed(taken):
                self.pool.put_nowait(connection)


def _is_idle(connection: RowConnection) -> bool:
    """Whether a connection is open, and no unexpected reply has arrived."""
    try:
        return not connection.can_read()
    except (exceptions.RedisError, OSError):
        return False


def pool_of(config: RedisConfig, tls: ssl.SSLContext | None, **options: Any) -> RowPool:
    """A pool of at most ``num_node_connections`` connections, with redis-py's ``options``: at least host and port."""
    return RowPool(
        connection_class=RowConnection,
        max_connections=config.num_node_connections,
        timeout=config.timeout_ms / 1000,
        username=None if config.user_name == "default" else config.user_name,
        password=config.password.get_secret_value() or None,
        driver_info=None,  # redis-py would send its name and version, which takes a right and two round trips
        connect_timeout_s=config.connect_timeout_ms / 1000,
        tls=tls,
        tls_name=config.tls.server_name if config.tls else "",
        **options,
    )


@contextmanager
def _naming_tls_key() -> Iterator[None]:
    """Say which key of ``ps.json`` asks for TLS, if the server does not seem to speak it."""
    try:
        yield
    except TimeoutError as err:  # a Redis without TLS may wait for the end of a command
        raise TimeoutError(f"no answer to the TLS handshake; {_ASKS_FOR_TLS}") from err
    except ssl.SSLError as err:
        if err.reason != "WRONG_VERSION_NUMBER":
            raise
        raise OSError(f"the server did not answer in TLS; {_ASKS_FOR_TLS}") from err


def run_id_of(info: Any) -> str:
    """The node's identity in the reply of ``INFO server``.

    Raises:
        ConnectionError: the reply does not have it.
    """
    lines = info.decode().splitlines() if isinstance(info, bytes) else []
    run_id = next((line.removeprefix("run_id:") for line in lines if line.startswith("run_id:")), "")
    if not run_id:
        raise exceptions.ConnectionError("INFO server reports no run_id")
    return run_id


def tls_context(tls: RedisTlsConfig) -> ssl.SSLContext:
    """The requirements on a server's certificate, and the client's own certificate.

    The certificate must come from one of the given authorities, or the system's if none are given. It must be for
    ``server_name``, if that is given. redis-py's own TLS checks the host's name only, and reads the files at every
    connection.

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


def reason_of_reply(reply: str) -> str:
    """The reason in an error reply, without what the command sent, and without the place in a script and its hash.

    A server that does not know a command, such as HELLO with a password, repeats its arguments.
    """
    return _SCRIPT_AFTER.sub("", _SCRIPT_BEFORE.sub("", _ARGUMENTS.sub("", reply)))


def reason_of(error: BaseException) -> str:
    """The message of the system or the server, without redis-py's words around it."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
