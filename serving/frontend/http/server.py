"""Runs the application: the socket, the signals and an orderly stop."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn
import uvloop
from starlette.types import ASGIApp

from serving.frontend.http.acceptor import Acceptor
from serving.frontend.http.connection import Connection, OpenConnections, Refusal
from serving.frontend.limits import Limits
from serving.frontend.tls import Tls

_log = logging.getLogger("hotrow.server")
#: How long idle connections stay open after the signal to stop, because requests may be on their way.
LINGER_S = 0.25


@dataclass(frozen=True, slots=True)
class Stop:
    """How a server stops. SIGTERM and SIGINT stop it.

    Attributes:
        timeout_s: how long clients may take to send requests and to receive answers. Their connections are cut then.
        delay_s: how long requests are answered as before after the first signal. Each answer closes its connection. A
            second signal ends the delay.
        stopping: called with the process's exit code when the first signal arrives.
        leaving: called when the delay begins.
    """

    timeout_s: float
    delay_s: float = 0.0
    stopping: Callable[[int], None] = lambda _code: None
    leaving: Callable[[], None] = lambda: None


class Server(uvicorn.Server):
    """uvicorn's start and stop, with connections of our own.

    It reports when it is ready, and answers requests that arrive with the stop signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        ready: Callable[[], None],
        stop: Stop,
        tls: Tls | None = None,
        shares_listener: bool = False,
        limits: Limits | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """Serve ``app``; see ``run``."""
        self._refusal = refusal
        self._open_connections = OpenConnections(limits or Limits())
        self._stop = stop
        self._signals = 0
        self._stops_s = 0.0  # the stop does not begin before this time
        self._tls = tls
        self._ready = ready
        self._shares_listener = shares_listener
        self.stop_began_s = math.inf
        super().__init__(uvicorn_config(app, stop.timeout_s))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server.startup``; connections are accepted here, because uvicorn's bound is not enough."""
        await super().startup(sockets=[])
        app, state, open_connections = self.config.loaded_app, self.lifespan.state, self._open_connections

        def connection() -> Connection:
            return Connection(app, self.server_state, state, open_connections, self._refusal)

        acceptors = [Acceptor(listener, connection, open_connections, self._tls) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]  # uvicorn only closes them
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """See ``uvicorn.Server.on_tick``; returns True once the delay of the stop is over."""
        if not await super().on_tick(counter):
            return False
        waits_s = 0.0 if self.force_exit else self._stops_s - time.monotonic()
        if waits_s > 0 and not self._open_connections.is_draining:
            _log.info("not ready from now on, and stopping in %.0f s", waits_s)
            self._stop.leaving()
        self._open_connections.is_draining = True
        return waits_s <= 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server.shutdown``; waits first, because idle connections may have a request on its way."""
        began = self.stop_began_s = time.monotonic()
        _log.info("stopping: new connections are refused, and requests that have arrived are answered")
        if self._shares_listener:  # a connection that another process accepts is not cut below
            for listening in self.servers:
                listening.close()
        await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)
        _log.info("stopped after %.1f s", time.monotonic() - began)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See ``uvicorn.Server.handle_exit``; requests cut off by a second SIGINT are not logged with tracebacks."""
        super().handle_exit(sig, frame)
        self.is_stopped_by(sig)
        if self.force_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def is_stopped_by(self, number: int) -> None:
        """Take a signal to stop; see ``Stop``."""
        self._signals += 1
        if self._signals == 1:
            self._stops_s = time.monotonic() + self._stop.delay_s
            self._stop.stopping(128 + number if number == signal.SIGINT else 0)
        else:
            self._stops_s = 0.0


class Neighbour(Protocol):
    """A server of another protocol on the same event loop."""

    async def start(self) -> None:
        """Bind its port and answer."""

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, and wait for running requests for at most ``timeout_s``."""


def run(
    app: ASGIApp,
    listener: socket.socket,
    ready: Callable[[], None],
    stop: Stop,
    neighbours: Sequence[Neighbour] = (),
    tls: Tls | None = None,
    *,
    shares_listener: bool = False,
    limits: Limits | None = None,
    refusal: Refusal | None = None,
) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT, then answer accepted requests and return.

    Main thread only. After SIGINT it raises KeyboardInterrupt once everything is answered.

    Args:
        app: the application.
        listener: a listening socket.
        ready: called once requests are answered and signals are handled.
        stop: how it stops.
        neighbours: servers of other protocols. They start before and stop after this server.
        tls: the certificates; None: no TLS.
        shares_listener: other processes accept connections on ``listener`` too.
        limits: the limits of connections; None: the defaults.
        refusal: asked before ``app``.

    Raises:
        ConfigError: a neighbour cannot be started.
    """
    server = Server(app, ready, stop, tls, shares_listener, limits, refusal)

    def end(number: int, _frame: FrameType | None) -> None:
        server.should_exit = True
        server.is_stopped_by(number)

    # For signals before and after uvicorn handles them: at its end, uvicorn raises the signal that stopped it again.
    signal.signal(signal.SIGTERM, end)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, listener, neighbours, stop.timeout_s))


async def _serve(
    server: Server, listener: socket.socket, neighbours: Sequence[Neighbour], stop_timeout_s: float
) -> None:
    async def stop(neighbour: Neighbour) -> None:
        """Stop within the time that this server has left."""
        took_s = max(0.0, time.monotonic() - server.stop_began_s)
        await neighbour.stop(max(LINGER_S, stop_timeout_s - took_s))

    async with AsyncExitStack() as started:
        for neighbour in neighbours:
            await neighbour.start()
            started.push_async_callback(stop, neighbour)
        await server.serve(sockets=[listener])


def uvicorn_config(app: ASGIApp, stop_timeout_s: float) -> uvicorn.Config:
    """Return uvicorn's configuration for ``app``; see ``run``."""
    return uvicorn.Config(
        app,
        http=Connection,  # `Server` makes the connections; uvicorn would import a class of its own
        loop="none",  # `run` chooses it
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,  # the origin of a request does not matter here
        log_config=None,
        log_level=logging.ERROR,  # uvicorn warns about anything that a client sends
        timeout_graceful_shutdown=math.ceil(stop_timeout_s),
    )
