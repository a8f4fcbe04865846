"""Running the application: uvicorn, with the few things it leaves undone when a client or an operator stops early."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.errors import ConfigError
from serving.frontend.body import CUT_SHORT

#: After the signal to stop, how long an idle connection may still bring a request that was already on its way.
LINGER_S = 0.25
#: How long a connection may be idle. Long, as clients keep a pool of connections and trip over closed ones.
KEEP_ALIVE_S = 75


class OneWrite:
    """A transport that sends what is written to it in one turn of the event loop with one system call.

    uvicorn writes an answer's head and its body one after the other, and uvloop sends each at once. For a small answer
    the second system call, and waking the client twice, cost about a tenth of the requests per second.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Write to ``transport``, which belongs to ``loop``."""
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """See ``asyncio.WriteTransport.write``."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """See ``asyncio.BaseTransport.close``."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """One client connection.

    Differs from uvicorn's in four ways. An answer is one write. A client that never finishes a request's head does not
    keep its connection for ever. A client that closes its side in the middle of a body gets an answer that says so. And
    a connection that is idle when the server is told to stop stays open for a moment: what the client sent before it
    could know is answered, with ``Connection: close``, instead of being reset.
    """

    _stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``HttpToolsProtocol.connection_made``."""
        super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """See ``HttpToolsProtocol.data_received``."""
        super().data_received(data)
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        """Wait for the next piece of a request's head as long as an idle connection may live; bodies have a limit."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own may return True, uvicorn's never does
        """The client will send no more; True keeps our side open for the answer that it may still wait for."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.close()  # and not uvloop's transport by itself, which has not seen a last answer yet
            return False
        cycle.keep_alive = False
        if cycle.more_body:
            cast(dict[str, Any], cycle.scope)[CUT_SHORT] = True
            cycle.more_body = False
            cycle.message_event.set()
        return True

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP at all is answered like every other error, and the connection closed."""
        body = orjson.dumps({"error": msg})
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def on_headers_complete(self) -> None:
        """See ``HttpToolsProtocol.on_headers_complete``."""
        super().on_headers_complete()
        if self._stopping and self.cycle is not None:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """See ``HttpToolsProtocol.shutdown``."""
        self._stopping = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LINGER_S, self._close_if_idle)
        else:
            self.cycle.keep_alive = False

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen, so that a port in use is known before anything is said to be ready; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as err:  # UnicodeError: a name that cannot be a host's
        raise ConfigError(f"{host}:{port}", "", f"no such address: {err}") from err
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as err:
        listener.close()
        raise ConfigError(f"{host}:{port}", "", f"cannot listen: {err.strerror or err}") from err
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL a client reaches ``listener`` at."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        """Call ``ready`` once requests are answered and signals are handled."""
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server.startup``."""
        await super().startup(sockets)
        self._ready()


def run(app: FastAPI, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT; then answer what was accepted, and return.

    Main thread only. After SIGINT a KeyboardInterrupt is raised, once everything is answered.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        loop="none",  # it is chosen below
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = Server(config, ready)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # Before uvicorn handles signals itself, and after: it raises the one it stopped for once more at its end.
    signal.signal(signal.SIGTERM, stop)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))
