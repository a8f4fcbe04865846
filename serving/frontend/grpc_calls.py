"""The open gRPC calls, and the limits of what their clients make the server hold.

gRPC's core stores a message until it is complete, and an answer until its client takes it. The core does not report or
limit how much it stores. So a watch checks all calls several times a second:

- The bytes that a connection's unfinished messages hold are at most those that came since its oldest unfinished read
  began. The system counts them for each connection.
- A call that waits for its client can be ended with a status.
- A call whose client takes no answer cannot be ended, because the status would wait behind the answer. So its
  connection is cut.

Requests do not wait for the watch.
"""

import asyncio
import heapq
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Any, NoReturn

import grpc

from kernels.errors import HotrowError
from serving.frontend.client_texts import message_of
from serving.frontend.codes import codes_of
from serving.frontend.grpc_guard import MethodGuard
from serving.frontend.grpc_sockets import ServerSockets, client_of
from serving.frontend.limits import Limits
from serving.frontend.rare_warnings import RareWarnings

_log = logging.getLogger("hotrow.grpc")
_WATCH_INTERVAL_S = 0.1
#: How often tokens are checked, and connections are counted if there are no new connections.
_COUNT_INTERVAL_S = 1.0
#: How long requests are accepted after the signal to stop, because they may be on their way.
_LINGER_S = 0.25
_DRAIN_INTERVAL_S = 0.05
_STOPPING = "the server is stopping"
#: A client that takes fewer bytes in ``answer_timeout_s`` does not read.
_LEAST_TAKEN_BYTES = 64 << 10
#: If too many bytes wait, younger answers are not cut.
_LEAST_UNREAD_S = 1.0
_FAILURE_PAUSE_S = 5.0
#: The code in the metrics if the client disconnected, as in nginx.
CLIENT_GONE = 499
_LATE, _EXHAUSTED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
_HTTP_CODES = {_LATE: 504, _EXHAUSTED: 429}


class Refusal(Exception):  # noqa: N818  # it ends a call, and is never an error of the server
    """Ends a call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with ``code`` and ``details``."""
        super().__init__(details)
        self.code = code


def refusal_of(error: HotrowError | MemoryError) -> Refusal:
    """Return what ends a call with an error."""
    return Refusal(grpc.StatusCode[codes_of(error)[1]], message_of(error))


class _Connection:
    """What the calls of one connection make the server hold.

    Attributes:
        client: the client's address, as in ``client_of``.
        calls: its open calls, the oldest first.
        waiting: since when calls wait for the client, the longest wait first.
        received_bytes: how many bytes had come when they were last counted.
        used_s: when a call began or ended.
    """

    __slots__ = ("calls", "client", "received_bytes", "used_s", "waiting")

    def __init__(self, client: str) -> None:
        self.client = client
        self.calls: dict[Call, None] = {}
        self.received_bytes = 0
        self.waiting: dict[Call, float] = {}
        self.used_s = 0.0

    def reads(self) -> "list[Call]":
        """The calls that may have an unfinished message, the longest wait first."""
        return [call for call in self.waiting if call.is_reading]

    def held_bytes(self, most_message_bytes: int, received_bytes: int | None) -> int:
        """Return the most that the unfinished messages can hold, and keep how many bytes have come.

        Whatever came before a read began does not belong to its message. So the messages of the ``older`` longest
        reads are full at worst, and all others together hold what came since the next read began.

        Args:
            most_message_bytes: what one message can hold.
            received_bytes: how many bytes have come; None: unknown, so all messages are full at worst.
        """
        reads = self.reads()
        if received_bytes is None:
            return len(reads) * most_message_bytes
        if received_bytes < self.received_bytes:  # a new connection from the same port
            for call in reads:
                call.bytes_before = 0
        self.received_bytes = received_bytes
        newer_bytes = [*(received_bytes - call.bytes_before for call in reads), 0]
        return min(older * most_message_bytes + newer for older, newer in enumerate(newer_bytes))


class Call:
    """One call.

    Attributes:
        context: gRPC's context.
        connection: its connection.
        guard: checks its messages.
        token: the name of its client's token.
        task: answers it; the call ends with it.
        is_stream: it may wait for the next message without a limit of time.
        is_watch: it has all its messages, and sends an answer now and then.
        is_reading: it reads a message.
        bytes_before: at least this many of the connection's bytes came before the read began.
        unread_bytes: the size of the answer that is being sent; 0 while none is.
        sending_s: since when it is sent, or since when the client has taken too little.
        taken_bytes: what the connection had taken then; None: not counted yet.
        refusal: ends the call.
        http_code: what its request counts as if it does not arrive.
    """

    __slots__ = (
        "bytes_before",
        "connection",
        "context",
        "guard",
        "http_code",
        "is_reading",
        "is_stream",
        "is_watch",
        "refusal",
        "sending_s",
        "taken_bytes",
        "task",
        "token",
        "unread_bytes",
    )

    def __init__(
        self, context: Any, connection: _Connection, task: "asyncio.Task[Any]", guard: MethodGuard, token: str
    ) -> None:
        """Describe a call that has begun."""
        self.context = context
        self.guard = guard
        self.token = token
        self.connection = connection
        self.task = task
        self.is_stream = self.is_watch = self.is_reading = False
        self.unread_bytes = self.bytes_before = 0
        self.sending_s = 0.0
        self.taken_bytes: int | None = None
        self.refusal: asyncio.Task[None] | None = None
        self.http_code = CLIENT_GONE


class OpenCalls:
    """All open calls, and a watch that keeps what their clients make the server hold within bounds.

    Belongs to one event loop.
    """

    def __init__(self, limits: Limits, most_message_bytes: int) -> None:
        """Bound calls by ``limits``; gRPC refuses messages beyond ``most_message_bytes``."""
        self._limits = limits
        self._most_message_bytes = most_message_bytes
        self._connections: dict[str, _Connection] = {}  # by gRPC's name of the peer
        self._used: set[_Connection] = set()  # connections whose bytes must be counted
        self._calls = 0
        self._sending: set[Call] = set()
        self._unread_bytes = 0
        self._seen_s: dict[str, float] = {}  # when each open connection was found
        self._has_new = self._is_stopping = False
        self._counted_s = -math.inf
        self._warn = RareWarnings(_log).warn

    def begin(self, context: Any, guard: MethodGuard) -> Call:
        """Open a call, which ends with the task that runs now.

        Raises:
            Refusal: too many calls are open, the client may not make the call, or the server is stopping.
        """
        if self._is_stopping:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, _STOPPING)
        if self._calls >= 2 * self._limits.max_calls:
            raise Refusal(_EXHAUSTED, f"{self._calls:,} calls are open; the server accepts no more at a time")
        try:
            token = guard.check_call(context)
        except HotrowError as err:
            raise refusal_of(err) from None
        peer = context.peer()
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(client_of(peer))
            self._has_new = True
        task: Any = asyncio.current_task()
        call = Call(context, connection, task, guard, token)
        connection.calls[call] = None
        self._calls += 1
        task.add_done_callback(partial(self._end, call))
        return call

    def _end(self, call: Call, _task: Any) -> None:
        connection = call.connection
        self.goes_on(call)
        self.has_sent(call)
        self._calls -= 1
        del connection.calls[call]
        connection.used_s = monotonic()

    async def read(self, call: Call) -> bytes | None:
        """Read the next message; None if the client sends no more."""
        connection = call.connection
        self._used.add(connection)
        self.waits(call)
        call.is_reading, call.bytes_before = True, connection.received_bytes
        data = await call.context.read()
        self.goes_on(call)
        return None if data is grpc.aio.EOF else data

    def waits(self, call: Call) -> None:
        """Note that a call waits for its client."""
        call.connection.waiting[call] = monotonic()

    def goes_on(self, call: Call) -> None:
        """Note that a call does not wait for its client any more."""
        call.connection.waiting.pop(call, None)
        call.is_reading = False

    def sends(self, call: Call, size_bytes: int) -> None:
        """Note that a call sends an answer, until ``has_sent`` or its end."""
        call.unread_bytes, call.sending_s, call.taken_bytes = size_bytes, monotonic(), None
        self._unread_bytes += size_bytes
        self._sending.add(call)

    def has_sent(self, call: Call) -> None:
        """Note that the client has taken the answer."""
        self._unread_bytes -= call.unread_bytes
        call.unread_bytes = 0
        self._sending.discard(call)

    async def drain(self, sockets: ServerSockets, timeout_s: float) -> None:
        """Answer requests that are on their way, refuse later ones, and close all connections within ``timeout_s``."""
        began_s = monotonic()
        while (open_now := sockets.find()) and (waited_s := monotonic() - began_s) < timeout_s:
            if waited_s >= _LINGER_S:
                self._is_stopping = True
                self._end_streams()
                for client in open_now - {
                    connection.client for connection in self._connections.values() if connection.calls
                }:
                    sockets.cut(client)
            await asyncio.sleep(_DRAIN_INTERVAL_S)
        for client in open_now:
            sockets.cut(client)

    def _end_streams(self) -> None:
        """End the streams that wait for a request."""
        for connection in self._connections.values():
            for call in [call for call in connection.waiting if call.is_stream]:
                self._refuse(call, grpc.StatusCode.UNAVAILABLE, _STOPPING)

    async def watch(self, sockets: ServerSockets) -> NoReturn:
        """Keep the calls within the limits until cancelled; ``sockets`` are those of the server."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            try:
                self._bound(sockets, monotonic())
            except Exception:  # noqa: BLE001  # the next check must still run
                _log.exception("the watch over gRPC's calls failed; it pauses for %g s", _FAILURE_PAUSE_S)
                await asyncio.sleep(_FAILURE_PAUSE_S)

    def _bound(self, sockets: ServerSockets, now_s: float) -> None:
        is_due = now_s - self._counted_s >= _COUNT_INTERVAL_S
        if is_due:
            self._counted_s = now_s
            self._end_withdrawn()
        if is_due or self._has_new:
            self._count(sockets, now_s)
        self._bound_messages(sockets, now_s)
        self._bound_answers(sockets, now_s)
        self._bound_calls()

    def _count(self, sockets: ServerSockets, now_s: float) -> None:
        """Find the connections, forget those that are closed, and cut some if they are too many."""
        self._has_new, open_now = False, sockets.find()
        self._connections = {
            peer: connection
            for peer, connection in self._connections.items()
            if connection.calls or connection.client in open_now
        }
        self._seen_s = {client: self._seen_s.get(client, now_s) for client in open_now}
        excess = len(open_now) - self._limits.max_connections
        if excess > 0:
            for client in self._idlest(excess):
                self._cut(sockets, client, f"more than {self._limits.max_connections:,} are open")

    def _idlest(self, count: int) -> list[str]:
        """The clients whose connections have been idle longest; a call that waits for its client is idle."""
        busy = {connection.client: connection for connection in self._connections.values()}

        def idleness(client: str) -> tuple[bool, float]:
            connection = busy.get(client)
            if connection is None:
                return False, self._seen_s[client]
            return len(connection.calls) > len(connection.waiting), max(connection.used_s, self._seen_s[client])

        return heapq.nsmallest(count, self._seen_s, idleness)

    def _end_withdrawn(self) -> None:
        """End watches and waiting streams whose tokens are no longer valid."""
        for connection in self._connections.values():
            for call in [call for call in connection.waiting if call.is_watch or call.is_stream]:
                try:
                    call.guard.check(None, call.context)
                except HotrowError as err:
                    refusal = refusal_of(err)
                    self._refuse(call, refusal.code, str(refusal))

    def _bound_messages(self, sockets: ServerSockets, now_s: float) -> None:
        """End reads that take too long, and the oldest reads while unfinished messages may hold too much."""
        limits, size = self._limits, self._most_message_bytes
        held_bytes: dict[_Connection, int] = {}
        for connection in self._used:
            traffic = sockets.traffic(connection.client)
            received_bytes = None if traffic is None else traffic.received_bytes
            for call in connection.reads():
                arrived_bytes = 0 if received_bytes is None else max(received_bytes - call.bytes_before, 0)
                time_s = limits.body_time_s(min(arrived_bytes, size))
                if not call.is_stream and now_s - connection.waiting[call] > time_s:
                    self._refuse(call, _LATE, f"the message did not arrive within {time_s:g} s")
            held_bytes[connection] = connection.held_bytes(size, received_bytes)
        self._used = {connection for connection in held_bytes if connection.reads()}
        excess_bytes: float = sum(held_bytes.values()) - max(limits.max_arriving_bytes, 2 * size)
        if excess_bytes <= 0:
            return
        reason = (
            f"unfinished messages take more than {limits.max_arriving_bytes:,} bytes, and this client holds the most"
        )
        holders = {connection: held_bytes[connection] for connection in self._used if held_bytes[connection]}
        for connection in _by_client(holders):
            reads = connection.reads()
            mean_bytes = held_bytes[connection] / len(reads)
            for call in reads[: math.ceil(excess_bytes / mean_bytes)]:
                self._refuse(call, _EXHAUSTED, reason)
                excess_bytes -= mean_bytes
            if excess_bytes <= 0:
                return

    def _bound_answers(self, sockets: ServerSockets, now_s: float) -> None:
        """Cut the connections of clients that do not read."""
        limits = self._limits
        stuck: Counter[_Connection] = Counter()
        for call in self._sending:
            connection, waited_s = call.connection, now_s - call.sending_s
            if waited_s < _LEAST_UNREAD_S:
                continue
            traffic = sockets.traffic(connection.client)
            if traffic is None:
                continue
            if call.taken_bytes is None or traffic.taken_bytes - call.taken_bytes >= _LEAST_TAKEN_BYTES:
                call.taken_bytes, call.sending_s = traffic.taken_bytes, now_s
            elif waited_s > limits.answer_timeout_s:
                self._cut(sockets, connection.client, f"its client took no answer for {limits.answer_timeout_s:g} s")
            stuck[connection] += call.unread_bytes
        if stuck and self._unread_bytes > limits.most_unread_bytes:
            most_bytes = limits.most_unread_bytes
            reason = f"unread answers take more than {most_bytes:,} bytes, and its client holds the most"
            self._cut(sockets, _by_client(stuck)[0].client, reason)

    def _bound_calls(self) -> None:
        """While there are too many calls, end the longest wait of the client with the most waiting calls."""
        excess = self._calls - self._limits.max_calls
        if excess <= 0:
            return
        reason = f"more than {self._limits.max_calls:,} calls are open, and this client has the most waiting calls"
        waits: defaultdict[str | _Connection, list[tuple[float, int, Call]]] = defaultdict(list)
        for connection in self._connections.values():
            for call, since_s in connection.waiting.items():
                waits[_owner(call)].append((since_s, id(call), call))
        heap = [(-len(of_client), index, sorted(of_client)) for index, of_client in enumerate(waits.values())]
        heapq.heapify(heap)
        while excess > 0 and heap:
            size, index, of_client = heapq.heappop(heap)
            self._refuse(of_client.pop(0)[-1], _EXHAUSTED, reason)
            excess -= 1
            if of_client:
                heapq.heappush(heap, (size + 1, index, of_client))

    def _refuse(self, call: Call, code: grpc.StatusCode, details: str) -> None:
        """End a call that waits for its client."""
        self.goes_on(call)
        call.http_code = _HTTP_CODES.get(code, CLIENT_GONE)
        if code is _EXHAUSTED:
            self._warn("ended a gRPC call: %s", details)
        call.refusal = asyncio.ensure_future(_ended(call, code, details))

    def _cut(self, sockets: ServerSockets, client: str, reason: str) -> None:
        self._warn("cut a gRPC connection: %s", reason)
        sockets.cut(client)


def _owner(call: Call) -> str | _Connection:
    """Who is behind a call: a token's name or, without tokens, its connection; never an address."""
    return call.token or call.connection


def _by_client(sizes: Mapping[_Connection, int]) -> list[_Connection]:
    """Sort connections by what the clients behind them hold in all, then by what they hold; the largest come first."""
    owners = {connection: next(map(_owner, connection.calls), connection) for connection in sizes}
    totals: Counter[str | _Connection] = Counter()
    for connection, size in sizes.items():
        totals[owners[connection]] += size
    return sorted(sizes, key=lambda connection: (-totals[owners[connection]], -sizes[connection]))


async def _ended(call: Call, code: grpc.StatusCode, details: str) -> None:
    """End a call from outside. Its read then ends by itself."""
    try:
        await call.context.abort(code, details)
    except grpc.aio.AbortError as err:
        err.with_traceback(None)  # gRPC stores it
    except (grpc.aio.UsageError, grpc.aio.InternalError):  # it has ended already
        return
    if call.is_watch:
        call.task.cancel()
