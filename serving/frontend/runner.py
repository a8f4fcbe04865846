"""Where a predict request runs: at once on the event loop if it is short, in a bounded thread pool otherwise."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter, thread_time
from typing import TypeVar

_T = TypeVar("_T")

#: A request that is expected to take less runs on the event loop.
INLINE_S = 0.001
#: How much the latest request weighs in what is expected of the next one.
_WEIGHT = 0.1
#: After how many requests in the pool it is looked at again whether they have become short.
_RETRY_REQUESTS = 100


class _Pace:
    """What is known of one kind of request.

    Only a request that ran on the event loop tells how long one takes there. In the pool the clock also counts waiting
    for the interpreter, which a busy event loop lets go of after milliseconds only, and a short request would look
    long for ever. The processor time it used is a lower bound: requests may come back to the event loop when that is
    short, and leave it again if they wait for a slow tier.
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

    Handing a request to a thread and back costs more than a small model needs to answer it, so short requests run
    where they are. What is short is learnt per model and size of the body (in powers of two). The first request of a
    kind goes to the pool. How long a compressed body takes is not to be told from its size: see ``run_pooled``.
    """

    def __init__(self, threads: int) -> None:
        """Start a pool of ``threads`` threads."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hotrow-predict")
        self._paces: dict[tuple[str, int], _Pace] = {}

    async def run(self, model: str, body_bytes: int, work: Callable[[], _T]) -> _T:
        """Run ``work`` and return its result or raise its error.

        Args:
            model: the model's name; it must exist, as it is remembered.
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
        """Run ``work`` in the pool, whatever is expected of it; return its result or raise its error."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Wait for what is running and end the threads."""
        self._pool.shutdown()


def _timed(work: Callable[[], _T], clock: Callable[[], float]) -> tuple[_T, float]:
    began = clock()
    return work(), clock() - began
