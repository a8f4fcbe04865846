"""What the HTTP and the gRPC server of one process share."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from platform import python_version

from serving.frontend import access_log
from serving.frontend.batcher import Batching
from serving.frontend.control import Control
from serving.frontend.endpoint import PredictEndpoint
from serving.frontend.limits import Limits
from serving.frontend.recorder import Recorder
from serving.frontend.runner import Runner
from serving.frontend.status import Status
from serving.frontend.tracing import Tracing
from serving.frontend.version import server_version
from serving.frontend.workers import Siblings
from serving.metrics import MetricSample, RequestMetrics
from serving.protocol.shared_memory import SharedMemory
from serving.repository import ModelRepository
from serving.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the front end.

    Attributes:
        threads: maximum predict requests at the same time, except short requests.
        limits: limits of requests.
        batching: how requests are merged.
        access_log: whether every request has a line in the log.
    """

    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    batching: Batching = field(default_factory=Batching)
    access_log: bool = False


class FrontEnd:
    """The limits, threads and counters of all requests, and the documents about the server.

    The models of its repository must be loaded already. The caller closes the repository after the front end.
    """

    def __init__(
        self,
        repository: ModelRepository,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
        siblings: Siblings | None = None,
        request_log: RequestLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Serve the models of ``repository``. The caller closes ``recorder`` and ``request_log`` after the front end.

        ``siblings`` are the other workers of the same server, and ``tracing`` traces requests until ``close``.
        """
        settings = settings or Settings()
        self.repository = repository
        self.siblings = siblings
        self.limits = settings.limits
        self.has_access_log = settings.access_log
        self.has_ids = self.has_access_log or request_log is not None
        if self.has_access_log:
            access_log.switch_on()
        self.metrics = RequestMetrics()
        self.tracing = tracing
        self._runner = Runner(settings.threads)
        self._regions = SharedMemory()
        self.endpoint = PredictEndpoint(
            repository, self._runner, self.metrics, settings.limits, settings.batching, recorder, request_log
        )
        self._request_log = request_log
        self.control = Control(repository, self._regions, siblings)
        self.status = Status(repository, self.metrics, 0 if siblings is None else siblings.number)

    def readings(self) -> Iterator[MetricSample]:
        """Return the counters of the models, and of the request log, for the metrics page."""
        labels = (("version", server_version()), ("python", python_version()))
        yield MetricSample("hotrow_build_info", "The versions of the server.", labels, 1, is_gauge=True)
        yield from self.repository.readings()
        if self._request_log is not None:
            yield from self._request_log.readings()

    def close(self) -> None:
        """Wait for running work, and end the threads."""
        self._runner.close()
        if self.tracing is not None:
            self.tracing.close()
        self.control.close()
        self._regions.unregister()
