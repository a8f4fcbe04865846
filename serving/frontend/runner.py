"""Where a predict request runs: at once on the event loop if it is short, in a bounded thread pool otherwise."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

_T = TypeVar("_T")

#: A request that is expected to take less runs on the event loop.
INLINE_S = 0.001
#: How much the latest request weighs in what is expected of the next one.
_WEIGHT = 0.2


class Runner:
    """Runs predict requests; belongs to one event loop.

    Handing a request to a thread and back costs more than a small model needs to answer it, so short requests run
    where they are. What is short is learnt: per model and size of the body (in powers of two), from how long the
    latest ones took. The first request of a kind goes to the pool, and so do those whose rows come from a slow tier,
    as soon as they turn out to be slow; the event loop is never blocked for much longer than ``INLINE_S``.
    """

    def __init__(self, threads: int) -> None:
        """Start a pool of ``threads`` threads."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hotrow-predict")
        self._expected_s: dict[tuple[str, int], float] = {}

    async def run(self, model: str, body_bytes: int, work: Callable[[], _T]) -> _T:
        """Run ``work`` and return its result or raise its error.

        Args:
            model: the model's name; it must exist, as it is remembered.
            body_bytes: length of the request's body.
            work: decode, predict and encode.
        """
        kind = (model, body_bytes.bit_length())
        expected_s = self._expected_s.get(kind, 1.0)
        if expected_s < INLINE_S:
            result, seconds = _timed(work)
        else:
            result, seconds = await asyncio.get_running_loop().run_in_executor(self._pool, _timed, work)
        # The first measurement counts whole; later ones move the expectation towards themselves.
        known = kind in self._expected_s
        self._expected_s[kind] = expected_s + _WEIGHT * (seconds - expected_s) if known else seconds
        return result

    def close(self) -> None:
        """Wait for what is running and end the threads."""
        self._pool.shutdown()


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    began = perf_counter()
    return work(), perf_counter() - began
