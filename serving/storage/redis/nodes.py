"""The nodes of one Redis server or cluster: commands go to all of them at once, redis-py follows slots that move."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import hiredis
from redis import Redis
from redis.exceptions import AskError, ClusterDownError, ClusterError, ResponseError, TryAgainError

from serving.config import RedisConfig
from serving.storage.redis.commands import Command, RedisNodeError, RedisNodeTimeoutError
from serving.storage.redis.connection import RowConnection, reason_of, seconds_left, within
from serving.storage.redis.pool import BusyError, NoConnectionError
from serving.storage.redis.topology import BROKEN, LATE, LOST, Address, RedisTopology, node_error

# After somebody has waited for a node in vain, nobody else asks it for this many times as long: a node that refuses is
# asked again at once, but one that keeps silent does not hold up every caller.
PAUSE_RATIO = 1.0
# After these errors the same command may succeed at another node, or here a moment later.
ELSEWHERE = (AskError, TryAgainError, ClusterDownError)  # MOVED is a kind of ASK to redis-py
# How long redis-py, which tries a command up to 16 times, may follow a slot that moves before it gives up: 0.2 s here.
FOLLOWED_S = 0.5


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Stands for the reply that did not come."""

    address: Address
    reason: str
    is_unreachable: bool  # no connection to the node could be had
    is_late: bool
    kind: type[RedisNodeError]

    def error(self) -> RedisNodeError:
        kind = RedisNodeTimeoutError if self.is_late else self.kind
        return kind(f"{self.address}: {self.reason}")


class _Exchange(NamedTuple):
    """Commands sent to one node: their places among all of the call's."""

    address: Address
    client: Redis
    connection: RowConnection
    places: list[int]


class RedisNodes:
    """Sends commands to the nodes that hold their keys. Every method may be called from any thread.

    Which node that is, connections, users, and slots that move are redis-py's work.

    Attributes:
        topology: which nodes there are.
    """

    def __init__(self, config: RedisConfig) -> None:
        """Connect to nobody yet. See ``RedisTopology`` for the error."""
        self.topology = RedisTopology(config)
        self._timeout_s = config.timeout_ms / 1000
        self._paused: dict[Address, tuple[float, str]] = {}  # until when nobody asks a node, and why; one write each

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send ``commands``, all nodes at once, and return their replies in the same order, as redis-py gives them.

        A command that did not reach its node, or reached the wrong one, is sent again; so it may be carried out twice.

        Raises:
            RedisNodeTimeoutError: a node did not answer within ``timeout_ms``. To learn for the next call who has taken
                its place may take ``connect_timeout_ms`` more.
            RedisUnreachableError: it cannot be reached.
            RedisNodeError: it answered with an error.
        """
        with within(self._timeout_s):
            replies = self._at_once(commands)
            for place, reply in enumerate(replies):
                if isinstance(reply, (_NoAnswer, Exception)):
                    replies[place] = self._again(commands[place], reply)
                elif commands[place].are_separate and reply is not None:
                    self._mend(commands[place], reply)
            return replies

    def _at_once(self, commands: Sequence[Command]) -> list[Any]:
        """Send each command to its node, then read the replies, node by node; errors stand in their replies' places."""
        replies: list[Any] = [None] * len(commands)
        by_node: dict[Address, tuple[Redis, list[int]]] = {}
        for place, command in enumerate(commands):
            address, client = self.topology.node(command.key)
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
                if commands[place].are_separate:
                    _raise_fatal(replies[place])
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
            self.topology.refresh(first.address)
            if first.is_unreachable and self.topology.node(command.key)[0] == first.address:
                raise first.error()
        try:
            seconds_left()
            commands = _words(command)
            return self._piped(commands) if command.are_separate else self._followed(commands[0])
        except LOST as err:
            if isinstance(first, _NoAnswer):
                raise replace(first, is_late=first.is_late or isinstance(err, LATE)).error() from err
            raise node_error(f"{first}: {reason_of(err)}", err) from err

    def _followed(self, words: Sequence[Any]) -> Any:
        """Send one command to where its slot is by now; while that is moving, as often as there is time for.

        Both nodes refuse a command of several keys then, unless one has them all.
        """
        while True:
            seconds_left()
            try:
                return self.topology.client.execute_command(*words)
            except ClusterError as err:
                if isinstance(err, ClusterDownError):
                    raise
                if seconds_left() < FOLLOWED_S:
                    raise ClusterError("its slot is still moving to another node") from err

    def _mend(self, command: Command, replies: list[Any]) -> None:
        """Send those of separate commands again that did not succeed at their node."""
        places = [place for place, reply in enumerate(replies) if isinstance(reply, Exception)]
        if not places:
            return
        self.topology.moved()
        commands = _words(command)
        try:
            for place, reply in zip(places, self._piped([commands[place] for place in places]), strict=True):
                replies[place] = reply
        except LOST as err:
            raise node_error(f"{replies[places[0]]}: {reason_of(err)}", err) from err

    def _piped(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        pipeline = self.topology.client.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        return pipeline.execute()

    def _check_not_paused(self, address: Address) -> None:
        until, reason = self._paused.get(address, (0.0, ""))
        if time.monotonic() < until:
            raise NoConnectionError(f"{reason}, a moment ago")

    def _no_answer(self, address: Address, error: Exception, began: float, is_unreachable: bool) -> _NoAnswer:
        reason = self.topology.why_no_connection(error) if is_unreachable else f"no reply: {reason_of(error)}"
        is_late = isinstance(error, LATE)
        if is_late and not isinstance(error, BusyError):  # which tells nothing of the node
            now = time.monotonic()
            self._paused[address] = (now + PAUSE_RATIO * (now - began), reason)
        return _NoAnswer(address, reason, is_unreachable, is_late, type(node_error(reason, error)))


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
    connection = exchange.connection
    if command.are_separate:
        values = connection.read_separate(command.count, command.value_bytes if command.take else None)
    elif command.take is None:
        return exchange.client.parse_response(connection, command.name)
    else:
        values = connection.read_values(command.count, command.value_bytes)
    return command.take(values) if command.take and not isinstance(values, list) else values


def _raise_fatal(replies: Sequence[Any] | None) -> None:
    """Raise the first error reply that no second try mends."""
    for reply in replies or ():
        if isinstance(reply, Exception) and not isinstance(reply, ELSEWHERE):
            raise reply


def _words(command: Command) -> list[list[Any]]:
    """The commands that make up the payload, each as redis-py takes it."""
    reader, commands = hiredis.Reader(), []
    reader.feed(command.payload)
    while words := reader.gets():
        commands.append([command.name, *words[1:]])
    return commands
