"""The hot path that all protocols share: one predict request from its admission to its counted answer."""

from functools import partial
from time import perf_counter, perf_counter_ns
from typing import TypeVar

from serving.errors import OverloadedError
from serving.frontend.batcher import Batcher, Batching
from serving.frontend.limits import Limits
from serving.frontend.recorder import RecordedExchange, Recorder
from serving.frontend.runner import Runner
from serving.frontend.served_model import Exchange, ServedModel, Stopwatch, served_model
from serving.metrics import RequestMetrics
from serving.repository import LoadedModel, ModelRepository

_T = TypeVar("_T")


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
    ) -> None:
        """Answer for the models of ``repository``; ``recorder`` gets the keys."""
        self._repository = repository
        self._runner = runner
        self._metrics = metrics
        self._limits = limits
        self._batching = batching
        self._recorder = recorder
        self._in_flight = 0
        self._batchers: dict[LoadedModel, Batcher] = {}

    def model(self, name: str, version: str = "") -> ServedModel:
        """Return a served model; the UnknownModelError names the models that are served."""
        return self.served(self._repository.loaded(name, version))

    def served(self, loaded: LoadedModel) -> ServedModel:
        """Return the served model of a version."""
        return self._batcher(loaded).model

    def check_load(self, name: str, version: str, backlog: int, size_bytes: int | None) -> None:
        """Refuse a request at once if too many requests are before it or have arrived with it.

        Args:
            name: the model that answers.
            version: its version; empty for the newest version.
            backlog: how many requests have arrived on the event loop and not begun.
            size_bytes: see ``run``.

        Raises:
            OverloadedError: ``max_inflight`` requests are running, or the request would wait too long.
            UnknownModelError: this model or this version is not served.
        """
        self._check_in_flight()
        wait_s = backlog * self._runner.short_s
        if wait_s > self._batching.max_wait_s:
            raise OverloadedError(
                f"{backlog} requests have arrived, and the last would wait {wait_s * 1000:.0f} ms; "
                f"the server accepts {self._batching.max_wait_s * 1000:g} ms"
            )
        batcher = self._batcher(self._repository.loaded(name, version))
        if not self._runs_here(batcher.model, size_bytes):
            batcher.check_wait()

    async def run(
        self, name: str, version: str, size_bytes: int | None, exchange: Exchange[_T], timeout_s: float | None = None
    ) -> _T:
        """Admit a request, answer it and count it.

        Args:
            name: the model that answers.
            version: its version; empty for the newest version.
            size_bytes: the request's size, from which its time is predicted; None: the size says nothing.
            exchange: the request.
            timeout_s: how long the client waits for the answer; None: no limit.

        Raises:
            OverloadedError: see ``check_load``.
            MemoryError: the server has too little free memory.
            DeadlineError: the request's time was over before it began.
            UnknownModelError: this model or this version is not served.
        """
        self._check_in_flight()
        if self._recorder is not None:
            exchange = RecordedExchange(exchange, self._recorder)
        loaded = self._repository.begin(name, version)
        self._in_flight += 1
        try:
            return await self._answered(self._batcher(loaded), size_bytes, exchange, timeout_s)
        finally:
            self._in_flight -= 1
            loaded.end()

    def _check_in_flight(self) -> None:
        if self._in_flight >= self._limits.max_inflight:
            raise OverloadedError(f"{self._in_flight} requests are running; the server accepts no more at a time")

    async def _answered(
        self, batcher: Batcher, size_bytes: int | None, exchange: Exchange[_T], timeout_s: float | None
    ) -> _T:
        model, watch = batcher.model, Stopwatch()
        watch.note()
        try:
            if size_bytes is not None and self._runs_here(model, size_bytes):
                answer = self._runner.run(model.name, size_bytes, partial(_answer, model, exchange, watch))
            else:
                deadline_s = None if timeout_s is None else perf_counter() + timeout_s
                answer, processor_s = await batcher.answer(exchange, watch, deadline_s)
                if size_bytes is not None and model.never_waits:
                    self._runner.took(model.name, size_bytes, processor_s)
        except Exception:
            model.statistics.failed(perf_counter_ns() - watch.times_ns[0])
            raise
        model.statistics.answered(watch.samples, watch.batch_samples, watch.times_ns)
        self._metrics.predicted(model.name, watch.samples)
        return answer

    def _runs_here(self, model: ServedModel, size_bytes: int | None) -> bool:
        """Whether a request runs on the event loop: it is short, and cannot wait for anything."""
        return size_bytes is not None and model.never_waits and self._runner.is_short(model.name, size_bytes)

    def _batcher(self, loaded: LoadedModel) -> Batcher:
        batcher = self._batchers.get(loaded)
        if batcher is None:
            model = served_model(loaded.session)
            batcher = self._batchers[loaded] = Batcher(model, self._runner.pool, self._runner.threads, self._batching)
            loaded.on_close(partial(self._forget, loaded))
        return batcher

    def _forget(self, loaded: LoadedModel) -> None:
        self._batchers.pop(loaded, None)


def _answer(model: ServedModel, exchange: Exchange[_T], watch: Stopwatch) -> _T:
    watch.note()
    question = exchange.read(model)
    watch.samples = watch.batch_samples = model.samples(question)
    watch.note()
    (answer,) = model.answer([question])
    watch.note()
    written = exchange.write(model, answer)
    watch.note()
    return written
