"""Decides which requests are short enough for the event loop; other requests run in a bounded thread pool."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, thread_time
from typing import TypeVar

_T = TypeVar("_T")

#: A request that should take less time runs on the event loop.
INLINE_S = 0.001
#: A larger request never runs on the event loop. Most such requests may be short, but a few may take far longer.
MOST_INLINE_BYTES = 256 << 10
#: Weight of the latest request in the expected time of the next request.
_WEIGHT = 0.1
#: After this many requests in the pool, the expected time is measured again.
_RETRY_REQUESTS = 100


class _Pace:
    """How long one kind of request takes.

    It is processor time: other processes of a busy machine must not drive short requests off the event loop. A request
    in the pool may share its time with others of its batch, so only a request on the event loop shows how long requests
    take there. If the time in the pool is short, requests return to the event loop, and may leave it again.
    """

    def __init__(self) -> None:
        self.expected_s = math.inf
        self._until_retry = 1

    def ran_inline(self, processor_s: float) -> None:
        self.expected_s += _WEIGHT * (processor_s - self.expected_s)

    def ran_pooled(self, processor_s: float) -> None:
        self._until_retry -= 1
        if not self._until_retry:
            self.expected_s = processor_s
            self._until_retry = _RETRY_REQUESTS


class Runner:
    """Runs short requests; belongs to one event loop.

    Handing a request to a thread and back costs more than a small model needs to answer, so short requests run on the
    event loop. Which requests are short is learned per model and per body size (in powers of two). The first request of
    a kind goes to the pool.

    Attributes:
        threads: the number of threads.
        pool: runs requests that are not short.
        short_s: how long a short request takes, by the latest ones; 0 before the first.
    """

    def __init__(self, threads: int) -> None:
        """Start a pool of ``threads`` threads."""
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="hotrow-predict")
        self.short_s = 0.0
        self._paces: dict[tuple[str, int], _Pace] = {}

    def is_short(self, model: str, body_bytes: int) -> bool:
        """Return whether requests of this size are short. The model must be served, because its name is stored."""
        if body_bytes > MOST_INLINE_BYTES:
            return False
        pace = self._paces.get((model, body_bytes.bit_length()))
        return pace is not None and pace.expected_s < INLINE_S

    def run(self, model: str, body_bytes: int, work: Callable[[], _T]) -> _T:
        """Run the work of a short request at once, and return its result."""
        began_s, began_processor_s = perf_counter(), thread_time()
        try:
            return work()
        finally:  # an error takes time, too
            self._paces[model, body_bytes.bit_length()].ran_inline(thread_time() - began_processor_s)
            self.short_s += _WEIGHT * (perf_counter() - began_s - self.short_s)

    def took(self, model: str, body_bytes: int, processor_s: float) -> None:
        """Record how much processor time a request took in the pool."""
        kind = (model, body_bytes.bit_length())
        pace = self._paces.get(kind)
        if pace is None:
            pace = self._paces[kind] = _Pace()
        pace.ran_pooled(processor_s)

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self.pool.shutdown()
