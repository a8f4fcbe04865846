"""Accepts connections, as many as the limits and the process's descriptors allow."""

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import suppress

from serving.frontend.codes import RETRY_AFTER_S
from serving.frontend.http.connection import Connection, OpenConnections
from serving.frontend.http.request import error_bytes
from serving.frontend.tls import Tls

#: How many connections one turn of the event loop accepts. Other workers may accept the next ones.
_ACCEPTED_PER_TURN = 8
#: How long the acceptor waits if the process has no descriptor or no memory for a connection.
_PAUSE_S = 0.1
#: Descriptors that are left for files, models and other sockets; at most this share of the limit.
_SPARE_DESCRIPTORS = 128
_SPARE_RATIO = 0.25


class Acceptor:
    """Accepts the connections of one listening socket. Connections beyond the limits get a 503 and are closed.

    The kernel gives each connection the smallest free descriptor. So a large descriptor means that few are left,
    whatever uses the others. Connections whose TLS has not begun count too.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], Connection],
        open_connections: OpenConnections,
        tls: Tls | None,
    ) -> None:
        """Accept connections of ``listener`` from now on; ``connect`` makes their protocol."""
        self._listener = listener
        self._connect = connect
        self._open_connections = open_connections
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._listen()

    def close(self) -> None:
        """Accept no more connections."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """See ``asyncio.Server``."""

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):  # ConnectionError: the client has left
                return
            except OSError as err:
                self._open_connections.warn("cannot accept a connection: %s", err.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_S, self._listen)
                return
            client.setblocking(False)
            reason = self._refusal(client.fileno())
            if reason:
                self._refuse(client, reason)
            else:
                self._open(client)

    def _refusal(self, descriptor: int) -> str:
        """Return why a connection is refused, or nothing."""
        max_connections = self._open_connections.limits.max_connections
        if len(self._open_connections) >= max_connections:
            return f"{max_connections:,} connections are open; the server accepts no more"
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptor >= descriptors - min(_SPARE_DESCRIPTORS, int(_SPARE_RATIO * descriptors)):
            return f"the server may open {descriptors:,} files (ulimit -n), which leaves none for the connection"
        return ""

    def _refuse(self, client: socket.socket, reason: str) -> None:
        self._open_connections.warn("refusing connections: %s", reason)
        with client, suppress(OSError):
            if self._tls is None:  # the answer of a TLS connection would need a handshake
                client.send(error_bytes(503, reason, [(b"retry-after", b"%d" % RETRY_AFTER_S)]))
                client.shutdown(socket.SHUT_WR)
                client.recv(1 << 16)  # unread bytes would reset the connection and lose the answer

    def _open(self, client: socket.socket) -> None:
        connection = self._connect()
        self._open_connections.add(connection)
        task = self._loop.create_task(self._connected(connection, client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connected(self, connection: Connection, client: socket.socket) -> None:
        timeout_s = self._open_connections.limits.head_timeout_s if self._tls else None
        context = self._tls.context if self._tls else None  # read each time, because certificates change
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=context, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # the client has gone, or its TLS failed; the loop has closed the socket
            self._open_connections.remove(connection)
