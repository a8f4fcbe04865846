"""The TCP sockets of a gRPC server. gRPC does not expose them, so they are found among this process's descriptors."""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import unquote

#: Where Linux's ``tcp_info`` has the bytes that the peer has acknowledged, and the bytes that it has sent.
_TRAFFIC = struct.Struct("120xQQ")


class Traffic(NamedTuple):
    """What a connection has carried so far.

    Attributes:
        taken_bytes: sent bytes that the client has acknowledged.
        received_bytes: bytes that came from the client.
    """

    taken_bytes: int
    received_bytes: int


class ServerSockets:
    """The sockets of this process that belong to one port. Belongs to one thread."""

    def __init__(self, port: int) -> None:
        """Search for the sockets of ``port``."""
        self._port = port
        self._connections: dict[str, int] = {}  # descriptors by client
        self._seen: dict[tuple[int, int, int], str | None] = {}  # clients by descriptor, device and inode

    def find(self) -> set[str]:
        """Find the open connections, and return their clients in the form of ``client_of``.

        It looks closer only at descriptors that are new, because a process may have thousands.
        """
        try:
            descriptors = os.listdir("/proc/self/fd")
        except OSError:  # no descriptor is left: use the known connections
            return set(self._connections)
        before, self._seen, self._connections = self._seen, {}, {}
        for number in map(int, descriptors):
            try:
                status = os.fstat(number)
            except OSError:  # it has been closed
                continue
            identity = (number, status.st_dev, status.st_ino)
            client = before[identity] if identity in before else self._client_of(number)
            self._seen[identity] = client
            if client is not None:
                self._connections[client] = number
        return set(self._connections)

    def traffic(self, client: str) -> Traffic | None:
        """Return what the connection of ``client`` has carried; None if ``find`` has not seen it, or it is closed."""
        number = self._connections.get(client)
        if number is None:
            return None
        with suppress(OSError), _borrowed(number) as connection:
            if _client(connection.getpeername()) == client:
                return Traffic(*_TRAFFIC.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)))
        del self._connections[client]
        return None

    def cut(self, client: str) -> None:
        """End the connection of ``client`` at once."""
        number = self._connections.get(client)
        if number is not None:
            with suppress(OSError), _borrowed(number) as connection:
                if _client(connection.getpeername()) == client:
                    connection.shutdown(socket.SHUT_RDWR)

    def end_listening(self) -> None:
        """Stop listening; gRPC itself can only stop everything. Its descriptors become those of idle sockets."""
        for number in filter(_is_socket, map(int, os.listdir("/proc/self/fd"))):
            with suppress(OSError), _borrowed(number) as borrowed, socket.socket() as idle:
                is_listening = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                own = borrowed.getsockname()
                if is_listening and isinstance(own, tuple) and own[1:2] == (self._port,):
                    os.dup2(idle.fileno(), number, inheritable=False)

    def _client_of(self, number: int) -> str | None:
        if _is_socket(number):
            with suppress(OSError), _borrowed(number) as connection:
                own = connection.getsockname()
                if isinstance(own, tuple) and own[1:2] == (self._port,):
                    return _client(connection.getpeername())
        return None


def client_of(peer: str) -> str:
    """Return the client of a call's ``peer``, such as ``"127.0.0.1:4242"``."""
    return unquote(peer).partition(":")[2]


def _client(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host = name[0].removeprefix("::ffff:")
    return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that stays gRPC's; the family only says how long addresses may be."""
    connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, number)
    try:
        yield connection
    finally:
        connection.detach()


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # it has been closed
        return False
