"""Which nodes a Redis server or cluster has, and which of them holds what: redis-py's knowledge, for arrays of keys."""

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from serving.config import RedisConfig
from serving.storage.redis.commands import SLOTS, RedisNodeError, RedisNodeTimeoutError, RedisUnreachableError
from serving.storage.redis.connection import allowed, reason_of, tls_context, within
from serving.storage.redis.pool import BusyError, NoConnectionError, pool_of

SCAN_NAMES = 1000
REFRESH_PAUSE_S = 0.1  # between questions for the topology while a node is down
BROKEN = (RedisError, RedisClusterException, OSError)
LOST = (*BROKEN, IndexError)  # of a cluster in which no node knows of a slot, redis-py's client raises the last
LATE = (TimeoutError, RedisTimeoutError, BusyError)
# Who could not be asked may answer later; all else, a user who is refused say, stays as it is until a person acts.
DOWN = (*LATE, OSError, RedisConnectionError, RedisClusterException, ClusterDownError, IndexError)


def node_error(reason: str, error: Exception) -> RedisNodeError:
    """What to raise of redis-py's ``error``."""
    if isinstance(error, LATE):
        return RedisNodeTimeoutError(reason)
    is_down = isinstance(error, DOWN) and not isinstance(error, AuthenticationError)
    return RedisUnreachableError(reason) if is_down else RedisNodeError(reason)


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """``host:port``, as in messages and in ``ps.json``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedisTopology:
    """The nodes as last heard of. Every method may be called from any thread, and connects if nobody has yet."""

    def __init__(self, config: RedisConfig) -> None:
        """Connect to nobody yet.

        Raises:
            OSError: a TLS file cannot be read.
        """
        self._config = config
        self._pool = partial(pool_of, config, tls_context(config.tls) if config.tls else None)
        self._refreshed_at = -REFRESH_PAUSE_S
        self._moves = 0
        self._owners: tuple[object, int, NDArray[np.int16]] | None = None  # of which cache, after how many moves, whose
        self._client: Redis | RedisCluster | None = None
        self._connecting = threading.Lock()  # one thread connects at a time

    @property
    def client(self) -> Redis | RedisCluster:
        """redis-py's, of the server or of the cluster. See ``connect`` for the errors."""
        return self._client or self.connect()

    def connect(self) -> Redis | RedisCluster:
        """Connect to the first of the configuration's addresses that answers, and learn from it which nodes there are.

        Raises:
            RedisUnreachableError: none answers.
            RedisNodeError: the user is refused.
        """
        with self._connecting:
            self._client = self._client or self._connected()
            return self._client

    def node(self, key: bytes) -> tuple[Address, Redis]:
        """The node that holds ``key``, and redis-py's client of it.

        Raises:
            RedisNodeError: no node holds its slot.
        """
        if not isinstance(self.client, RedisCluster):
            where = self.client.connection_pool.connection_kwargs
            return Address(where["host"], where["port"]), self.client
        holders = self.client.nodes_manager.slots_cache.get(_slot_of(key))
        if not holders:
            raise RedisUnreachableError(f"no node of the cluster holds slot {_slot_of(key)}")
        node = holders[0]
        return Address(node.host, node.port), self.client.get_redis_connection(node)

    @property
    def is_cluster(self) -> bool:
        """Whether there may be several nodes, and keys have slots."""
        return isinstance(self.client, RedisCluster)

    def grouped(self, slots: NDArray[np.uint16]) -> list[NDArray[np.intp]]:
        """Places of ``slots``, uint16[N], by the node that holds them; in each group they ascend."""
        if not isinstance(self.client, RedisCluster):
            return [np.arange(slots.size)]
        cache, moves = self.client.nodes_manager.slots_cache, self._moves
        if self._owners is None or self._owners[0] is not cache or self._owners[1] != moves:
            numbers: dict[str, int] = {}
            owners = np.full(SLOTS, -1, dtype=np.int16)
            for slot, holders in list(cache.items()):
                owners[slot] = numbers.setdefault(holders[0].name, len(numbers))
            self._owners = cache, moves, owners
        of_key = self._owners[2][slots]
        order = np.argsort(of_key, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(of_key[order])) + 1) if order.size else []

    def scan(self, prefix: bytes, most_pages: int | None = None) -> Iterator[list[bytes]]:
        """Names that begin with ``prefix``, some maybe twice, page by page; of each node ``most_pages``."""
        pattern = re.sub(rb"([*?\[\]\\^])", rb"\\\1", prefix) + b"*"
        for client in self._clients():
            cursor, pages = -1, 0
            while cursor and pages != most_pages:
                try:
                    with within(self._config.timeout_ms / 1000):
                        cursor, names = client.scan(max(cursor, 0), match=pattern, count=SCAN_NAMES)
                except BROKEN as err:
                    raise node_error(reason_of(err), err) from err
                pages += 1
                yield [name for name in names if isinstance(name, bytes)]  # as they all are: nothing is decoded

    def moved(self) -> None:
        """Redis-py has heard that single slots moved."""
        self._moves += 1

    def spread(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """How many of ``keys`` each master holds, by ``"host:port"``, as last heard."""
        masters = self.client.get_primaries() if isinstance(self.client, RedisCluster) else []
        counts = {str(Address(node.host, node.port)): 0 for node in masters}
        for key in keys:
            with suppress(RedisNodeError):  # nobody holds its slot
                address = str(self.node(key)[0])
                counts[address] = counts.get(address, 0) + 1
        return counts

    def refresh(self, failed: Address) -> None:
        """Learn anew who holds what, of any node but ``failed``; what was known stands where nobody answers."""
        now = time.monotonic()
        if not isinstance(self.client, RedisCluster) or now < self._refreshed_at + REFRESH_PAUSE_S:
            return
        self._refreshed_at = now
        with allowed(self._config.connect_timeout_ms / 1000), suppress(*LOST):
            self.client.nodes_manager.initialize(last_failed_node_name=f"{failed.host}:{failed.port}")

    def close(self) -> None:
        """Close all connections that nobody uses; the others go with their users."""
        if self._client is None:
            return
        for client in self._clients(replicas=True):
            client.connection_pool.disconnect_free_connections()

    def _clients(self, replicas: bool = False) -> list[Redis]:
        if not isinstance(self.client, RedisCluster):
            return [self.client]
        nodes = self.client.get_nodes() if replicas else self.client.get_primaries()
        return [self.client.get_redis_connection(node) for node in nodes]

    def _connected(self) -> Redis | RedisCluster:
        failures: list[RedisNodeError] = []
        for host, port in self._config.addresses:
            try:
                with within(self._config.timeout_ms / 1000):
                    return self._opened(host, port)
            except LOST as err:
                failures.append(node_error(f"{Address(host, port)}: {self.why_no_connection(err)}", err))
        if len(failures) == 1:
            raise failures[0]
        are_down = all(isinstance(one, RedisUnreachableError) for one in failures)
        reason = f"no node answers: {'; '.join(map(str, failures))}"
        raise RedisUnreachableError(reason) if are_down else RedisNodeError(reason)

    def _opened(self, host: str, port: int) -> Redis | RedisCluster:
        """A client of the server at an address, or of the cluster that it is part of."""
        server = Redis(connection_pool=self._pool(host=host, port=port, protocol=2, retry=Retry(NoBackoff(), 1)))
        try:
            slots = server.execute_command("CLUSTER SLOTS")
        except ResponseError as err:
            if "cluster support disabled" in str(err) or "unknown command" in str(err):
                return server
            raise
        server.connection_pool.disconnect()
        if not slots:
            raise RedisClusterException("is part of a cluster of which no node holds any slot")
        url = f"redis://{Address(host, port)}"
        return RedisCluster(url=url, connection_pool_class=self._pool, protocol=2, retry=Retry(NoBackoff(), 0))

    def why_no_connection(self, error: Exception) -> str:
        """What to tell of an error that came of connecting."""
        if isinstance(error, AuthenticationError):
            return f"refuses user {self._config.user_name!r}: {error}"
        if isinstance(error, (NoConnectionError, ResponseError, RedisClusterException)):
            return str(error)
        return f"cannot connect: {reason_of(error)}"


@lru_cache(maxsize=65536)
def _slot_of(key: bytes) -> int:
    return int(key_slot(key))
