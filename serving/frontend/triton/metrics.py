"""The counters of tiers and caches on Triton's metrics page."""

import os
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from serving.metrics import Histogram, MetricSample

#: Each changed value is one message to Triton's process, so values are not sent per request.
_INTERVAL_S = 1.0

Labels = tuple[tuple[str, str], ...]


class TritonMetrics:
    """Sends samples to Triton.

    Names and labels are those of ``hotrow serve``, with a label ``process``: the metrics of two instances must differ,
    because Triton crashes when one of several processes removes a metric that they share. For the same reason values
    are sent only inside Triton's own calls. Triton's Python backend has no histograms.
    """

    def __init__(self, triton: Any, read: Callable[[], Iterable[MetricSample]]) -> None:
        """Send what ``read`` returns. ``triton`` is Triton's module."""
        self._triton = triton
        self._read = read
        self._process = ("process", str(os.getpid()))
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._sent: dict[tuple[str, Labels], float] = {}
        self._due_s = 0.0

    def send_if_due(self) -> None:
        """Send the values that have changed, at most once a second."""
        if monotonic() >= self._due_s:
            self._send()
            self._due_s = monotonic() + _INTERVAL_S

    def close(self) -> None:
        """Remove the metrics."""
        self._metrics.clear()  # before their families
        self._families.clear()

    def _send(self) -> None:
        for sample in self._read():
            if isinstance(sample.value, Histogram):
                continue
            name = sample.name if sample.is_gauge else f"{sample.name}_total"
            place = name, (*sample.labels, self._process)
            if place not in self._metrics:
                self._metrics[place] = self._family(name, sample).Metric(labels=dict(place[1]))
            sent = self._sent.get(place, 0.0)
            if sample.value != sent:
                metric = self._metrics[place]
                metric.set(sample.value) if sample.is_gauge else metric.increment(sample.value - sent)
                self._sent[place] = sample.value

    def _family(self, name: str, sample: MetricSample) -> Any:
        if name not in self._families:
            family = self._triton.MetricFamily
            kind = family.GAUGE if sample.is_gauge else family.COUNTER
            self._families[name] = family(name=name, description=sample.help, kind=kind)
        return self._families[name]
