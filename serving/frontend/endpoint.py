"""The hot path that all protocols share: one predict request from its admission to its counted answer."""

from collections import Counter
from functools import partial

from serving.errors import OverloadedError
from serving.frontend.batcher import Batcher, Batching
from serving.frontend.exchange import Exchange, answer_alone
from serving.frontend.limits import Limits
from serving.frontend.recorder import Recorder
from serving.frontend.runner import Runner
from serving.metrics import RequestMetrics
from serving.repository import ModelRepository, ServedModel
from serving.request_log import RequestLog


class PredictEndpoint:
    """Admits, runs and counts predict requests. Belongs to one event loop."""

    def __init__(
        self,
        repository: ModelRepository,
        runner: Runner,
        metrics: RequestMetrics,
        limits: Limits,
        batching: Batching,
        recorder: Recorder | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """Answer for the models of ``repository``; ``recorder`` gets the keys, ``request_log`` requests and answers."""
        self._repository = repository
        self._runner = runner
        self._metrics = metrics
        self._limits = limits
        self._batching = batching
        self._record = None if recorder is None else recorder.record
        self._log = None if request_log is None else request_log.log
        self._in_flight = 0
        self._in_flight_by_token: Counter[str] = Counter()  # only tokens that have requests
        self._batchers: dict[ServedModel, Batcher] = {}

    def find(self, name: str, version: str = "") -> Batcher:
        """Find the model that answers a request; the UnknownModelError names the models that are served.

        ``version`` is empty for the newest version.
        """
        return self._batcher(self._repository.loaded(name, version))

    def check_load(self, batcher: Batcher, backlog: int, size_bytes: int | None, token: str = "") -> None:
        """Refuse a request at once if too many requests are before it or have arrived with it.

        Args:
            batcher: what ``find`` returned.
            backlog: how many requests have arrived on the event loop and not begun.
            size_bytes: see ``run``.
            token: see ``run``.

        Raises:
            OverloadedError: too many requests are running, or the request would wait too long.
        """
        self._check_in_flight(token)
        wait_s = backlog * self._runner.short_s
        if wait_s > self._batching.max_wait_s:
            raise OverloadedError(
                f"{backlog} requests have arrived, and the last would wait {wait_s * 1000:.0f} ms; "
                f"the server accepts {self._batching.max_wait_s * 1000:g} ms"
            )
        if not self._runs_here(batcher.model, size_bytes):
            batcher.check_wait()

    async def run(
        self, batcher: Batcher, version: str, size_bytes: int | None, exchange: Exchange, token: str = ""
    ) -> None:
        """Admit a request, answer it and count the answer; ``exchange`` then has what it wrote.

        The front end counts a request that fails, because it may fail before or within this call.

        Args:
            batcher: what ``find`` returned.
            version: what ``find`` got.
            size_bytes: the request's size, from which its time is predicted; None: the size says nothing.
            exchange: the request.
            token: the name of the client's token; "" if it needs none.

        Raises:
            OverloadedError: see ``check_load``.
            MemoryError: the server has too little free memory.
            DeadlineError: the request's time limit passed before the request began.
            UnknownModelError: this model or this version is not served any more.
        """
        self._check_in_flight(token)
        exchange.record, exchange.log = self._record, self._log
        model = self._repository.begin(batcher.model, version)
        if model is not batcher.model:  # a swap while the request arrived
            batcher = self._batcher(model)
        self._count(token, 1)
        try:
            await self._answer(batcher, size_bytes, exchange)
        finally:
            self._count(token, -1)
            model.end()

    def _count(self, token: str, requests: int) -> None:
        """Add to the requests that run."""
        self._in_flight += requests
        if token:
            self._in_flight_by_token[token] += requests
            if not self._in_flight_by_token[token]:  # tokens come and go
                del self._in_flight_by_token[token]

    def _check_in_flight(self, token: str) -> None:
        if self._in_flight >= self._limits.max_inflight:
            raise OverloadedError(f"{self._in_flight} requests are running; the server accepts no more at a time")
        if token and self._in_flight_by_token[token] >= self._limits.max_inflight_per_token:
            count = self._in_flight_by_token[token]
            raise OverloadedError(f"{count} requests of the token {token!r} are running; it may have no more at a time")

    async def _answer(self, batcher: Batcher, size_bytes: int | None, exchange: Exchange) -> None:
        model = batcher.model
        if size_bytes is not None and self._runs_here(model, size_bytes):
            self._runner.run(model.name, size_bytes, partial(answer_alone, model, exchange))
        else:
            processor_s = await batcher.answer(exchange, size_bytes)
            if size_bytes is not None and model.never_waits:
                self._runner.took(model.name, size_bytes, processor_s)
        model.statistics.answered(exchange.samples, exchange.batch_samples, exchange.times_ns)
        self._metrics.predicted(model.name, exchange.samples)

    def _runs_here(self, model: ServedModel, size_bytes: int | None) -> bool:
        """Whether a request runs on the event loop: it is short, and cannot wait for anything."""
        return size_bytes is not None and model.never_waits and self._runner.is_short(model.name, size_bytes)

    def _batcher(self, model: ServedModel) -> Batcher:
        batcher = self._batchers.get(model)
        if batcher is None:
            batcher = self._batchers[model] = Batcher(model, self._runner.pool, self._runner.threads, self._batching)
            model.on_close(partial(self._forget, model))
        return batcher

    def _forget(self, model: ServedModel) -> None:
        self._batchers.pop(model, None)
