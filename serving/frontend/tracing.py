"""Traces of predict requests, with OpenTelemetry. The variables ``OTEL_*`` say where spans go, and which are kept.

A request's span has the stages of its exchange as children: the wait in the queue, the decoding, each call of a tier,
the dense network, and the encoding. A caller's ``traceparent`` makes the span a child of the caller's span.
"""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serving.errors import MissingExtraError
from serving.frontend.access_log import Headers
from serving.frontend.version import server_version
from serving.stages import Stage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

#: What happens between the times of ``Exchange.times_ns``. Other stages fill the third interval.
_INTERVALS = ("queue", "decode", "", "encode")
_SERVER_ERROR = 500
#: How long a stop waits for the last spans to be sent.
_LAST_SPANS_S = 1.0


class RequestTrace:
    """The span of one request, and what its children will be.

    Attributes:
        stages: what the code below noted.
        times_ns: see ``Exchange.times_ns``.
    """

    __slots__ = ("_offset_ns", "_span", "_tracer", "stages", "times_ns")

    def __init__(self, tracer: "Tracer", span: "Span", offset_ns: int) -> None:
        """Take a span that is recorded; ``offset_ns`` is between ``perf_counter`` and the time of day."""
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns
        self.stages: list[Stage] = []
        self.times_ns: Sequence[int] = ()

    @property
    def id(self) -> str:
        """The trace's id."""
        return format(self._span.get_span_context().trace_id, "032x")

    def end(self, model: str, code: int) -> None:
        """End the span of a request for ``model`` that was answered with this HTTP status."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span, inside = self._span, set_span_in_context(self._span)
        times_s = [time_ns / 1e9 for time_ns in self.times_ns]
        passed = zip(_INTERVALS, times_s, times_s[1:], strict=False)
        intervals = [Stage(name, began_s, ended_s, {}) for name, began_s, ended_s in passed if name]
        for stage in sorted([*intervals, *self.stages], key=lambda stage: stage.began_s):
            child = self._tracer.start_span(
                stage.name, inside, attributes=stage.attributes, start_time=self._at(stage.began_s)
            )
            if "exception.message" in stage.attributes:
                child.set_status(Status(StatusCode.ERROR))
            child.end(self._at(stage.ended_s))
        span.set_attributes({"hotrow.model": model, "http.response.status_code": code})
        if code >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._at(time.perf_counter()))

    def _at(self, seconds: float) -> int:
        return self._offset_ns + int(seconds * 1e9)


class Tracing:
    """Begins the traces of requests. Any thread may use it."""

    def __init__(self, worker: int | None = None, exporter: "SpanExporter | None" = None) -> None:
        """Send spans with ``exporter``, without one by OTLP over HTTP; ``worker`` is this process's number.

        Raises:
            MissingExtraError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as err:
            raise MissingExtraError(err.name or "opentelemetry", "otel", "--traces") from err
        ours: dict[str, Any] = {"service.name": "hotrow", "service.version": server_version()}
        if worker is not None:
            ours["hotrow.worker"] = worker
        # The operator's variables win.
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hotrow", server_version())
        self._propagator, self._kind = TraceContextTextMapPropagator(), SpanKind.SERVER

    def begin(self, name: str, headers: Headers, request_id: str) -> RequestTrace | None:
        """Begin the span of a request now; None if the sampler leaves it out.

        Args:
            name: of the span.
            headers: have the ``traceparent`` if the client sent one; see ``access_log.repeated_headers``.
            request_id: "" if it has none.
        """
        began_ns, now_ns = time.perf_counter_ns(), time.time_ns()
        parent = self._propagator.extract({key.decode(): value.decode() for key, value in headers})
        about = {"hotrow.request_id": request_id} if request_id else {}
        span = self._tracer.start_span(name, parent, kind=self._kind, attributes=about, start_time=now_ns)
        return RequestTrace(self._tracer, span, now_ns - began_ns) if span.is_recording() else None

    def flush(self) -> None:
        """Send the spans so far."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send the last spans, or drop them if that takes long: the exporter waits for a collector that is away."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(_LAST_SPANS_S)
