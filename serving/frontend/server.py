"""Running the application: the socket, the signals and the bounds of a stop."""

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
import uvloop
from starlette.types import ASGIApp

from serving.errors import ConfigError
from serving.frontend.connection import Connection

#: How long a connection may be idle. Long, as clients keep a pool of connections and trip over closed ones.
KEEP_ALIVE_S = 75


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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See ``uvicorn.Server.handle_exit``; after a second SIGINT what is cut off is not told with tracebacks."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def run(app: ASGIApp, listener: socket.socket, ready: Callable[[], None], stop_timeout_s: float) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT; then answer what was accepted, and return.

    Main thread only. After SIGINT a KeyboardInterrupt is raised, once everything is answered.

    Args:
        app: the application.
        listener: a listening socket.
        ready: called once requests are answered and signals are handled.
        stop_timeout_s: after the signal, how long clients may take to send and to receive what is under way; then
            their connections are cut.
    """
    server = Server(uvicorn_config(app, stop_timeout_s), ready)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # Before uvicorn handles signals itself, and after: it raises the one it stopped for once more at its end.
    signal.signal(signal.SIGTERM, stop)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))


def uvicorn_config(app: ASGIApp, stop_timeout_s: float) -> uvicorn.Config:
    """How uvicorn runs ``app``; see ``run``."""
    return uvicorn.Config(
        app,
        http=Connection,
        loop="none",  # `run` chooses it
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,  # nothing here asks where a request came from
        log_config=None,
        log_level=logging.WARNING,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(stop_timeout_s),
    )
