"""The dynamic batcher: requests that wait for a thread are answered as one batch."""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter, thread_time
from typing import NamedTuple

from serving.errors import OverloadedError
from serving.frontend.exchange import Exchange, answer_together
from serving.repository import ServedModel

#: Weight of one request in the pace. It is small, because a request alone takes longer than its share of a batch.
_PACE_WEIGHT = 1 / 32


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests are merged.

    Attributes:
        max_samples: maximum samples of a batch; None: the model's ``max_batchsize``; 1: requests are not merged.
        max_delay_s: how long the first request of a batch may wait for others while a thread is idle.
        max_wait_s: a request is refused if it would wait longer than this for a thread.
    """

    max_samples: int | None = None
    max_delay_s: float = 0.0
    max_wait_s: float = inf


class _Waiting(NamedTuple):
    """A request in the queue or in a thread; ``answered`` gets its share of the thread's processor time in seconds.

    ``kind`` is the length of its size in bits: how many samples a request has is known only once it is read.
    """

    exchange: Exchange
    answered: "asyncio.Future[float]"
    kind: int


class Batcher:
    """Answers the requests of one model; belongs to one event loop.

    While all threads work, requests wait in a queue. A thread that becomes idle takes its share of the queue and
    answers it as one batch; see ``answer_together``.

    A growing queue only makes every request late. So a request is refused at once if the requests before it would take
    too long at the pace of the latest requests of their sizes. A request with many candidates takes as long as its
    samples.

    Attributes:
        model: the model.
    """

    def __init__(self, model: ServedModel, pool: Executor, threads: int, batching: Batching) -> None:
        """Run batches of ``model`` in ``pool``, at most ``threads`` at a time."""
        self.model = model
        self._pool = pool
        self._threads = threads
        self._max_samples = min(batching.max_samples or model.config.max_batchsize, model.config.max_batchsize)
        self._max_delay_s = batching.max_delay_s if model.can_merge else 0.0
        self._max_wait_s = batching.max_wait_s
        self._pace_s: dict[int, float] = {}  # by kind, how long a thread works on one request, by the latest ones
        self._unanswered: Counter[int] = Counter()  # by kind, requests in the queue and in threads
        self._queue: deque[_Waiting] = deque()
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None

    def check_wait(self) -> None:
        """Raise OverloadedError if a request that came now would wait longer than ``max_wait_s``."""
        ahead = self._unanswered.total()
        wait_s = sum(count * self._pace_s.get(kind, 0.0) for kind, count in self._unanswered.items()) / self._threads
        if wait_s > self._max_wait_s and ahead >= self._threads:
            raise OverloadedError(
                f"this request would wait {wait_s * 1000:.0f} ms, with {ahead} ahead of it; "
                f"the server accepts {self._max_wait_s * 1000:g} ms"
            )

    async def answer(self, exchange: Exchange, size_bytes: int | None = None) -> float:
        """Answer one request, and return its share of the processor time in seconds.

        ``size_bytes`` is the request's size; None: it says nothing.

        Raises:
            OverloadedError: the request would wait longer than ``max_wait_s``.
            DeadlineError: the deadline passed before the request began.
            HotrowError: see ``ServedModel`` and ``Exchange``.
        """
        self.check_wait()
        kind = (size_bytes or 0).bit_length()
        waiting = _Waiting(exchange, asyncio.get_running_loop().create_future(), kind)
        self._queue.append(waiting)
        self._unanswered[kind] += 1
        self._start(perf_counter())
        try:
            processor_s = await waiting.answered
        except asyncio.CancelledError:  # the client has gone
            with suppress(ValueError):  # a thread has the request already
                self._queue.remove(waiting)
                self._unanswered[kind] -= 1
            exchange.take_error()
            raise
        if exchange.error is not None:
            raise exchange.take_error()
        return processor_s

    def _start(self, now_s: float) -> None:
        """Give the queue to idle threads, unless its first request may still wait for others."""
        while self._queue and self._running < self._threads:
            due_s = self._queue[0].exchange.times_ns[0] / 1e9 + self._max_delay_s
            if now_s < due_s and len(self._queue) < self._max_samples:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._delay_is_over)
                return
            # Not the whole queue: the next idle thread needs a share, too, and a large batch answers everyone late.
            share = -(-len(self._queue) // self._threads) if self.model.can_merge else 1
            if self._max_delay_s:  # they have waited for each other
                share = len(self._queue)
            self._run([self._queue.popleft() for _ in range(min(share, self._max_samples))])

    def _delay_is_over(self) -> None:
        self._timer = None
        self._start(float("inf"))

    def _run(self, requests: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        self._running += 1
        began_s = perf_counter()

        def ended(took_s: float, processor_s: float) -> None:
            self._running -= 1
            total = sum(max(request.exchange.samples, 1) for request in requests)
            for request in requests:
                self._unanswered[request.kind] -= 1
                pace_s = self._pace_s.get(request.kind, 0.0)
                of_request_s = took_s * max(request.exchange.samples, 1) / total
                self._pace_s[request.kind] = pace_s + _PACE_WEIGHT * (of_request_s - pace_s)
                if request.answered.done():  # the client has gone
                    request.exchange.take_error()
                else:
                    request.answered.set_result(processor_s)
            self._start(perf_counter())

        def work() -> None:
            exchanges = [request.exchange for request in requests if not request.answered.cancelled()]
            began_processor_s = thread_time()
            try:
                answer_together(self.model, exchanges, self._max_samples)
            finally:
                share_s = (thread_time() - began_processor_s) / max(len(exchanges), 1)
                # The time is taken here, because the event loop may be busy with requests that arrive.
                loop.call_soon_threadsafe(ended, perf_counter() - began_s, share_s)

        self._pool.submit(work)
