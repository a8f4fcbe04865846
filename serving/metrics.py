"""Metrics: counters, histograms, samples of other parts' counters, and the page for Prometheus.

Counting never fails a request and costs about a microsecond. A label never holds text that a client made up: requests
for models that do not exist share the empty model name. Prometheus's library is imported when the page is made.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.samples import Exemplar

#: Upper bounds of the request times' buckets, in seconds.
LATENCY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """Counts of durations by upper bound, and their sum. Not thread-safe by itself.

    Attributes:
        bounds_s: upper bounds in seconds, ascending; a duration on a bound counts below it.
        counts: number of durations between each bound and the bound before it; the last entry counts longer durations.
        sum_s: sum of all durations.
        exemplars: by bucket, the latest duration of a request with a trace: the trace's id, seconds, and when.
    """

    __slots__ = ("bounds_s", "counts", "exemplars", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Start empty."""
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0
        self.exemplars: dict[int, tuple[str, float, float]] = {}

    def observe(self, seconds: float, trace_id: str = "") -> None:
        """Count one duration; ``trace_id`` names the trace of its request."""
        bucket = bisect_left(self.bounds_s, seconds)
        self.counts[bucket] += 1
        self.sum_s += seconds
        if trace_id:
            self.exemplars[bucket] = trace_id, seconds, time.time()

    def add(self, counts: Iterable[int], sum_s: float) -> None:
        """Add the counts and the sum of another histogram of the same bounds."""
        self.counts = [count + other for count, other in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s

    def copy(self) -> "Histogram":
        """Return a copy that later observations do not change."""
        other = Histogram(self.bounds_s)
        other.counts, other.sum_s, other.exemplars = self.counts.copy(), self.sum_s, self.exemplars.copy()
        return other

    def quantile(self, part: float) -> float | None:
        """Estimate the duration that ``part`` of all durations do not exceed, as Prometheus's histogram_quantile does.

        A bucket counts as evenly filled. A duration beyond the last bound counts as the last bound.

        Returns:
            seconds; None if nothing was counted.
        """
        below, wanted, lower_s = 0, part * sum(self.counts), 0.0
        for count, upper_s in zip(self.counts, self.bounds_s, strict=False):
            if count and below + count >= wanted:
                return lower_s + (upper_s - lower_s) * (wanted - below) / count
            below, lower_s = below + count, upper_s
        return self.bounds_s[-1] if any(self.counts) else None

    def document(self) -> dict[str, Any]:
        """The histogram as JSON."""
        return {"bounds_s": self.bounds_s, "counts": self.counts.copy(), "sum_s": self.sum_s}

    def buckets(self) -> list[tuple[str, float, "Exemplar | None"]]:
        """Prometheus's cumulative buckets and their exemplars."""
        from prometheus_client.samples import Exemplar

        bounds = [*(f"{bound:g}" for bound in self.bounds_s), "+Inf"]
        exemplars: list[Exemplar | None] = [None] * len(bounds)
        for bucket, (trace_id, seconds, time_s) in self.exemplars.items():
            exemplars[bucket] = Exemplar({"trace_id": trace_id}, seconds, time_s)
        return list(zip(bounds, map(float, accumulate(self.counts)), exemplars, strict=True))


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value that another part of the server counts.

    Attributes:
        name: the metric's name without ``_total``.
        help: what the metric counts.
        labels: label names and values.
        value: a counter's count since the start, a gauge's current number, or a histogram.
        is_gauge: whether the value may fall.
    """

    name: str
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float | Histogram
    is_gauge: bool = False


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
        """Count a request in flight."""
        with self._lock:
            self._in_flight += 1

    def finished(self, model: str, code: int, seconds: float, trace_id: str = "") -> None:
        """Count an answered request.

        Args:
            model: the model's name, empty if no such model is loaded.
            code: HTTP status.
            seconds: from the request's first byte that arrived to the answer's last byte.
            trace_id: the request's trace; "" if it has none.
        """
        with self._lock:
            self._in_flight -= 1
            self._requests[model, code] += 1
            histogram = self._seconds.get(model)
            if histogram is None:
                histogram = self._seconds[model] = Histogram(LATENCY_BUCKETS_S)
            histogram.observe(seconds, trace_id)

    def predicted(self, model: str, samples: int) -> None:
        """Count ``samples`` samples that a model answered."""
        with self._lock:
            self._samples[model] += samples

    def samples(self) -> Iterator[MetricSample]:
        """The counters, as samples for the page."""
        with self._lock:
            requests, samples, in_flight = self._requests.copy(), self._samples.copy(), self._in_flight
            seconds = {model: histogram.copy() for model, histogram in self._seconds.items()}
        for (model, code), count in requests.items():
            labels = (("model", model), ("code", str(code)))
            yield MetricSample("hotrow_requests", "Predict requests answered, by HTTP status.", labels, count)
        for model, histogram in seconds.items():
            help_text = "Time from a predict request's arrival to its answer."
            yield MetricSample("hotrow_request_seconds", help_text, (("model", model),), histogram)
        for model, count in samples.items():
            yield MetricSample("hotrow_samples", "Samples answered.", (("model", model),), count)
        yield MetricSample("hotrow_requests_in_flight", "Predict requests in flight.", (), in_flight, is_gauge=True)


class ModelStatistics:
    """What a model's requests took, as Triton's statistics extension reports it. Any thread may call every method.

    A request has four stages: ``queue`` until a thread takes it, ``compute_input`` until its tensors are checked,
    ``compute_infer`` until its samples are predicted, and ``compute_output`` until its answer is encoded.
    """

    _STAGES = ("queue", "compute_input", "compute_infer", "compute_output")

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()  # guards all fields below; held for a few additions only
        self._last_s = 0.0
        self._failures, self._failed_ns = 0, 0
        self._samples = self._requests = 0
        self._spent_ns = [0, 0, 0, 0]  # by stage
        self._queue = Histogram(LATENCY_BUCKETS_S)
        self._batches: dict[int, list[int]] = {}  # by size: batches, and the nanoseconds of each stage but the queue

    def answered(self, samples: int, batch_samples: int, times_ns: Sequence[int]) -> None:
        """Count an answered request.

        Args:
            samples: its batch size.
            batch_samples: the size of the batch that it was the first request of; 0 if it was not the first.
            times_ns: ``time.perf_counter_ns`` at its arrival and at the end of each stage.
        """
        arrived, begun, decoded, computed, ended = times_ns
        with self._lock:
            self._samples += samples
            self._requests += 1
            spent = self._spent_ns
            spent[0] += begun - arrived
            self._queue.observe((begun - arrived) / 1e9)
            spent[1] += decoded - begun
            spent[2] += computed - decoded
            spent[3] += ended - computed
            self._last_s = time.time()
            if batch_samples:
                batch = self._batches.get(batch_samples)
                if batch is None:
                    batch = self._batches[batch_samples] = [0, 0, 0, 0]
                batch[0] += 1
                batch[1] += decoded - begun
                batch[2] += computed - decoded
                batch[3] += ended - computed

    def failed(self, nanoseconds: int) -> None:
        """Count a request that was answered with an error."""
        with self._lock:
            self._failures += 1
            self._failed_ns += nanoseconds

    def samples(self, labels: tuple[tuple[str, str], ...]) -> Iterator[MetricSample]:
        """The waits of answered requests, as a sample for the page."""
        with self._lock:
            queue = self._queue.copy()
        yield MetricSample("hotrow_queue_seconds", "Time from a request's arrival until its turn.", labels, queue)

    def document(self, name: str, version: str) -> dict[str, Any]:
        """Return Triton's ``model_stats`` object."""
        with self._lock:
            batches = {size: batch.copy() for size, batch in sorted(self._batches.items())}
            failed, last_s = _duration(self._failures, self._failed_ns), self._last_s
            samples, count, spent = self._samples, self._requests, self._spent_ns.copy()
        return {
            "name": name,
            "version": version,
            "last_inference": int(last_s * 1000),
            "inference_count": samples,
            "execution_count": sum(batch[0] for batch in batches.values()),
            "inference_stats": {
                "success": _duration(count, sum(spent)),
                "fail": failed,
                **{stage: _duration(count, ns) for stage, ns in zip(self._STAGES, spent, strict=True)},
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    **{stage: _duration(executions, ns) for stage, ns in zip(self._STAGES[1:], computing, strict=True)},
                }
                for size, (executions, *computing) in batches.items()
            ],
        }


def merged_statistics(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One document of several workers: the counts of a version are added up."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        for statistics in document["model_stats"]:
            key = statistics["name"], statistics["version"]
            merged[key] = _added(merged[key], statistics) if key in merged else statistics
    return {"model_stats": list(merged.values())}


def _added(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    batches = {batch["batch_size"]: batch for batch in ours["batch_stats"]}
    for batch in theirs["batch_stats"]:
        size = batch["batch_size"]
        batches[size] = {**_sum(batches[size], batch), "batch_size": size} if size in batches else batch
    return {
        **ours,
        "last_inference": max(ours["last_inference"], theirs["last_inference"]),
        **{name: _sum(ours[name], theirs[name]) for name in ("inference_count", "execution_count", "inference_stats")},
        "batch_stats": [batches[size] for size in sorted(batches)],
    }


def _sum(ours: Any, theirs: Any) -> Any:
    """Add two numbers, or the numbers of two objects that have the same fields."""
    if isinstance(ours, dict):
        return {name: _sum(value, theirs[name]) for name, value in ours.items()}
    return ours + theirs


def _duration(count: int, nanoseconds: int) -> dict[str, int]:
    return {"count": count, "ns": nanoseconds}


class Metrics:
    """The metrics page: the server's counters and samples of other parts' counters."""

    def __init__(self, requests: RequestMetrics, pulled: Callable[[], Iterable[MetricSample]]) -> None:
        """Show ``requests`` and the samples that ``pulled`` returns; ``pulled`` is called for each page."""
        self._requests = requests
        self._pulled = pulled

    def collect(self) -> Iterator["Metric"]:
        """See ``prometheus_client.registry.Collector``."""
        families: dict[str, Any] = {}
        for samples in (self._requests.samples(), self._pulled()):
            for sample in samples:
                family = families.setdefault(sample.name, _empty_family(sample))
                labels = [value for _, value in sample.labels]
                if isinstance(sample.value, Histogram):
                    family.add_metric(labels, sample.value.buckets(), sum_value=sample.value.sum_s)
                else:
                    family.add_metric(labels, sample.value)
        yield from families.values()
        yield from _process_families()

    def page(self, is_open: bool = False) -> bytes:
        """The page in Prometheus's text format; with ``is_open`` in the format OpenMetrics, which has exemplars."""
        return _page(self.collect(), is_open)

    def record(self) -> list[Any]:
        """What the page shows, as JSON for ``merged_page``."""
        return [
            [
                family.name,
                family.documentation,
                family.type,
                [[sample.name, sample.labels, sample.value, sample.exemplar] for sample in family.samples],
            ]
            for family in self.collect()
        ]


def merged_page(records: Mapping[int, list[Any]], is_open: bool = False) -> bytes:
    """One page of the ``Metrics.record`` of several workers, by worker; each sample has a label with its worker."""
    from prometheus_client.core import Metric
    from prometheus_client.samples import Exemplar

    families: dict[str, Metric] = {}
    for worker, record in records.items():
        for name, documentation, kind, samples in record:
            family = families.setdefault(name, Metric(name, documentation, kind))
            for sample, labels, value, *exemplar in samples:  # none from a worker that an earlier release started
                traced = Exemplar(*exemplar[0]) if exemplar and exemplar[0] else None
                family.add_sample(sample, {"worker": str(worker), **labels}, value, exemplar=traced)
    return _page(families.values(), is_open)


class _Collector:
    """The families of one page, in the form that Prometheus's library reads."""

    def __init__(self, families: Iterable["Metric"]) -> None:
        self._families = families

    def collect(self) -> Iterable["Metric"]:
        return self._families


def _page(families: Iterable["Metric"], is_open: bool) -> bytes:
    from prometheus_client.exposition import generate_latest
    from prometheus_client.openmetrics import exposition as open_metrics

    return (open_metrics.generate_latest if is_open else generate_latest)(cast(Any, _Collector(families)))


def _process_families() -> Iterable["Metric"]:
    """Prometheus's usual figures of a process: memory, processor time, open files, start."""
    from prometheus_client import ProcessCollector

    return ProcessCollector(registry=None).collect()


def _empty_family(sample: MetricSample) -> Any:
    """Prometheus's family for ``sample``; the classes of families have no common ``add_metric``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kind: Any = GaugeMetricFamily if sample.is_gauge else CounterMetricFamily
    if isinstance(sample.value, Histogram):
        kind = HistogramMetricFamily
    return kind(sample.name, sample.help, labels=[name for name, _ in sample.labels])
