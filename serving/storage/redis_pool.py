"""The connections to one Redis node: a few, handed to one caller at a time."""

import ssl
import threading
import time

from serving.config import RedisConfig
from serving.storage.redis_connection import Address, RedisConnection, RedisNodeError, seconds_left

# After somebody has waited for a node in vain, nobody else connects to it for this many times as long: a node that
# refuses is asked again at once, but one that keeps silent does not hold up every caller.
PAUSE_RATIO = 1.0


class NodePool:
    """At most ``num_node_connections`` connections to one node. Every method may be called from any thread."""

    def __init__(self, address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> None:
        """Open nothing yet."""
        self.address = address
        self._config = config
        self._tls = tls
        self._permits = threading.Semaphore(config.num_node_connections)
        self._lock = threading.Lock()  # guards what is below
        self._failure = ""
        self._paused_until = 0.0
        self._idle: list[RedisConnection] = []
        self._is_closed = False

    def take(self, deadline: float) -> RedisConnection:
        """A connection of the caller's own, until it is given back.

        Raises:
            RedisNodeError: the node cannot be reached, or others keep all connections until ``deadline``.
        """
        try:
            has_permit = self._permits.acquire(timeout=seconds_left(deadline))
        except TimeoutError:
            has_permit = False
        if not has_permit:
            raise RedisNodeError(self.address, f"all {self._config.num_node_connections} connections are busy")
        try:
            with self._lock:
                if self._idle:
                    return self._idle.pop()
                is_paused = time.monotonic() < self._paused_until
                failure = self._failure
            if is_paused:
                raise RedisNodeError(self.address, f"{failure}, a moment ago", is_unreachable=True)
            return self._connect(deadline)
        except BaseException:
            self._permits.release()
            raise

    def _connect(self, deadline: float) -> RedisConnection:
        began = time.monotonic()
        try:
            return RedisConnection(self.address, self._config, self._tls, deadline)
        except RedisNodeError as err:
            with self._lock:
                self._pause(err.reason, time.monotonic() - began)
            raise

    def give_back(self, connection: RedisConnection) -> None:
        """Keep the connection for the next caller if it is sound, else close it and every idle one.

        Connections to a node that went away break all at once; the next caller must not try them one after the other.
        """
        with self._lock:
            keeps = connection.is_reusable and not self._is_closed
            stale = [] if keeps else [connection, *self._idle]
            self._idle = [*self._idle, connection] if keeps else []
            if not keeps:
                self._pause("no reply: timed out", connection.waited_in_vain_s)
        for one in stale:
            one.close()
        self._permits.release()

    def _pause(self, failure: str, waited_s: float) -> None:
        self._failure, self._paused_until = failure, time.monotonic() + PAUSE_RATIO * waited_s

    def close(self) -> None:
        """Close what is idle now, and what is given back later."""
        with self._lock:
            self._is_closed = True
            stale, self._idle = self._idle, []
        for one in stale:
            one.close()
