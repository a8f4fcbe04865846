"""What the server counts: plain counters, and the collector that shows them to Prometheus when it asks.

Counting never fails a request and costs about a microsecond. A label never holds anything a client made up: requests
for models that do not exist share the empty model name.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.histogram import Histogram
from serving.reading import Reading

#: Upper bounds of the request times' buckets, in seconds.
LATENCY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestMetrics:
    """Counters of predict requests. Every method may be called from any thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()  # guards all fields below; held for a few additions only
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._samples: Counter[str] = Counter()
        self._in_flight = 0

    def started(self) -> None:
        """One more request is in hand."""
        with self._lock:
            self._in_flight += 1

    def finished(self, model: str, code: int, seconds: float) -> None:
        """A request was answered.

        Args:
            model: the model's name, empty if no such model is loaded.
            code: HTTP status.
            seconds: from the request's first byte in our hands to the answer's last.
        """
        with self._lock:
            self._in_flight -= 1
            self._requests[model, code] += 1
            histogram = self._seconds.get(model)
            if histogram is None:
                histogram = self._seconds[model] = Histogram(LATENCY_BUCKETS_S)
            histogram.observe(seconds)

    def predicted(self, model: str, samples: int) -> None:
        """A model answered ``samples`` samples."""
        with self._lock:
            self._samples[model] += samples

    def families(self) -> Iterator[Metric]:
        """The counters as Prometheus metric families."""
        requests = CounterMetricFamily(
            "hotrow_requests", "Predict requests answered, by HTTP status.", labels=["model", "code"]
        )
        seconds = HistogramMetricFamily(
            "hotrow_request_seconds", "Time from a predict request's arrival to its answer.", labels=["model"]
        )
        samples = CounterMetricFamily("hotrow_samples", "Samples predicted.", labels=["model"])
        with self._lock:
            for (model, code), count in self._requests.items():
                requests.add_metric([model, str(code)], count)
            for model, histogram in self._seconds.items():
                seconds.add_metric([model], histogram.buckets(), sum_value=histogram.sum_s)
            for model, count in self._samples.items():
                samples.add_metric([model], count)
            in_flight = self._in_flight
        yield from (requests, seconds, samples)
        yield GaugeMetricFamily("hotrow_requests_in_flight", "Predict requests in hand.", value=in_flight)


class Metrics(Collector):
    """The server's counters and those it pulls from elsewhere, as one Prometheus page."""

    def __init__(self, requests: RequestMetrics, pulled: Callable[[], Iterable[Reading]]) -> None:
        """Show ``requests`` and, freshly pulled for every page, what ``pulled`` returns."""
        self._requests = requests
        self._pulled = pulled
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        yield from self._requests.families()
        families: dict[str, Any] = {}
        for reading in self._pulled():
            family = families.setdefault(reading.name, _family(reading))
            labels = [value for _, value in reading.labels]
            if isinstance(reading.value, Histogram):
                family.add_metric(labels, reading.value.buckets(), sum_value=reading.value.sum_s)
            else:
                family.add_metric(labels, reading.value)
        yield from families.values()

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not collect once just to learn the names."""
        return []

    def page(self) -> bytes:
        """The page in Prometheus's text format."""
        return generate_latest(self._registry)


def _family(reading: Reading) -> Any:
    """A metric family, empty, of what ``reading`` is of; Prometheus's classes have no common ``add_metric``."""
    kind: Any = GaugeMetricFamily if reading.is_gauge else CounterMetricFamily
    if isinstance(reading.value, Histogram):
        kind = HistogramMetricFamily
    return kind(reading.name, reading.help, labels=[name for name, _ in reading.labels])
