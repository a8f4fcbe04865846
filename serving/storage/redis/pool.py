"""The connections to one node, lent to one thread at a time."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue
from threading import get_ident
from typing import Any

from redis import exceptions
from redis.connection import BlockingConnectionPool

from serving.config import RedisConfig
from serving.storage.redis.connection import RowConnection, seconds_left


class NoConnectionError(exceptions.ConnectionError):
    """There is none to be had; the message says why."""


class BusyError(NoConnectionError):
    """Others had all of them until the deadline."""


class RowPool(BlockingConnectionPool):
    """redis-py's, in which nobody touches a connection that is lent to another thread."""

    def release(self, connection: Any) -> None:
        """Take a connection back, once.

        redis-py's cluster pipeline gives connections back twice where it finds no node to learn the slots from; after
        the first time another thread may have it, and a third one must not get it too.
        """
        if connection.holder == get_ident():
            connection.holder = None
            super().release(connection)  # type: ignore[no-untyped-call]  # redis-py's

    def disconnect_free_connections(self, moving_address_src: str | None = None) -> None:
        """Close the connections that nobody has.

        redis-py looks for them and closes them then, when they may be lent; here they are borrowed meanwhile.
        """
        with self._all_free() as connections:
            for connection in connections:
                connection.disconnect()  # type: ignore[no-untyped-call]

    @contextmanager
    def _all_free(self) -> Iterator[list[RowConnection]]:
        taken: list[RowConnection | None] = []
        try:
            while True:
                taken.append(self.pool.get_nowait())
        except Empty:
            yield [one for one in taken if one is not None]
        finally:
            for one in reversed(taken):
                self.pool.put_nowait(one)


class _IdleConnections(LifoQueue[Any]):
    """Where a pool's connections wait for the next caller, and callers for a connection."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block:
            return super().get(block=False)
        try:
            return super().get(timeout=seconds_left())
        except (Empty, TimeoutError) as err:
            raise BusyError(f"all {self.maxsize} connections are busy") from err


def pool_of(config: RedisConfig, tls: ssl.SSLContext | None, **options: Any) -> RowPool:
    """A pool of at most ``num_node_connections`` connections, with redis-py's ``options``: at least host and port."""
    return RowPool(  # type: ignore[no-untyped-call]
        connection_class=RowConnection,
        queue_class=_IdleConnections,
        max_connections=config.num_node_connections,
        username=None if config.user_name == "default" else config.user_name,
        password=config.password.get_secret_value() or None,
        driver_info=None,  # redis-py's name and version, which would take a right and two round trips
        connect_timeout_s=config.connect_timeout_ms / 1000,
        tls=tls,
        tls_name=config.tls.server_name if config.tls else "",
        **options,
    )
