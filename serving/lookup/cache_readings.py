"""A cache's counters, for the metrics page."""

from collections.abc import Iterator

from gpu_cache.answer import CacheStats
from serving.metrics import MetricSample

Labels = tuple[tuple[str, str], ...]


def cache_readings(stats: CacheStats, labels: Labels) -> Iterator[MetricSample]:
    """Samples of one table's cache on one device; every key of a request counts, duplicates too."""
    yield MetricSample("hotrow_gpu_cache_hits", "Keys that a GPU cache held.", labels, stats.found_keys)
    yield MetricSample("hotrow_gpu_cache_misses", "Keys that a GPU cache did not hold.", labels, stats.missed_keys)
    yield MetricSample(
        "hotrow_gpu_cache_hit_ratio", "Part of all keys so far that a GPU cache held.", labels, stats.hit_ratio, True
    )
    yield MetricSample(
        "hotrow_gpu_cache_admitted_rows",
        "Rows that a GPU cache took.",
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
            "Rows that a GPU cache was offered and did not take, by reason.",
            (*labels, ("reason", reason)),
            rows,
        )
    yield MetricSample(
        "hotrow_gpu_cache_evicted_rows", "Rows whose place another row took.", labels, stats.replaced_rows
    )
    yield MetricSample("hotrow_gpu_cache_updated_rows", "Rows that were written again.", labels, stats.updated_rows)
    yield MetricSample("hotrow_gpu_cache_erased_rows", "Rows that were erased.", labels, stats.erased_rows)
    yield MetricSample("hotrow_gpu_cache_rows", "Rows that a GPU cache holds.", labels, stats.rows, True)
    yield MetricSample("hotrow_gpu_cache_capacity_rows", "Rows it has room for.", labels, stats.capacity_rows, True)
    yield MetricSample(
        "hotrow_gpu_cache_bytes", "Bytes of the GPU's memory it takes.", labels, stats.device_bytes, True
    )
    yield MetricSample(
        "hotrow_gpu_cache_host_bytes", "Bytes of page-locked memory it takes.", labels, stats.host_bytes, True
    )


def insertion_readings(late_keys: int, dropped_keys: int, labels: Labels) -> Iterator[MetricSample]:
    """Samples of the asynchronous mode of a model on one device."""
    yield MetricSample(
        "hotrow_gpu_cache_late_keys",
        "Keys answered with the default vector although a tier may hold them: their rows were inserted later.",
        labels,
        late_keys,
    )
    yield MetricSample(
        "hotrow_gpu_cache_dropped_insertions",
        "Keys whose rows were to be inserted later, and are not: too many were waiting.",
        labels,
        dropped_keys,
    )
