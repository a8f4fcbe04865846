"""The dynamic batcher: requests that wait for a thread are answered as one batch."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter, perf_counter_ns, thread_time
from typing import Any, cast

from serving.errors import DeadlineError, OverloadedError
from serving.frontend.served_model import Exchange, ServedModel, Stopwatch, batches

#: Weight of the latest batch in the pace.
_PACE_WEIGHT = 0.2
#: Merging requests with larger answers saves no time.
_LARGE_ANSWER_FLOATS = 1 << 18


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


@dataclass(slots=True, eq=False)
class Waiting:
    """One request that waits for its answer.

    Attributes:
        exchange: reads the request and writes its answer.
        watch: has recorded its arrival.
        deadline_s: when its client gives up, by ``perf_counter``; None: never.
        answered: is done once the exchange has written its answer or failed.
    """

    exchange: Exchange[Any]
    watch: Stopwatch
    deadline_s: float | None
    answered: "asyncio.Future[None]"
    question: Any = field(default=None, init=False)
    written: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    processor_s: float = field(default=0.0, init=False)

    def take_error(self) -> Exception | None:
        """Return the error and forget it.

        The error's traceback leads to this request. If the request led to the error as well, both would stay in memory
        until a garbage collection.
        """
        error, self.error = self.error, None
        return error


class Batcher:
    """Answers the requests of one model; belongs to one event loop.

    While all threads work, requests wait in a queue. A thread that becomes idle takes its share of the queue and
    answers it as one batch. Every request of a batch is read and written on its own, so a bad request fails alone. If
    the batch fails as a whole, each request is answered alone.

    A growing queue only makes every request late. So a request is refused at once if the requests before it would take
    too long at the pace of the latest batches.

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
        self._pace_s = 0.0  # how long a thread worked on one request in the latest batches
        self._unanswered = 0  # requests in the queue and in threads
        self._queue: deque[Waiting] = deque()
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None

    def check_wait(self) -> None:
        """Raise OverloadedError if a request that came now would wait longer than ``max_wait_s``."""
        wait_s = self._unanswered * self._pace_s / self._threads
        if wait_s > self._max_wait_s and self._unanswered >= self._threads:
            raise OverloadedError(
                f"{self._unanswered} requests are before this request, which would wait {wait_s * 1000:.0f} ms; "
                f"the server accepts {self._max_wait_s * 1000:g} ms"
            )

    async def answer(self, exchange: Exchange[Any], watch: Stopwatch, deadline_s: float | None) -> tuple[Any, float]:
        """Answer one request.

        Args:
            exchange: the request.
            watch: has recorded the request's arrival.
            deadline_s: when its client gives up, by ``perf_counter``; None: never.

        Returns:
            what the exchange wrote, and the request's share of the processor time in seconds.

        Raises:
            OverloadedError: the request would wait longer than ``max_wait_s``.
            DeadlineError: the deadline passed before the request began.
            HotrowError: see ``ServedModel`` and ``Exchange``.
        """
        self.check_wait()
        waiting = Waiting(exchange, watch, deadline_s, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._unanswered += 1
        self._start(perf_counter())
        try:
            await waiting.answered
        except asyncio.CancelledError:  # the client has gone
            with suppress(ValueError):  # a thread has the request already
                self._queue.remove(waiting)
                self._unanswered -= 1
            waiting.take_error()
            raise
        if waiting.error is not None:
            raise cast(Exception, waiting.take_error())
        return waiting.written, waiting.processor_s

    def _start(self, now_s: float) -> None:
        """Give the queue to idle threads, unless its first request may still wait for others."""
        while self._queue and self._running < self._threads:
            due_s = self._queue[0].watch.times_ns[0] / 1e9 + self._max_delay_s
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

    def _run(self, requests: Sequence[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        self._running += 1
        began_s = perf_counter()

        def ended() -> None:
            self._running -= 1
            self._unanswered -= len(requests)
            pace_s = (perf_counter() - began_s) / len(requests)
            self._pace_s += _PACE_WEIGHT * (pace_s - self._pace_s) if self._pace_s else pace_s
            for one in requests:
                if one.answered.done():  # the client has gone
                    one.take_error()
                else:
                    one.answered.set_result(None)
            self._start(perf_counter())

        def work() -> None:
            try:
                self._answer([one for one in requests if not one.answered.cancelled()])
            finally:
                loop.call_soon_threadsafe(ended)

        self._pool.submit(work)

    def _answer(self, requests: Sequence[Waiting]) -> None:
        """Answer requests in a thread of the pool; every request gets its text or its error."""
        began_s, began_processor_s = perf_counter(), thread_time()
        for one in requests:
            one.watch.note()
            _guarded(one, self._read, began_s)
        read = [one for one in requests if one.error is None]
        for batch in batches(read, self._size_of, self._max_samples):
            self._answer_batch(batch)
        share_s = (thread_time() - began_processor_s) / max(len(requests), 1)
        for one in requests:
            one.processor_s = share_s

    def _size_of(self, one: Waiting) -> int:
        """Return a request's part of a batch. A large answer has a batch of its own, because batches take memory."""
        is_large = self.model.answer_floats(one.question) > _LARGE_ANSWER_FLOATS
        return self._max_samples if is_large else one.watch.samples

    def _read(self, one: Waiting, began_s: float) -> None:
        if one.deadline_s is not None and began_s > one.deadline_s:
            raise DeadlineError("the request's time was over before a thread was free")
        one.question = one.exchange.read(self.model)
        timeout_s = one.exchange.timeout_us / 1e6
        waited_s = began_s - one.watch.times_ns[0] / 1e9
        if timeout_s and waited_s > timeout_s:
            raise DeadlineError(f"the request waited {waited_s:.3f} s, but its timeout is {timeout_s:g} s")
        one.watch.samples = self.model.samples(one.question)
        one.watch.note()

    def _answer_batch(self, batch: Sequence[Waiting]) -> None:
        answers: Sequence[Any] | None = None
        if len(batch) > 1:
            with suppress(Exception):  # one of the requests may be the reason, so each is answered alone
                answers = self.model.answer([one.question for one in batch])
        if answers is None:
            for one in batch:
                _guarded(one, self._answer_alone)
            return
        ended_ns = perf_counter_ns()
        for one, answer in zip(batch, answers, strict=True):
            one.watch.times_ns.append(ended_ns)
            _guarded(one, self._write, answer)
        first = next((one for one in batch if one.error is None), batch[0])  # a failed request counts no batch
        first.watch.batch_samples = sum(one.watch.samples for one in batch)

    def _answer_alone(self, one: Waiting) -> None:
        one.watch.batch_samples = one.watch.samples
        (answer,) = self.model.answer([one.question])
        one.watch.note()
        self._write(one, answer)

    def _write(self, one: Waiting, answer: Any) -> None:
        one.written = one.exchange.write(self.model, answer)
        one.watch.note()


def _guarded(one: Waiting, work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(one, *arguments)
    except Exception as err:  # noqa: BLE001  # the front end answers it or logs it
        one.error = err
