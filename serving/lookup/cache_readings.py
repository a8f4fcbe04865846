"""A cache's counters, for the metrics page."""

from collections.abc import Iterator

from gpu_cache.answer import CacheStats
from serving.metrics import MetricSample

Labels = tuple[tuple[str, str], ...]


def cache_readings(stats: CacheStats, labels: Labels) -> Iterator[MetricSample]:
    """Return the samples of one table's cache on one device; duplicate keys of a request count separately."""
    yield MetricSample("hotrow_gpu_cache_hits", "Keys that a GPU cache held.", labels, stats.found_keys)
    yield MetricSample("hotrow_gpu_cache_misses", "Keys that a GPU cache did not hold.", labels, stats.missed_keys)
    yield MetricSample(
        "hotrow_gpu_cache_absent_keys",
        "Keys that a GPU cache knew to be in no tier; neither hits nor misses.",
        labels,
        stats.absent_answers,
    )
    yield MetricSample(
        "hotrow_gpu_cache_hit_ratio",
        "Hit rate of a GPU cache since startup.",
        labels,
        stats.hit_ratio,
        True,
    )
    yield MetricSample(
        "hotrow_gpu_cache_admitted_rows",
        "Rows that were inserted into a GPU cache.",
        labels,
        stats.inserted_rows + stats.replaced_rows,
    )
    for reason, rows in (
        ("first_miss", stats.refused_first_misses),
        ("cap", stats.refused_by_cap),
        ("counters", stats.refused_by_counters),
        ("no_slot", stats.refused_without_slot),
        ("unfit", stats.unfit_rows),
    ):
        yield MetricSample(
            "hotrow_gpu_cache_refused_rows",
            "Rows that were offered to a GPU cache and not inserted, by reason.",
            (*labels, ("reason", reason)),
            rows,
        )
    yield MetricSample("hotrow_gpu_cache_evicted_rows", "Rows that another row replaced.", labels, stats.replaced_rows)
    yield MetricSample("hotrow_gpu_cache_updated_rows", "Rows that were written again.", labels, stats.updated_rows)
    yield MetricSample("hotrow_gpu_cache_erased_rows", "Rows that were erased.", labels, stats.erased_rows)
    yield MetricSample("hotrow_gpu_cache_rows", "Rows that a GPU cache holds.", labels, stats.rows, True)
    yield MetricSample(
        "hotrow_gpu_cache_capacity_rows", "Rows that a GPU cache has room for.", labels, stats.capacity_rows, True
    )
    yield MetricSample(
        "hotrow_gpu_cache_bytes", "Bytes of GPU memory that a GPU cache uses.", labels, stats.device_bytes, True
    )
    yield MetricSample(
        "hotrow_gpu_cache_host_bytes",
        "Bytes of page-locked memory that a GPU cache uses.",
        labels,
        stats.host_bytes,
        True,
    )


def insertion_readings(late_keys: int, dropped_keys: int, labels: Labels) -> Iterator[MetricSample]:
    """Return the samples of one model's asynchronous mode on one device."""
    yield MetricSample(
        "hotrow_gpu_cache_late_keys",
        "Keys answered with the default value although a tier may hold them: their rows were inserted later.",
        labels,
        late_keys,
    )
    yield MetricSample(
        "hotrow_gpu_cache_dropped_insertions",
        "Keys whose rows are not inserted later: too many keys were waiting, or a tier did not answer.",
        labels,
        dropped_keys,
    )
