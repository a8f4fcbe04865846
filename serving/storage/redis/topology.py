"""The nodes of a Redis server or cluster, and which node holds a key; redis-py knows both."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

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
from serving.errors import without_frames
from serving.storage.redis.commands import RedisNodeError, RedisNodeTimeoutError, RedisUnreachableError
from serving.storage.redis.connection import BusyError, NoConnectionError, pool_of, reason_of, tls_context

# Between questions for the topology while a node is down. A question that a silent node held up has a longer pause.
REFRESH_PAUSE_S, REFRESH_PAUSE_RATIO = 0.1, 4.0
BROKEN = (RedisError, RedisClusterException, OSError)
LOST = (*BROKEN, IndexError)  # redis-py raises IndexError if no node of a cluster knows a slot
LATE = (TimeoutError, RedisTimeoutError, BusyError)
# A node that could not be asked may answer later. Other errors, a refused user for example, stay until a person acts.
DOWN = (*LATE, OSError, RedisConnectionError, RedisClusterException, ClusterDownError, IndexError)


def node_error(reason: str, error: Exception) -> RedisNodeError:
    """The error to raise for redis-py's ``error``."""
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
    """The nodes as last heard. Every method may be called from any thread, and connects if no call has yet."""

    def __init__(self, config: RedisConfig) -> None:
        """Connect nowhere yet.

        Raises:
            OSError: a TLS file cannot be read.
        """
        self._config = config
        self._pool = partial(pool_of, config, tls_context(config.tls) if config.tls else None)
        self._refresh_from = 0.0
        self._client: Redis | RedisCluster | None = None
        self._connecting = threading.Lock()  # one thread connects at a time

    @property
    def client(self) -> Redis | RedisCluster:
        """redis-py's client of the server or of the cluster. See ``connect`` for the errors."""
        return self._client or self.connect()

    def connect(self) -> Redis | RedisCluster:
        """Connect to the first configured address that answers, and learn the nodes from it.

        Raises:
            RedisUnreachableError: none answers.
            RedisNodeError: the user is refused.
        """
        with self._connecting:
            self._client = self._client or self._connected()
            return self._client

    def node(self, key: bytes) -> tuple[Address, Redis]:
        """The node that holds ``key``, and redis-py's client of that node.

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

    def has_every_write(self, run_ids: set[str]) -> bool:
        """Whether a slot that was on the nodes with these identities has every write.

        It has if it stayed on one node, or was moved between masters: then all of them are masters now. A replica that
        took over and its old master are not both masters. redis-py may know both as masters, so each node is asked for
        its role.
        """
        if len(run_ids) == 1:
            return True
        return run_ids <= {info["run_id"] for info in self._infos() if info["role"] == "master"}

    def eviction_policies(self) -> set[str]:
        """The policies of masters that evict rows when their memory is full."""
        infos = [info for info in self._infos("memory") if info.get("maxmemory")]
        return {policy for info in infos if (policy := info.get("maxmemory_policy", "")).startswith("allkeys-")}

    def spread(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """How many of ``keys`` each master holds, by ``"host:port"``, as last heard."""
        masters = self.client.get_primaries() if isinstance(self.client, RedisCluster) else []
        counts = {str(Address(node.host, node.port)): 0 for node in masters}
        for key in keys:
            with suppress(RedisNodeError):  # no node holds its slot
                address = str(self.node(key)[0])
                counts[address] = counts.get(address, 0) + 1
        return counts

    def refresh(self, failed: Address) -> None:
        """Learn the slots again from any node except ``failed``; without an answer, the known slots stay."""
        now = time.monotonic()
        if not isinstance(self.client, RedisCluster) or now < self._refresh_from:
            return
        self._refresh_from = float("inf")  # no other thread asks at the same time
        try:
            with suppress(*LOST):
                self.client.nodes_manager.initialize(last_failed_node_name=f"{failed.host}:{failed.port}")
        finally:
            ended = time.monotonic()
            self._refresh_from = ended + max(REFRESH_PAUSE_S, REFRESH_PAUSE_RATIO * (ended - now))

    def is_master(self, address: Address) -> bool:
        """Whether a node is the server, or a master of the cluster, as last heard."""
        if not isinstance(self.client, RedisCluster):
            return True
        return any((node.host, node.port) == address for node in self.client.get_primaries())

    def close(self) -> None:
        """Close idle connections; a busy connection ends with its user."""
        if self._client is None:
            return
        for client in self._clients(replicas=True):
            client.connection_pool.disconnect_free_connections()

    def _infos(self, section: str | None = None) -> Iterator[Mapping[str, Any]]:
        """A section of INFO, or its usual sections, from each master that answers."""
        for client in self._clients():
            with suppress(*LOST):
                yield client.info(section)

    def _clients(self, replicas: bool = False) -> list[Redis]:
        if not isinstance(self.client, RedisCluster):
            return [self.client]
        nodes = self.client.get_nodes() if replicas else self.client.get_primaries()
        return [self.client.get_redis_connection(node) for node in nodes]

    def _connected(self) -> Redis | RedisCluster:
        failures: list[RedisNodeError] = []
        for host, port in self._config.addresses:
            try:
                return self._opened(host, port)
            except LOST as err:
                failures.append(node_error(f"{Address(host, port)}: {self.why_no_connection(err)}", err))
        if len(failures) == 1:
            raise without_frames(failures[0])
        are_down = all(isinstance(failure, RedisUnreachableError) for failure in failures)
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
            raise RedisClusterException("is part of a cluster in which no node holds any slot")
        url = f"redis://{Address(host, port)}"
        return RedisCluster(url=url, connection_pool_class=self._pool, protocol=2, retry=Retry(NoBackoff(), 0))

    def why_no_connection(self, error: Exception) -> str:
        """The message for an error of connecting."""
        if isinstance(error, AuthenticationError):
            return f"refuses user {self._config.user_name!r}: {error}"
        if isinstance(error, (NoConnectionError, ResponseError, RedisClusterException)):
            return str(error)
        return f"cannot connect: {reason_of(error)}"


@lru_cache(maxsize=65536)
def _slot_of(key: bytes) -> int:
    return int(key_slot(key))
