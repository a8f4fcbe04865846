"""The counters of tiers and caches on Triton's metrics page."""

from collections.abc import Callable, Iterable
from typing import Any

from serving.background import PeriodicWorker
from serving.metrics import Histogram, MetricSample

#: Each changed value is one message to Triton's process, so values are not sent per request.
_INTERVAL_S = 1.0

Labels = tuple[tuple[str, str], ...]


class TritonMetrics:
    """Sends samples to Triton, once a second. Triton adds up the counters of a model's instances.

    Counters have the names and labels of ``hotrow serve``. A gauge also has the label ``instance``. Triton's Python
    backend has no histograms.
    """

    def __init__(self, triton: Any, instance: str, read: Callable[[], Iterable[MetricSample]]) -> None:
        """Send what ``read`` returns. ``triton`` is Triton's module."""
        self._triton = triton
        self._instance = instance
        self._read = read
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._sent: dict[tuple[str, Labels], float] = {}
        self._worker = PeriodicWorker("hotrow-metrics", self._send, _INTERVAL_S, first_after_s=0)

    def close(self) -> None:
        """Send the last values, and remove the metrics."""
        self._worker.close()
        self._send()
        self._metrics.clear()  # before their families
        self._families.clear()

    def _send(self) -> None:
        for sample in self._read():
            if isinstance(sample.value, Histogram):
                continue
            if sample.is_gauge:
                name, labels = sample.name, (*sample.labels, ("instance", self._instance))
            else:
                name, labels = f"{sample.name}_total", sample.labels
            metric = self._metric(name, labels, sample)
            sent = self._sent.get((name, labels), 0.0)
            if sample.value == sent:
                continue
            if sample.is_gauge:
                metric.set(sample.value)
            else:
                metric.increment(sample.value - sent)
            self._sent[name, labels] = sample.value

    def _metric(self, name: str, labels: Labels, sample: MetricSample) -> Any:
        if name not in self._families:
            family = self._triton.MetricFamily
            kind = family.GAUGE if sample.is_gauge else family.COUNTER
            self._families[name] = family(name=name, description=sample.help, kind=kind)
        if (name, labels) not in self._metrics:
            self._metrics[name, labels] = self._families[name].Metric(labels=dict(labels))
        return self._metrics[name, labels]
