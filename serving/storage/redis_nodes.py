"""The nodes of one Redis server or cluster: commands go to all of them at once, redis-py follows slots that move."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import hiredis
from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from serving.config import RedisConfig
from serving.storage.redis_commands import Command, RedisNodeError
from serving.storage.redis_connection import (
    NoConnectionError,
    RowConnection,
    allowed,
    pool_of,
    reason_of,
    seconds_left,
    tls_context,
    within,
)

REFRESH_PAUSE_S = 0.1  # between questions for the topology while a node is down
# After somebody has waited for a node in vain, nobody else asks it for this many times as long: a node that refuses is
# asked again at once, but one that keeps silent does not hold up every caller.
PAUSE_RATIO = 1.0
# After these errors the same command may succeed at another node, or here a moment later.
ELSEWHERE = (AskError, TryAgainError, ClusterDownError)  # MOVED is a kind of ASK to redis-py
BROKEN = (RedisError, RedisClusterException, OSError)


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """``host:port``, as in messages and in ``ps.json``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Stands for the reply that did not come."""

    address: Address
    reason: str
    is_unreachable: bool  # no connection to the node could be had

    def error(self) -> RedisNodeError:
        return RedisNodeError(f"{self.address}: {self.reason}")


class _Exchange(NamedTuple):
    """Commands sent to one node: their places among all of the call's."""

    address: Address
    client: Redis
    connection: RowConnection
    places: list[int]


class RedisNodes:
    """Sends commands to the nodes that hold their keys. Every method may be called from any thread.

    Which node that is, connections, users, and slots that move are redis-py's work.
    """

    def __init__(self, config: RedisConfig) -> None:
        """Connect to the first of ``config.addresses`` that answers, and learn from it which nodes there are.

        Raises:
            RedisNodeError: none answers, or the user is refused.
            OSError: a TLS file cannot be read.
        """
        self._config = config
        self._pool = partial(pool_of, config, tls_context(config.tls) if config.tls else None)
        self._paused: dict[Address, tuple[float, str]] = {}  # until when nobody asks a node, and why; one write each
        self._refreshed_at = -REFRESH_PAUSE_S
        self._client = self._connected()

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send ``commands``, all nodes at once, and return their replies in the same order, as redis-py gives them.

        A command that did not reach its node, or reached the wrong one, is sent again; so it may be carried out twice.

        Raises:
            RedisNodeError: a node did not answer within ``timeout_ms``, or answered with an error. To learn for the
                next call who has taken its place may take ``connect_timeout_ms`` more.
        """
        with within(self._config.timeout_ms / 1000):
            replies = self._at_once(commands)
            for place, reply in enumerate(replies):
                if isinstance(reply, (_NoAnswer, Exception)):
                    replies[place] = self._again(commands[place], reply)
            return replies

    def spread(self, keys: Sequence[bytes]) -> Mapping[str, int]:
        """How many of ``keys`` each master holds, by ``"host:port"``, as last heard."""
        masters = self._client.get_primaries() if isinstance(self._client, RedisCluster) else []
        counts = {str(Address(node.host, node.port)): 0 for node in masters}
        for key in keys:
            with suppress(RedisNodeError):  # nobody holds its slot
                address = str(self._node(key)[0])
                counts[address] = counts.get(address, 0) + 1
        return counts

    def close(self) -> None:
        """Close all connections that nobody uses; the others go with their users."""
        if isinstance(self._client, RedisCluster):
            clients = [node.redis_connection for node in self._client.get_nodes()]
        else:
            clients = [self._client]
        for client in clients:
            if client is not None:
                client.connection_pool.disconnect(inuse_connections=False)

    def _connected(self) -> Redis | RedisCluster:
        failures = []
        for host, port in self._config.addresses:
            try:
                with within(self._config.timeout_ms / 1000):
                    return self._opened(host, port)
            except BROKEN as err:
                failures.append(f"{Address(host, port)}: {self._why_no_connection(err)}")
        raise RedisNodeError(failures[0] if len(failures) == 1 else f"no node answers: {'; '.join(failures)}")

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

    def _node(self, key: bytes) -> tuple[Address, Redis]:
        if not isinstance(self._client, RedisCluster):
            where = self._client.connection_pool.connection_kwargs
            return Address(where["host"], where["port"]), self._client
        holders = self._client.nodes_manager.slots_cache.get(_slot_of(key))
        if not holders:
            raise RedisNodeError(f"no node of the cluster holds slot {_slot_of(key)}")
        node = holders[0]
        return Address(node.host, node.port), self._client.get_redis_connection(node)

    def _at_once(self, commands: Sequence[Command]) -> list[Any]:
        """Send each command to its node, then read the replies, node by node; errors stand in their replies' places."""
        replies: list[Any] = [None] * len(commands)
        by_node: dict[Address, tuple[Redis, list[int]]] = {}
        for place, command in enumerate(commands):
            address, client = self._node(command.key)
            by_node.setdefault(address, (client, []))[1].append(place)
        with ExitStack() as taken:
            sent: list[_Exchange] = []
            for address in sorted(by_node):  # in one order, so that two callers never wait for each other's connections
                client, places = by_node[address]
                began, connection = time.monotonic(), None
                try:
                    self._check_not_paused(address)
                    connection = taken.enter_context(_borrowed(client))
                    connection.unread = len(places)
                    connection.send_packed_command([b"".join([commands[place].payload for place in places])])
                    sent.append(_Exchange(address, client, connection, places))
                except BROKEN as err:
                    no_answer = self._no_answer(address, err, began, connection is None)
                    for place in places:
                        replies[place] = no_answer
            for exchange in sent:
                self._read(exchange, commands, replies)
        return replies

    def _read(self, exchange: _Exchange, commands: Sequence[Command], replies: list[Any]) -> None:
        began = time.monotonic()
        for done, place in enumerate(exchange.places):
            try:
                replies[place] = _reply(exchange, commands[place])
            except ResponseError as err:
                replies[place] = err if isinstance(err, ELSEWHERE) else RedisNodeError(f"{exchange.address}: {err}")
            except BROKEN as err:
                no_answer = self._no_answer(exchange.address, err, began, is_unreachable=False)
                for rest in exchange.places[done:]:
                    replies[rest] = no_answer
                return
            exchange.connection.unread -= 1

    def _again(self, command: Command, first: _NoAnswer | Exception) -> Any:
        """Send through redis-py, which finds out where to, a command that did not succeed at its node."""
        if isinstance(first, RedisNodeError):
            raise first
        if isinstance(first, _NoAnswer):
            self._refresh(first.address)
            if first.is_unreachable and self._node(command.key)[0] == first.address:
                raise first.error()
        try:
            seconds_left()
            reader = hiredis.Reader()
            reader.feed(command.payload)
            return self._client.execute_command(command.name, *reader.gets()[1:])
        except BROKEN as err:
            raise first.error() if isinstance(first, _NoAnswer) else RedisNodeError(str(err)) from err

    def _refresh(self, failed: Address) -> None:
        """Learn anew who holds what, of any node but ``failed``; what was known stands where nobody answers."""
        now = time.monotonic()
        if not isinstance(self._client, RedisCluster) or now < self._refreshed_at + REFRESH_PAUSE_S:
            return
        self._refreshed_at = now
        with allowed(self._config.connect_timeout_ms / 1000):
            try:
                self._client.nodes_manager.initialize(last_failed_node_name=f"{failed.host}:{failed.port}")
            except (*BROKEN, IndexError):  # IndexError: none of the nodes knows of a slot
                pass

    def _check_not_paused(self, address: Address) -> None:
        until, reason = self._paused.get(address, (0.0, ""))
        if time.monotonic() < until:
            raise NoConnectionError(f"{reason}, a moment ago")

    def _no_answer(self, address: Address, error: Exception, began: float, is_unreachable: bool) -> _NoAnswer:
        reason = self._why_no_connection(error) if is_unreachable else f"no reply: {reason_of(error)}"
        if isinstance(error, (TimeoutError, RedisTimeoutError)):
            now = time.monotonic()
            self._paused[address] = (now + PAUSE_RATIO * (now - began), reason)
        return _NoAnswer(address, reason, is_unreachable)

    def _why_no_connection(self, error: Exception) -> str:
        if isinstance(error, AuthenticationError):
            return f"refuses user {self._config.user_name!r}: {error}"
        if isinstance(error, (NoConnectionError, ResponseError, RedisClusterException)):
            return str(error)
        return f"cannot connect: {reason_of(error)}"


@lru_cache(maxsize=65536)
def _slot_of(key: bytes) -> int:
    return int(key_slot(key))


@contextmanager
def _borrowed(client: Redis) -> Iterator[RowConnection]:
    pool = client.connection_pool
    connection: RowConnection = pool.get_connection()  # type: ignore[assignment]  # as the pool's options say
    try:
        yield connection
    finally:
        if connection.unread:
            connection.disconnect()
        pool.release(connection)


def _reply(exchange: _Exchange, command: Command) -> Any:
    if command.take is None:
        return exchange.client.parse_response(exchange.connection, command.name)
    values = exchange.connection.read_values(command.count, command.value_bytes)
    return values if isinstance(values, list) else command.take(values)
