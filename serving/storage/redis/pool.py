"""The connections to one node; each is lent to one thread at a time."""

import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from threading import get_ident
from typing import Any

from redis import exceptions
from redis.connection import BlockingConnectionPool

from serving.config import RedisConfig
from serving.storage.redis.connection import RowConnection


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
        connection: RowConnection = free or self.make_connection()  # type: ignore[no-untyped-call]  # redis-py's
        connection.holder = get_ident()
        connection.expire_at(deadline)
        try:
            connection.connect()
            if not _is_idle(connection):
                connection.disconnect()  # type: ignore[no-untyped-call]
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
            super().release(connection)  # type: ignore[no-untyped-call]  # redis-py's

    def disconnect_free_connections(self, moving_address_src: str | None = None) -> None:
        """Close the idle connections.

        redis-py may close a connection that was lent in the meantime. Here the idle connections are borrowed first.
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
    return RowPool(  # type: ignore[no-untyped-call]
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
