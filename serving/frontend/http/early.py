"""Answers while models load: the process is live and not ready. It needs no web framework, which is slow to import."""

import select
import socket
import threading
from contextlib import suppress

from serving.frontend.tls import Tls

_TIMEOUT_S = 5.0
_MOST_HEAD_BYTES = 8 << 10
_MOST_CLIENTS = 64
_LIVE = (b"GET /v2/health/live", b"HEAD /v2/health/live")
_REASON = b'{"error":"the models are being loaded"}'
_ANSWERS = {
    True: b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    False: b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_REASON), _REASON),
}


class EarlyAnswers:
    """Answers the connections of a listening socket until ``close``: 200 to ``live``, 503 to everything else."""

    def __init__(self, listener: socket.socket, tls: Tls | None) -> None:
        """Answer from now on, in threads."""
        self._listener, self._tls = listener, tls
        self._clients = threading.Semaphore(_MOST_CLIENTS)
        self._closing, self._closed = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="early-answers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections. Closing twice is allowed."""
        self._closed.close()
        self._thread.join()
        self._closing.close()

    def _accept(self) -> None:
        while self._closing not in select.select((self._listener, self._closing), (), ())[0]:
            with suppress(OSError):  # the client has left, or another process was faster
                client, _ = self._listener.accept()
                if self._clients.acquire(blocking=False):
                    threading.Thread(target=self._answer, args=(client,), name="early-answer", daemon=True).start()
                else:
                    client.close()

    def _answer(self, client: socket.socket) -> None:
        try:
            client.settimeout(_TIMEOUT_S)
            with client, suppress(OSError), self._secured(client) as connection:
                head = b""
                while b"\r\n\r\n" not in head and len(head) < _MOST_HEAD_BYTES:
                    received = connection.recv(_MOST_HEAD_BYTES)
                    if not received:
                        return
                    head += received
                target = head.partition(b" HTTP/")[0].partition(b"?")[0]
                connection.sendall(_ANSWERS[target in _LIVE])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)  # unread bytes would reset the connection, and the answer could be lost
        finally:
            self._clients.release()

    def _secured(self, client: socket.socket) -> socket.socket:
        return client if self._tls is None else self._tls.context.wrap_socket(client, server_side=True)
