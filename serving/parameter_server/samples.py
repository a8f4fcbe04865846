"""The parameter server's counts as metric samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from serving.metrics import MetricSample
from serving.parameter_server.counters import TableCounters, TierCounters
from serving.storage.store import Store

Labels = tuple[tuple[str, str], ...]


def table_samples(name: str, counters: TableCounters, stores: Sequence[Store] = ()) -> Iterator[MetricSample]:
    """The samples of a table, of its tiers, and of its stores; ``name`` is the full name."""
    labels = (("model", counters.model), ("version", str(counters.version)), ("table", counters.table))
    for store in stores:
        for sample in store.samples(name):
            yield replace(sample, labels=(*labels, ("tier", store.name), *sample.labels))
    yield MetricSample("hotrow_lookup_keys", "Keys looked up.", labels, counters.keys)
    yield MetricSample(
        "hotrow_defaulted_keys",
        "Keys that no tier holds, answered with the default vector.",
        labels,
        counters.defaulted_keys,
    )
    for tier in counters.tiers:
        yield from _tier_samples(tier, (*labels, ("tier", tier.tier)))


def _tier_samples(tier: TierCounters, labels: Labels) -> Iterator[MetricSample]:
    yield MetricSample("hotrow_tier_hits", "Keys that a tier answered.", labels, tier.hits)
    misses = tier.asked_keys - tier.hits
    yield MetricSample("hotrow_tier_misses", "Keys that a tier was asked for and does not hold.", labels, misses)
    yield MetricSample("hotrow_tier_errors", "Calls that a tier did not answer.", labels, tier.errors)
    yield MetricSample("hotrow_tier_timeouts", "Calls that a tier's time budget ended.", labels, tier.timeouts)
    yield MetricSample(
        "hotrow_tier_promoted_rows", "Rows of slower tiers copied into this one.", labels, tier.promoted_rows
    )
    yield MetricSample(
        "hotrow_tier_dropped_promotions",
        "Rows of slower tiers that were not copied into this one: no room, changed meanwhile, or too many waiting.",
        labels,
        tier.dropped_promotions,
    )
    yield MetricSample(
        "hotrow_tier_refills", "Times that a tier was given back rows that it had lost.", labels, tier.refills
    )
    yield MetricSample("hotrow_tier_fetch_seconds", "Time of a tier's answer to one call.", labels, tier.fetch_times)
