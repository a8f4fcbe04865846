"""Runs predict requests: short requests at once on the event loop, other requests in a bounded thread pool."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter, thread_time
from typing import TypeVar

_T = TypeVar("_T")

#: A request that should take less time runs on the event loop.
INLINE_S = 0.001
#: Weight of the latest request in the expected time of the next request.
_WEIGHT = 0.1
#: After this many requests in the pool, the expected time is measured again.
_RETRY_REQUESTS = 100


class _Pace:
    """How long one kind of request takes.

    Only a request on the event loop shows how long requests take there. In the pool the clock also counts the wait for
    the interpreter lock, so a short request would look long forever. Processor time is a lower bound: requests return
    to the event loop when it is short, and leave the loop again if they wait for a slow tier.
    """

    def __init__(self) -> None:
        self.expected_s = math.inf
        self._until_retry = 1

    def ran_inline(self, seconds: float) -> None:
        self.expected_s += _WEIGHT * (seconds - self.expected_s)

    def ran_pooled(self, processor_s: float) -> None:
        self._until_retry -= 1
        if not self._until_retry:
            self.expected_s = processor_s
            self._until_retry = _RETRY_REQUESTS


class Runner:
    """Runs predict requests; belongs to one event loop.

    Handing a request to a thread and back costs more than a small model needs to answer, so short requests run on the
    event loop. Which requests are short is learned per model and per body size (in powers of two). The first request of
    a kind goes to the pool. The size of a compressed body says little about its time: see ``run_pooled``.
    """

    def __init__(self, threads: int) -> None:
        """Start a pool of ``threads`` threads."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hotrow-predict")
        self._paces: dict[tuple[str, int], _Pace] = {}

    async def run(self, model: str, body_bytes: int, work: Callable[[], _T]) -> _T:
        """Run ``work`` and return its result or raise its error.

        Args:
            model: the name of an existing model; names are remembered.
            body_bytes: length of the request's body.
            work: decode, predict and encode.
        """
        kind = (model, body_bytes.bit_length())
        pace = self._paces.get(kind)
        if pace is None:
            pace = self._paces[kind] = _Pace()
        if pace.expected_s < INLINE_S:
            result, seconds = _timed(work, perf_counter)
            pace.ran_inline(seconds)
        else:
            result, seconds = await self.run_pooled(partial(_timed, work, thread_time))
            pace.ran_pooled(seconds)
        return result

    async def run_pooled(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in the pool even if it is short; return its result or raise its error."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown()


def _timed(work: Callable[[], _T], clock: Callable[[], float]) -> tuple[_T, float]:
    began = clock()
    return work(), clock() - began
