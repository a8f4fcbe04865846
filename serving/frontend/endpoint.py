"""The hot path that all protocols share: one predict request from its admission to its counted answer."""

from functools import partial
from time import perf_counter_ns
from typing import TypeVar

from serving.errors import OverloadedError
from serving.frontend.limits import Limits
from serving.frontend.runner import Runner
from serving.frontend.served_model import Exchange, LookupModel, PredictModel, ServedModel, Stopwatch
from serving.loaded_model import LoadedModel
from serving.lookup_model import LookupModelSession
from serving.metrics import RequestMetrics
from serving.protocol.shared_memory import SharedMemory
from serving.repository import ModelRepository
from serving.session import InferenceSession

_T = TypeVar("_T")


class PredictEndpoint:
    """Admits, runs and counts predict requests. Belongs to one event loop."""

    def __init__(
        self,
        repository: ModelRepository,
        runner: Runner,
        metrics: RequestMetrics,
        limits: Limits,
        regions: SharedMemory,
    ) -> None:
        """Answer for the models of ``repository``; tensors may be in ``regions``."""
        self._repository = repository
        self._regions = regions
        self._runner = runner
        self._metrics = metrics
        self._limits = limits
        self._in_flight = 0
        self._served: dict[LoadedModel, ServedModel] = {}

    def model(self, name: str, version: str = "") -> ServedModel:
        """Return a served model; the UnknownModelError names the models that are served."""
        return self._view(self._repository.loaded(name, version))

    async def run(self, name: str, version: str, size_bytes: int | None, exchange: Exchange[_T]) -> _T:
        """Admit a request, answer it and count what it took.

        Args:
            name: the model that answers.
            version: its version; empty for the newest version.
            size_bytes: the request's size, which tells how long requests of this size take; None: it tells nothing.
            exchange: the request.

        Raises:
            OverloadedError: ``max_inflight`` requests are running.
            UnknownModelError: this model or this version is not served.
        """
        if self._in_flight >= self._limits.max_inflight:
            raise OverloadedError(f"{self._in_flight} requests are running; the server accepts no more at a time")
        with self._repository.use(name, version) as loaded:
            model = self._view(loaded)
            self._in_flight += 1
            watch = Stopwatch()
            watch.note()
            work = partial(_answer, model, exchange, watch)
            try:
                if size_bytes is None:
                    answer = await self._runner.run_pooled(work)
                else:
                    answer = await self._runner.run(name, size_bytes, work)
            except Exception:
                model.statistics.failed(perf_counter_ns() - watch.times_ns[0])
                raise
            finally:
                self._in_flight -= 1
            model.statistics.answered(watch.samples, watch.times_ns)
            return answer

    def _view(self, loaded: LoadedModel) -> ServedModel:
        served = self._served.get(loaded)
        if served is None:
            served = self._served[loaded] = self._served_model(loaded.session)
            loaded.on_close(partial(self._forget, loaded))
        return served

    def _served_model(self, session: InferenceSession | LookupModelSession) -> ServedModel:
        if isinstance(session, LookupModelSession):
            return LookupModel(session, self._regions)
        return PredictModel(session, self._metrics, self._regions)

    def _forget(self, loaded: LoadedModel) -> None:
        self._served.pop(loaded, None)


def _answer(model: ServedModel, exchange: Exchange[_T], watch: Stopwatch) -> _T:
    watch.note()
    question = exchange.read(model)
    watch.samples = model.samples(question)
    watch.note()
    answer = model.answer(question)
    watch.note()
    written = exchange.write(model, answer)
    watch.note()
    return written
