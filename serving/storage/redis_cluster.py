"""The nodes of one Redis server or cluster: who holds what, and commands to all of them at once."""

import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.config import RedisConfig
from serving.storage.redis_connection import Address, RedisConnection, RedisNodeError, import_hiredis, tls_context
from serving.storage.redis_pool import NodePool
from serving.storage.redis_topology import SLOTS, Topology, parse_cluster_slots, single_node

MOST_ATTEMPTS = 4  # a broken connection, a slot that moved, and one that is just moving, in one call
ASK_PAUSE_S = 0.1  # between questions for the topology while a node is down; one that MOVED is asked about at once
# First words of the errors after which the same command may succeed elsewhere, or here a moment later.
ELSEWHERE = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY"})


class Command(Protocol):
    """One command on one key."""

    @property
    def slot(self) -> int:
        """The hash slot of its key."""

    @property
    def payload(self) -> bytes:
        """What is sent."""

    def read(self, connection: RedisConnection, deadline: float) -> Any:
        """Take its reply from the connection."""


@dataclass(slots=True)
class _Call:
    """A command under way: where it must go next, and what came back."""

    command: Command
    asking: Address | None = None  # a slot that is moving there: ASKING must precede the command
    reply: Any = None


@dataclass(slots=True)
class _Round:
    """What came of sending calls once."""

    left: list[_Call] = field(default_factory=list)  # to be sent again
    failures: list[RedisNodeError] = field(default_factory=list)  # why
    refusals: list[RedisNodeError] = field(default_factory=list)  # errors that no second try mends

    def failed(self, error: RedisNodeError, calls: Sequence[_Call]) -> None:
        """The calls did not reach a node, or their replies did not come."""
        self.failures.append(error)
        self.left += calls
        for call in calls:
            call.asking = None


class RedisCluster:
    """Sends commands to the nodes that hold their keys. Every method may be called from any thread.

    A server that is not part of a cluster is a cluster of one node.
    """

    def __init__(self, config: RedisConfig) -> None:
        """Connect to the first of ``config.addresses`` that answers, and learn from it which nodes there are.

        Raises:
            MissingExtraError: hiredis is not installed.
            RedisNodeError: none answers, or the user is refused.
            OSError: a TLS file cannot be read.
        """
        hiredis = import_hiredis()
        self._reply_error: type[Exception] = hiredis.ReplyError
        self._pack = hiredis.pack_command
        self._config = config
        self._tls: ssl.SSLContext | None = tls_context(config.tls) if config.tls else None
        self._seeds = tuple(Address(host, port) for host, port in config.addresses)
        self._pools: dict[Address, NodePool] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # guards the two above
        self._refreshing = threading.Lock()  # one refresh at a time; guards the next
        self._asked_at = -ASK_PAUSE_S
        try:
            self._topology = self._discover(self._seeds, self._deadline())
        except BaseException:
            self.close()
            raise

    @property
    def topology(self) -> Topology:
        """Which node holds what, as last heard."""
        return self._topology

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send ``commands``, all nodes at once, and return their replies in the same order.

        A command that did not reach its node, or reached the wrong one, is sent again after the nodes have been asked
        anew which of them holds what; so it may be carried out twice.

        Raises:
            RedisNodeError: a node did not answer within ``timeout_ms``, or answered with an error. To learn for the
                next call who has taken its place may take ``connect_timeout_ms`` more.
        """
        deadline = self._deadline()
        calls = [_Call(command) for command in commands]
        left, attempt = calls, 0
        while left:
            attempt += 1
            topology = self._topology
            outcome = self._round(left, topology, deadline)
            if outcome.refusals:
                raise outcome.refusals[0]
            left = outcome.left
            if left:
                may_succeed = self._may_succeed_now(outcome.failures, topology, deadline)
                if not may_succeed or attempt == MOST_ATTEMPTS or time.monotonic() >= deadline:
                    raise outcome.failures[0]
        return [call.reply for call in calls]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def _deadline(self) -> float:
        return time.monotonic() + self._config.timeout_ms / 1000

    def _may_succeed_now(self, failures: Sequence[RedisNodeError], before: Topology, deadline: float) -> bool:
        """Learn anew who holds what; False where trying again would only meet the same closed door."""
        elsewhere = [failure for failure in failures if isinstance(failure, _ElsewhereError)]
        if all(failure.is_asking for failure in elsewhere) and len(elsewhere) == len(failures):
            return True  # a slot on its way belongs to its old node until it has arrived
        hints = [failure.elsewhere for failure in elsewhere if failure.elsewhere]
        failed = {failure.address for failure in failures if failure not in elsewhere}
        ask_deadline = max(deadline, time.monotonic() + self._config.connect_timeout_ms / 1000)
        after = self._refreshed(before, hints, failed, ask_deadline)
        only_unreachable = all(failure.is_unreachable for failure in failures)
        return not only_unreachable or not after.agrees_with(before)

    def _round(self, calls: Sequence[_Call], topology: Topology, deadline: float) -> _Round:
        """Send each call to its node, then read the replies, node by node."""
        by_node: dict[Address, list[_Call]] = {}
        for call in calls:
            node = call.asking or topology.owner(call.command.slot)
            if node is None:
                raise RedisNodeError(topology.masters[0], f"no node of the cluster holds slot {call.command.slot}")
            by_node.setdefault(node, []).append(call)
        outcome = _Round()
        with ExitStack() as taken:
            sent: list[tuple[RedisConnection, list[_Call]]] = []
            for node in sorted(by_node):  # in one order, so that two callers never wait for each other's connections
                try:
                    connection = self._take(node, taken, deadline)
                    connection.send(self._payloads(by_node[node]), deadline)
                    sent.append((connection, by_node[node]))
                except RedisNodeError as err:
                    outcome.failed(err, by_node[node])
            for connection, group in sent:
                self._read(connection, group, deadline, outcome)
        return outcome

    def _take(self, node: Address, taken: ExitStack, deadline: float) -> RedisConnection:
        pool = self._pool(node)
        connection = pool.take(deadline)
        taken.callback(pool.give_back, connection)
        return connection

    def _payloads(self, calls: Sequence[_Call]) -> list[bytes]:
        asking = self._pack(("ASKING",))
        return [part for call in calls for part in ((asking,) if call.asking else ()) + (call.command.payload,)]

    def _read(self, connection: RedisConnection, calls: Sequence[_Call], deadline: float, outcome: _Round) -> None:
        for done, call in enumerate(calls):
            try:
                if call.asking:
                    connection.read_reply(deadline)
                call.reply = call.command.read(connection, deadline)
            except RedisNodeError as err:
                outcome.failed(err, calls[done:])
                return
            if isinstance(call.reply, self._reply_error):
                error = _node_error(connection.address, str(call.reply))
                if isinstance(error, _ElsewhereError):
                    outcome.failed(error, [call])
                    call.asking = error.elsewhere if error.is_asking else None
                else:
                    outcome.refusals.append(error)

    def _pool(self, node: Address) -> NodePool:
        with self._lock:
            if self._is_closed:
                raise RedisNodeError(node, "the connections are closed")
            pool = self._pools.get(node)
            if pool is None:
                pool = self._pools[node] = NodePool(node, self._config, self._tls)
            return pool

    def _refreshed(self, before: Topology, hints: Sequence[Address], failed: set[Address], deadline: float) -> Topology:
        """Ask for the topology, unless another thread has just done so; the old one where nobody answers."""
        if not self._refreshing.acquire(timeout=max(deadline - time.monotonic(), 0)):
            return before
        try:
            is_fresh = not hints and time.monotonic() < self._asked_at + ASK_PAUSE_S
            if self._topology is before and not is_fresh:
                known = (*hints, *before.masters, *before.replicas, *self._seeds)
                asked = [node for node in dict.fromkeys(known) if node not in failed]
                self._asked_at = time.monotonic()
                if asked:
                    self._topology = self._discover(asked, deadline)
                    self._forget_pools(self._topology)
        except RedisNodeError:
            return before
        finally:
            self._refreshing.release()
        return self._topology

    def _forget_pools(self, topology: Topology) -> None:
        kept = {*topology.masters, *topology.replicas, *self._seeds}
        with self._lock:
            gone = [self._pools.pop(node) for node in list(self._pools) if node not in kept]
        for pool in gone:
            pool.close()

    def _discover(self, nodes: Sequence[Address], deadline: float) -> Topology:
        """Ask one node after the other until one knows."""
        failures = []
        for node in nodes:
            try:
                return self._ask(node, deadline)
            except RedisNodeError as err:
                failures.append(err)
        if len(failures) > 1:
            reason = "; ".join(str(one) for one in failures)
            raise RedisNodeError(failures[0].address, f"no node answers: {reason}", is_unreachable=True)
        raise failures[0]

    def _ask(self, node: Address, deadline: float) -> Topology:
        with ExitStack() as taken:
            connection = self._take(node, taken, deadline)
            connection.send([self._pack(("CLUSTER", "SLOTS"))], deadline)
            reply = connection.read_reply(deadline)
        if isinstance(reply, self._reply_error):
            text = str(reply)
            if "cluster support disabled" in text or "unknown command" in text:
                return single_node(node)
            raise RedisNodeError(node, text)
        topology = parse_cluster_slots(reply, node)
        if not topology.masters:
            raise RedisNodeError(node, f"is part of a cluster of which no node holds any of the {SLOTS} slots")
        return topology


class _ElsewhereError(RedisNodeError):
    """A node says that the command may succeed at ``elsewhere``, or, where that is None, somewhere else or later."""

    def __init__(self, address: Address, reason: str, elsewhere: Address | None, is_asking: bool) -> None:
        super().__init__(address, reason)
        self.elsewhere = elsewhere
        self.is_asking = is_asking


def _node_error(node: Address, text: str) -> RedisNodeError:
    """The error reply ``text`` of ``node``: ``MOVED <slot> <host>:<port>`` and ``ASK`` alike name a node."""
    word, *rest = text.split(" ")
    if word not in ELSEWHERE:
        return RedisNodeError(node, text)
    elsewhere = None
    if word in ("MOVED", "ASK") and len(rest) == 2:
        host, _, port = rest[1].rpartition(":")
        elsewhere = Address(host or node.host, int(port))
    return _ElsewhereError(node, text, elsewhere, is_asking=word == "ASK")
