"""The server's counters and the page that Prometheus reads."""

import json
import threading

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import (
    LATENCY_BUCKETS_S,
    Histogram,
    Metrics,
    MetricSample,
    ModelStatistics,
    RequestMetrics,
    merged_page,
)


def values(requests, pulled=lambda: []):
    """Read the page with Prometheus's own parser; return values by name and labels."""
    page = Metrics(requests, pulled).page().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_requests_are_counted_by_model_and_code():
    requests = RequestMetrics()
    for model, code in [("a", 200), ("a", 200), ("a", 400), ("", 404)]:
        requests.started()
        requests.finished(model, code, 0.01)

    page = values(requests)

    assert page["hotrow_requests_total", ("code", "200"), ("model", "a")] == 2
    assert page["hotrow_requests_total", ("code", "400"), ("model", "a")] == 1
    assert page["hotrow_requests_total", ("code", "404"), ("model", "")] == 1


def open_metrics(page):
    """Read the page in the form OpenMetrics with its own parser; return the exemplars by bucket."""
    families = open_metrics_families(page.decode())
    return {
        sample.labels["le"]: (sample.exemplar.labels, sample.exemplar.value)
        for family in families
        for sample in family.samples
        if sample.exemplar
    }


def test_a_bucket_has_the_trace_of_its_latest_request_that_has_one():
    requests = RequestMetrics()
    for seconds, trace_id in [(0.02, "a" * 32), (0.021, "b" * 32), (0.022, ""), (11.0, "c" * 32), (0.3, "")]:
        requests.started()
        requests.finished("ctr", 200, seconds, trace_id)
    metrics = Metrics(requests, lambda: [])

    expected = {"0.025": ({"trace_id": "b" * 32}, 0.021), "+Inf": ({"trace_id": "c" * 32}, 11.0)}
    assert open_metrics(metrics.page(is_open=True)) == expected
    assert open_metrics(merged_page({7: json.loads(json.dumps(metrics.record()))}, is_open=True)) == expected
    assert b"trace_id" not in metrics.page()  # the older form has no place for it


def test_a_page_has_the_samples_of_a_worker_that_does_not_know_exemplars():
    record = [["hotrow_requests", "help", "counter", [["hotrow_requests_total", {"model": "a"}, 3.0]]]]

    assert b'hotrow_requests_total{model="a",worker="2"} 3.0' in merged_page({2: record})


def test_the_waits_of_requests_are_a_histogram():
    statistics = ModelStatistics()
    for waited_ns in (50_000, 3_000_000):
        statistics.answered(1, 1, [1000, 1000 + waited_ns, 9_000_000, 9_000_001, 9_000_002])

    page = values(RequestMetrics(), lambda: statistics.samples((("model", "a"),)))

    assert page["hotrow_queue_seconds_count", ("model", "a")] == 2
    assert page["hotrow_queue_seconds_sum", ("model", "a")] == pytest.approx(0.00305)
    assert page["hotrow_queue_seconds_bucket", ("le", "0.0001"), ("model", "a")] == 1


def test_requests_in_flight_rise_and_fall():
    requests = RequestMetrics()
    requests.started()
    requests.started()
    requests.finished("a", 200, 0.01)

    assert values(requests)["hotrow_requests_in_flight",] == 1


@pytest.mark.parametrize(
    ("seconds", "first_bucket"), [(0.0001, "0.0001"), (0.0002, "0.00025"), (0.02, "0.025"), (11.0, "+Inf")]
)
def test_a_latency_falls_into_every_bucket_from_its_own_on(seconds, first_bucket):
    requests = RequestMetrics()
    requests.started()
    requests.finished("a", 200, seconds)

    page = values(requests)
    buckets = {dict(key[1:])["le"]: value for key, value in page.items() if key[0] == "hotrow_request_seconds_bucket"}

    assert buckets == {le: float(float(le) >= float(first_bucket)) for le in buckets}
    assert buckets[first_bucket] == 1
    assert page["hotrow_request_seconds_sum", ("model", "a")] == seconds
    assert page["hotrow_request_seconds_count", ("model", "a")] == 1


def test_samples_are_counted_by_model():
    requests = RequestMetrics()
    requests.predicted("a", 3)
    requests.predicted("a", 4)

    page = values(requests)

    assert page["hotrow_samples_total", ("model", "a")] == 7


def test_pulled_counters_are_read_again_for_every_page():
    count = iter([1, 2])
    metrics = Metrics(RequestMetrics(), lambda: [MetricSample("hotrow_x", "X.", (("tier", "memory"),), next(count))])

    pages = [metrics.page().decode() for _ in range(2)]

    assert 'hotrow_x_total{tier="memory"} 1.0' in pages[0]
    assert 'hotrow_x_total{tier="memory"} 2.0' in pages[1]


def test_pulled_counters_of_one_name_are_one_family():
    pulled = [MetricSample("hotrow_x", "X.", (("tier", tier),), 5) for tier in ("memory", "rocksdb")]

    page = Metrics(RequestMetrics(), lambda: pulled).page().decode()

    assert page.count("# TYPE hotrow_x_total counter") == 1
    assert 'hotrow_x_total{tier="rocksdb"} 5.0' in page


def test_counting_from_many_threads_loses_nothing():
    requests = RequestMetrics()

    def count():
        for _ in range(2000):
            requests.started()
            requests.finished("a", 200, 0.01)
            requests.predicted("a", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    page = values(requests)
    assert page["hotrow_requests_total", ("code", "200"), ("model", "a")] == 8000
    assert page["hotrow_request_seconds_count", ("model", "a")] == 8000
    assert page["hotrow_samples_total", ("model", "a")] == 8000
    assert page["hotrow_requests_in_flight",] == 0


def test_the_page_has_prometheus_figures_of_the_process():
    page = values(RequestMetrics())

    assert page["process_resident_memory_bytes",] > 1e6
    assert page["process_open_fds",] > 0


@pytest.mark.parametrize("part", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_an_estimated_quantile_lies_in_the_bucket_of_the_true_quantile(part):
    drawn = np.random.default_rng(1).lognormal(-6, 1, 1000)
    histogram = Histogram(LATENCY_BUCKETS_S)
    for seconds in drawn:
        histogram.observe(seconds)

    true, estimated = np.quantile(drawn, part, method="inverted_cdf"), histogram.quantile(part)

    assert np.searchsorted(LATENCY_BUCKETS_S, estimated) == np.searchsorted(LATENCY_BUCKETS_S, true)


def test_a_quantile_is_interpolated_inside_its_bucket():
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.add([2, 0, 8, 0], 0.0)

    assert [histogram.quantile(part) for part in (0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.5, 1.0, 3.0, 4.0])


def test_a_quantile_beyond_the_last_bound_is_the_last_bound_and_there_is_none_of_nothing():
    histogram = Histogram((1.0, 2.0))
    assert histogram.quantile(0.5) is None

    histogram.observe(100.0)

    assert histogram.quantile(0.5) == 2.0
