"""What a parameter server counts for each table, and the counts as metric samples.

There are two kinds of counts, and each has one place. ``RequestCounts`` counts the keys of answered lookups and the
keys that got the default value, whatever tier or cache answered. ``TableCounting`` counts the calls of each tier,
including calls of lookups that fail later.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add

import numpy as np
from numpy.typing import NDArray

from serving.metrics import Histogram, MetricSample
from serving.parameter_server.cache_state import CacheState
from serving.storage.store import Store

Labels = tuple[tuple[str, str], ...]
#: Upper bounds of the fetch times' buckets, in seconds: 10 us to 10 s.
FETCH_BUCKETS_S = (*(digit * 10.0**power for power in range(-5, 1) for digit in (1.0, 2.5, 5.0)), 10.0)


class RequestCounts:
    """The keys of one model's answered lookups, by table, duplicates included. May be used from any thread."""

    def __init__(self, tables: int) -> None:
        """Start at zero."""
        self._lock = threading.Lock()  # guards the two fields below; held for a few additions only
        self._keys = [0] * tables  # a list, because each request of a few tables adds to it
        self._defaulted_keys = np.zeros(tables, dtype=np.int64)

    def answered(self, keys: Sequence[int], defaulted_keys: NDArray[np.int64] | None = None) -> None:
        """Count an answered lookup of all tables.

        Args:
            keys: how many keys it had of each table.
            defaulted_keys: how many of them got the default value, of each table; None: none.
        """
        with self._lock:
            self._keys = list(map(add, self._keys, keys))
            if defaulted_keys is not None:
                self._defaulted_keys += defaulted_keys

    def of_table(self, place: int, keys: int, defaulted_keys: int = 0) -> None:
        """Count keys of one table; less than zero to take keys back."""
        with self._lock:
            self._keys[place] += keys
            if defaulted_keys:
                self._defaulted_keys[place] += defaulted_keys

    def read(self, place: int) -> tuple[int, int]:
        """Return the keys and the defaulted keys of one table."""
        with self._lock:
            return self._keys[place], int(self._defaulted_keys[place])


@dataclass(slots=True)
class TierCounters:
    """Counts of one table in one tier. Every key of a request counts, including duplicates.

    Behind a GPU cache, a tier is asked once for a key that the cache misses, and every duplicate counts.

    Attributes:
        tier: the tier's name.
        asked_keys: keys that the tier was asked for, in calls that it answered.
        hits: keys among ``asked_keys`` that it held.
        errors: calls that it did not answer, including promotions that failed for another reason than a lack of room.
        timeouts: calls among ``errors`` that its time budget ended.
        promoted_rows: rows of slower tiers that were copied into this tier.
        dropped_promotions: rows of slower tiers that were not copied: there was no room, the rows had changed, or too
            many were waiting.
        refills: how often the tier was refilled after it had become invalid.
        fetch_times: times of the calls that it answered.
        is_up: whether it answers now.
        state: the value of the ``CacheState``; a source of truth is serving.
    """

    tier: str
    asked_keys: int = 0
    hits: int = 0
    errors: int = 0
    timeouts: int = 0
    promoted_rows: int = 0
    dropped_promotions: int = 0
    refills: int = 0
    fetch_times: Histogram = field(default_factory=lambda: Histogram(FETCH_BUCKETS_S))
    is_up: bool = True
    state: str = CacheState.SERVING.value

    @property
    def hit_ratio(self) -> float:
        """The share of the keys it was asked for that it held; 1 if it was asked for none, as for GPU caches."""
        return self.hits / self.asked_keys if self.asked_keys else 1.0


@dataclass(frozen=True, slots=True)
class TableCounters:
    """Counts of one table since it was loaded. Every key of a request counts, including duplicates.

    Attributes:
        model: the model's name.
        version: the model's version, or 0.
        table: the table's name inside the model.
        keys: keys of answered lookups.
        defaulted_keys: keys among ``keys`` that were answered with the default value: no tier held them, or, in the
            asynchronous mode of a GPU cache, their rows are inserted later.
        tiers: the counts of each tier, fastest first.
    """

    model: str
    version: int
    table: str
    keys: int
    defaulted_keys: int
    tiers: tuple[TierCounters, ...]

    @property
    def hits(self) -> Mapping[str, int]:
        """The keys that each tier held, without tiers that held none."""
        return {tier.tier: tier.hits for tier in self.tiers if tier.hits}


class TableCounting:
    """Counts what happens to one table. Every method may be called from any thread.

    ``depth`` names a tier: 0 is the fastest.

    Attributes:
        requests: the keys of the model's answered lookups.
        place: the table's place among the tables of ``requests``.
        pooled: int64, counts that ``kernels.host.PooledLookup`` writes for the fastest tier: keys of lookups in which
            it held all keys, and for all of its answers the nanoseconds and how many fell into each time bucket.
    """

    def __init__(
        self, model: str, version: int, table: str, tiers: Sequence[str], requests: RequestCounts, place: int
    ) -> None:
        """Start at zero, for tiers of these names, fastest first."""
        self._labels = (model, version, table)
        self.requests = requests
        self.place = place
        self._lock = threading.Lock()  # guards the counts below; held for a few additions only
        self._shown_keys = 0
        self._tiers = tuple(map(TierCounters, tiers))
        self.pooled = np.zeros(2 + len(FETCH_BUCKETS_S) + 1, dtype=np.int64)

    def answered(self, keys: int, defaulted_keys: int) -> None:
        """Count the keys of an answered lookup, whatever tier answered them; less than zero to take keys back."""
        self.requests.of_table(self.place, keys, defaulted_keys)

    def asked(self, asked_keys: Sequence[int], hits: Sequence[int]) -> None:
        """Count the calls of a lookup: the keys that each tier was asked for, and the keys that it held."""
        with self._lock:
            for counts, asked, hit in zip(self._tiers, asked_keys, hits, strict=True):
                counts.asked_keys += asked
                counts.hits += hit

    def all_hit(self, depth: int, keys: int, seconds: float | None = None) -> None:
        """Count a call of one tier, which was asked first and held all ``keys``.

        ``seconds`` is the time of the tier's call; None: ``fetched`` has counted it.
        """
        with self._lock:
            counts = self._tiers[depth]
            counts.asked_keys += keys
            counts.hits += keys
            if seconds is not None:
                counts.fetch_times.observe(seconds)

    def fetched(self, depth: int, seconds: float) -> None:
        """Count a call that a tier answered."""
        with self._lock:
            self._tiers[depth].fetch_times.observe(seconds)

    def failed(self, depth: int, timed_out: bool) -> None:
        """Count a call that a tier did not answer."""
        with self._lock:
            self._tiers[depth].errors += 1
            self._tiers[depth].timeouts += timed_out

    def promoted(self, depth: int, rows: int, dropped_rows: int) -> None:
        """Count rows of slower tiers that a tier took, and rows that it did not take."""
        with self._lock:
            self._tiers[depth].promoted_rows += rows
            self._tiers[depth].dropped_promotions += dropped_rows

    def refilled(self, depth: int) -> None:
        """Count a refill of a tier."""
        with self._lock:
            self._tiers[depth].refills += 1

    def read(self) -> TableCounters:
        """Return the counts now."""
        model, version, table = self._labels
        answered_keys, defaulted_keys = self.requests.read(self.place)
        with self._lock:
            first, *others = (replace(tier, fetch_times=tier.fetch_times.copy()) for tier in self._tiers)
            pooled_keys, nanoseconds, *times = self.pooled.tolist()  # one step of Python: no update in between
            # A counter never falls, although ``pooled`` may have keys of a request that fails a moment later.
            self._shown_keys = max(self._shown_keys, answered_keys + pooled_keys)
            first.fetch_times.add(times, nanoseconds / 1e9)
            first.asked_keys += pooled_keys
            first.hits += pooled_keys
            return TableCounters(model, version, table, self._shown_keys, defaulted_keys, (first, *others))


def table_samples(name: str, counters: TableCounters, stores: Sequence[Store] = ()) -> Iterator[MetricSample]:
    """The samples of a table, of its tiers, and of its stores; ``name`` is the full name."""
    labels = (("model", counters.model), ("version", str(counters.version)), ("table", counters.table))
    for store in stores:
        in_store = store.tables.get(name)
        for sample in () if in_store is None else in_store.samples():
            yield replace(sample, labels=(*labels, ("tier", store.name), *sample.labels))
    yield MetricSample(
        "hotrow_lookup_keys",
        "Keys looked up, duplicates included, except those of lookups that failed.",
        labels,
        counters.keys,
    )
    yield MetricSample(
        "hotrow_defaulted_keys",
        "Keys answered with the default value: no tier holds them, or their rows are inserted later.",
        labels,
        counters.defaulted_keys,
    )
    for tier in counters.tiers:
        yield from _tier_samples(tier, (*labels, ("tier", tier.tier)))


def _tier_samples(tier: TierCounters, labels: Labels) -> Iterator[MetricSample]:
    yield MetricSample("hotrow_tier_hits", "Keys that a tier answered.", labels, tier.hits)
    misses = tier.asked_keys - tier.hits
    yield MetricSample("hotrow_tier_misses", "Keys that a tier was asked for and does not hold.", labels, misses)
    yield MetricSample(
        "hotrow_tier_hit_ratio", "Hit rate of a tier since startup.", labels, tier.hit_ratio, is_gauge=True
    )
    help_text = "1 while a tier answers, 0 from a call that it did not answer until it answers again."
    yield MetricSample("hotrow_tier_up", help_text, labels, int(tier.is_up), is_gauge=True)
    help_text = f"1 for the state of a table in a tier: {', '.join(state.value for state in CacheState)}."
    yield MetricSample("hotrow_tier_state", help_text, (*labels, ("state", tier.state)), 1, is_gauge=True)
    yield MetricSample("hotrow_tier_errors", "Calls that a tier did not answer.", labels, tier.errors)
    yield MetricSample("hotrow_tier_timeouts", "Calls that a tier's time budget ended.", labels, tier.timeouts)
    yield MetricSample(
        "hotrow_tier_promoted_rows", "Rows of slower tiers that were copied into this tier.", labels, tier.promoted_rows
    )
    yield MetricSample(
        "hotrow_tier_dropped_promotions",
        "Rows of slower tiers that were not copied into this tier: it was full, they changed, or too many waited.",
        labels,
        tier.dropped_promotions,
    )
    yield MetricSample("hotrow_tier_refills", "Times that a tier was refilled.", labels, tier.refills)
    yield MetricSample("hotrow_tier_fetch_seconds", "Time of a tier's answer to one call.", labels, tier.fetch_times)
