"""The limits that tests change or that options set.

A limit that nobody changes is a constant where it is checked. ``docs/limits.md`` lists all limits for operators.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.protocol.bounds import Bounds

#: A gRPC message may have so many bytes more than a body, for what is around its tensors.
ENVELOPE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one process, for HTTP and gRPC.

    Attributes:
        max_body_bytes: largest body, before and after decompression.
        max_inflight: maximum predict requests at a time, counted once their bodies are complete; further requests get
            429.
        max_inflight_per_token: the same for all clients with one token.
        max_json_values: maximum values of one JSON document: numbers, strings, lists, objects.
        max_json_depth: how deep lists and objects of one JSON document may be nested.
        max_answer_bytes: largest answer to a predict request, before compression.
        max_unread_bytes: maximum bytes of all answers that wait for slow clients; HTTP and gRPC each.
        max_arriving_bytes: maximum bytes of all HTTP bodies, and of all gRPC messages, that are still arriving.
            Above it, the slowest or largest are refused, so slow clients do not lock out other clients.
        max_connections: maximum HTTP connections, and maximum gRPC connections.
        max_streams: maximum calls at a time on one gRPC connection.
        max_calls: maximum gRPC calls at a time; above it, calls that wait for their clients end.
        head_timeout_s: maximum time for the first line and the headers of a request to arrive.
        body_timeout_s: maximum time for a body to arrive, again for each ``body_part_bytes``.
        body_part_bytes: how much of a body must arrive in that time.
        idle_timeout_s: how long a connection stays open between two requests. Clients keep a pool of connections, and
            fail on closed connections.
        answer_timeout_s: how long a client may leave a waiting answer unread.
    """

    max_body_bytes: int = 16 << 20
    max_inflight: int = 256
    max_inflight_per_token: int = 128
    max_json_values: int = 1_000_000
    max_json_depth: int = 64
    max_answer_bytes: int = 64 << 20
    max_unread_bytes: int = 256 << 20
    max_arriving_bytes: int = 512 << 20
    max_connections: int = 4096
    max_streams: int = 100
    max_calls: int = 4096
    head_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    body_part_bytes: int = 16 << 20
    idle_timeout_s: float = 75.0
    answer_timeout_s: float = 30.0

    def body_time_s(self, arrived_bytes: int) -> float:
        """Return how long a body may take if so many of its bytes have arrived."""
        return self.body_timeout_s * (1 + arrived_bytes // self.body_part_bytes)

    @property
    def most_unread_bytes(self) -> int:
        """``max_unread_bytes``, or two of the largest answers: a client that takes a large answer is not cut for it."""
        return max(self.max_unread_bytes, 2 * self.max_answer_bytes)

    @property
    def bounds(self) -> "Bounds":
        """What one request may make the server build; tensors in shared memory count like a body."""
        from serving.protocol.bounds import Bounds  # needs NumPy, which the command line can do without

        return Bounds(self.max_json_values, self.max_json_depth, self.max_body_bytes, self.max_answer_bytes)
