"""The nodes of one Redis server or cluster: commands go to all nodes at once, and redis-py follows slots that move."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import hiredis
from redis import Redis
from redis.exceptions import AskError, ClusterDownError, ClusterError, MovedError, ResponseError, TryAgainError

from serving.config import RedisConfig
from serving.errors import without_frames
from serving.storage.redis.commands import Command, RedisNodeError, RedisNodeTimeoutError, RedisUnreachableError
from serving.storage.redis.connection import BusyError, NoConnectionError, RowConnection, reason_of, seconds_until
from serving.storage.redis.topology import BROKEN, LATE, LOST, Address, RedisTopology, node_error

# The pause between two probes of a silent node, if ``timeout_ms`` is not longer.
PROBE_PAUSE_S = 1.0
# After these errors the same command may succeed at another node, or here a moment later. MOVED is an AskError too.
ELSEWHERE = (AskError, TryAgainError, ClusterDownError)
# redis-py tries a command up to 16 times; this long it may follow a slot that moves. Here it took 0.2 s.
FOLLOWED_S = 0.5


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Stands for the reply that did not come."""

    address: Address
    reason: str
    is_unreachable: bool  # no connection to the node was available
    is_late: bool
    kind: type[RedisNodeError]

    def error(self) -> RedisNodeError:
        kind = RedisNodeTimeoutError if self.is_late else self.kind
        return kind(f"{self.address}: {self.reason}")


@dataclass(slots=True)
class Reply:
    """The reply to one command.

    Attributes:
        value: what redis-py returns, or the RedisNodeError of a command that failed.
        run_id: the identity of the node that was asked; "" if another node answered.
        is_passed_on: that node may have passed the command on, because the slot is moving.
    """

    value: Any = None
    run_id: str = ""
    is_passed_on: bool = False


@dataclass(slots=True)
class _Silence:
    """A node that did not answer in time. No call asks it until it has answered a probe."""

    client: Redis
    reason: str
    probe_at: float


class _Exchange(NamedTuple):
    """Commands sent to one node: their places among all commands of the call."""

    address: Address
    client: Redis
    connection: RowConnection
    places: list[int]


class RedisNodes:
    """Sends commands to the nodes that hold their keys. Every method may be called from any thread.

    redis-py knows the nodes, makes connections, logs users in, and follows slots that move.

    A node that refuses connections is asked again at once. A silent node would hold up every caller, so calls skip it
    until it has answered ``probe``.

    Attributes:
        topology: the nodes.
    """

    def __init__(self, config: RedisConfig) -> None:
        """Connect nowhere yet. See ``RedisTopology`` for the error."""
        self.topology = RedisTopology(config)
        self._timeout_s = config.timeout_ms / 1000
        self._silent: dict[Address, _Silence] = {}  # calls add nodes, and ``probe`` removes them

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send ``commands`` to all nodes at once, and return the replies in the same order, as redis-py gives them.

        A command that did not reach its node, or reached the wrong node, is sent again, so it may run twice.

        Raises:
            RedisNodeTimeoutError: a node did not answer within ``timeout_ms``.
            RedisUnreachableError: a node cannot be reached, or was silent and is being probed.
            RedisNodeError: a node answered with an error.
        """
        return [value_of(reply) for reply in self.run_each(commands)]

    def run_each(self, commands: Sequence[Command]) -> list[Reply]:
        """Send ``commands`` as ``run`` does, and return each reply, or its error, with the node's identity.

        Raises:
            RedisNodeError: no node is known yet, and none can be reached.
        """
        deadline = time.monotonic() + self._timeout_s
        replies = self._at_once(commands, deadline)
        for address in {reply.value.address for reply in replies if isinstance(reply.value, _NoAnswer)}:
            if not self._silent:  # a silent node might be asked for the slots: ``probe`` does that
                self.topology.refresh(address)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply.value, (_NoAnswer, Exception)):
                if isinstance(reply.value, (_NoAnswer, MovedError)):
                    reply.run_id = ""  # another node answers
                reply.is_passed_on = isinstance(reply.value, ELSEWHERE)
                try:
                    reply.value = self._again(command, reply.value, deadline)
                except RedisNodeError as err:
                    reply.value = without_frames(err)
        return replies

    def run_identified(self, commands: Sequence[Command]) -> list[Reply]:
        """Send ``commands``, which may run twice, as ``run_each`` does; a reply of an unknown node is an error.

        Raises:
            RedisNodeError: see ``run_each``.
        """
        replies = self.run_each(commands)
        unknown = [place for place, reply in enumerate(replies) if _is_of_unknown_node(reply)]
        # The second time, the nodes of slots that have moved are known.
        for place, reply in zip(unknown, self.run_each([commands[at] for at in unknown]), strict=True):
            if _is_of_unknown_node(reply):
                reply.value = RedisUnreachableError("its slot is moving to another node; ask again")
            replies[place] = reply
        return replies

    def probe(self) -> None:
        """Learn the slots again if a node is silent, and ask each silent node whose pause is over for an answer.

        A background thread calls this often, because a silent node may hold it up.
        """
        for address, silence in list(self._silent.items()):
            self.topology.refresh(address)
            if not self.topology.is_master(address):  # another node has its slots
                del self._silent[address]
            elif time.monotonic() >= silence.probe_at:
                if self._answers(silence.client):
                    del self._silent[address]
                else:
                    silence.probe_at = time.monotonic() + max(PROBE_PAUSE_S, self._timeout_s)

    def _answers(self, client: Redis) -> bool:
        """Whether a node answers in time; an error is an answer too, and the next call reports it."""
        try:
            with _borrowed(client, time.monotonic() + self._timeout_s) as connection:
                connection.unread = 1
                connection.send_command("INFO", "server", check_health=False)
                connection.read_response()
                connection.unread = 0
        except BROKEN as err:
            return not isinstance(err, LATE)
        return True

    def _at_once(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Send each command to its node, then read the replies, node by node; errors stand in their replies' places."""
        replies = [Reply() for _ in commands]
        by_node: dict[Address, tuple[Redis, list[int]]] = {}
        for place, command in enumerate(commands):
            try:
                address, client = self.topology.node(command.key)
            except RedisNodeError as err:
                replies[place].value = without_frames(err)
                continue
            by_node.setdefault(address, (client, []))[1].append(place)
        with ExitStack() as taken:
            sent: list[_Exchange] = []
            for address in sorted(by_node):  # in one order, so two callers never wait for each other's connections
                client, places = by_node[address]
                began, connection = time.monotonic(), None
                try:
                    self._check_not_silent(address)
                    connection = taken.enter_context(_borrowed(client, deadline))
                    connection.unread = len(places)
                    connection.send_packed_command([b"".join([commands[place].payload for place in places])])
                    sent.append(_Exchange(address, client, connection, places))
                except BROKEN as err:
                    failure = self._no_answer(address, err, is_unreachable=connection is None)
                    self._note_silence(failure, err, client, may_wait=began < deadline)
                    for place in places:  # busy connections say nothing about the node
                        replies[place].value = failure.error() if isinstance(err, BusyError) else failure
            for exchange in sent:
                self._read(exchange, commands, replies, deadline)
        return replies

    def _read(self, exchange: _Exchange, commands: Sequence[Command], replies: list[Reply], deadline: float) -> None:
        began = time.monotonic()
        for done, place in enumerate(exchange.places):
            reply = replies[place]
            reply.run_id = exchange.connection.run_id
            try:
                reply.value = _reply(exchange, commands[place])
            except ResponseError as err:
                is_elsewhere = isinstance(err, ELSEWHERE)
                reply.value = without_frames(err) if is_elsewhere else RedisNodeError(f"{exchange.address}: {err}")
            except BROKEN as err:
                no_answer = self._no_answer(exchange.address, err, is_unreachable=False)
                self._note_silence(no_answer, err, exchange.client, may_wait=began < deadline)
                for rest in exchange.places[done:]:
                    replies[rest].value = no_answer
                return
            exchange.connection.unread -= 1

    def _again(self, command: Command, first: _NoAnswer | Exception, deadline: float) -> Any:
        """Send a command that failed at its node through redis-py, which finds the right node."""
        if isinstance(first, RedisNodeError):
            raise without_frames(first)
        if isinstance(first, _NoAnswer) and first.is_unreachable and self._is_at(first.address, command):
            raise first.error()
        try:
            return self._followed(_words(command), deadline)
        except LOST as err:
            if isinstance(first, _NoAnswer):
                raise replace(first, is_late=first.is_late or isinstance(err, LATE)).error() from err
            raise node_error(f"{first}: {reason_of(err)}", err) from err

    def _is_at(self, address: Address, command: Command) -> bool:
        return self.topology.node(command.key)[0] == address

    def _followed(self, words: Sequence[Any], deadline: float) -> Any:
        """Send one command to its slot, as often as there is time while the slot moves.

        Both nodes refuse a command of several keys then, unless one node has them all.
        """
        while True:
            seconds_until(deadline)
            try:
                return self.topology.client.execute_command(*words)
            except ClusterError as err:
                if isinstance(err, ClusterDownError):
                    raise
                if seconds_until(deadline) < FOLLOWED_S:
                    raise ClusterError("its slot is still moving to another node") from err

    def _check_not_silent(self, address: Address) -> None:
        silence = self._silent.get(address)
        if silence is not None:
            raise NoConnectionError(f"{silence.reason} in an earlier call; it is being probed")

    def _note_silence(self, no_answer: _NoAnswer, error: Exception, client: Redis, *, may_wait: bool) -> None:
        """Skip a node from now on if it was late; ``may_wait``: other nodes have not used up the time of the call."""
        if no_answer.is_late and may_wait and not isinstance(error, BusyError):
            probe_at = time.monotonic() + self._timeout_s
            self._silent.setdefault(no_answer.address, _Silence(client, no_answer.reason, probe_at))

    def _no_answer(self, address: Address, error: Exception, *, is_unreachable: bool) -> _NoAnswer:
        reason = self.topology.why_no_connection(error) if is_unreachable else f"no reply: {reason_of(error)}"
        return _NoAnswer(address, reason, is_unreachable, isinstance(error, LATE), type(node_error(reason, error)))


def value_of(reply: Reply) -> Any:
    """The value of a reply.

    Raises:
        RedisNodeError: the command failed.
    """
    if isinstance(reply.value, RedisNodeError):
        raise without_frames(reply.value)
    return reply.value


def _is_of_unknown_node(reply: Reply) -> bool:
    return not reply.run_id and not isinstance(reply.value, RedisNodeError)


@contextmanager
def _borrowed(client: Redis, deadline: float) -> Iterator[RowConnection]:
    pool = client.connection_pool
    connection = pool.lend(deadline)  # type: ignore[attr-defined]  # a RowPool
    try:
        yield connection
    finally:
        if connection.unread:
            connection.disconnect()
        pool.release(connection)


def _reply(exchange: _Exchange, command: Command) -> Any:
    connection = exchange.connection
    if command.take is None:
        return exchange.client.parse_response(connection, command.name)
    values = connection.read_values(command.count, command.value_bytes)
    return values if isinstance(values, list) else command.take(values)


def _words(command: Command) -> list[Any]:
    """The words of a command, as redis-py takes them."""
    reader = hiredis.Reader()
    reader.feed(command.payload)
    return [command.name, *reader.gets()[1:]]
