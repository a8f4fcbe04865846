"""What a parameter server counts of each table. Plain numbers; how they are shown is ``readings``' business."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from serving.metrics import Histogram

#: Upper bounds of the fetch times' buckets, in seconds: 10 us to 10 s.
FETCH_BUCKETS_S = (*(digit * 10.0**power for power in range(-5, 1) for digit in (1.0, 2.5, 5.0)), 10.0)


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Counts of one table in one tier; of the keys of a request every one counts, duplicates too.

    Attributes:
        tier: the tier's name.
        asked_keys: keys that the tier was asked for and did answer about.
        hits: keys among these that it held.
        errors: calls that it did not answer; promotions that failed, but for want of room, are among them.
        timeouts: calls among these that its time budget ended.
        promoted_rows: rows that a slower tier held and that were copied into this one.
        dropped_promotions: such rows that were not: there was no room, they changed meanwhile, or there were too many.
        refills: times that it was given back rows which it had lost.
        fetch_times: of the calls that it answered.
    """

    tier: str
    asked_keys: int
    hits: int
    errors: int
    timeouts: int
    promoted_rows: int
    dropped_promotions: int
    refills: int
    fetch_times: Histogram


@dataclass(frozen=True, slots=True)
class TableCounters:
    """Counts of one table since it was loaded; every key of a request counts, duplicates too.

    Attributes:
        model: the model's name.
        version: its version; 0 where it has none.
        table: the table's name inside the model.
        keys: keys looked up.
        defaulted_keys: keys that no tier holds, answered with the default value.
        tiers: of each tier, fastest first.
    """

    model: str
    version: int
    table: str
    keys: int
    defaulted_keys: int
    tiers: tuple[TierCounters, ...]

    @property
    def hits(self) -> Mapping[str, int]:
        """By tier, keys that it answered; without the tiers that answered none."""
        return _by_name((one.tier, one.hits) for one in self.tiers)

    @property
    def tier_errors(self) -> Mapping[str, int]:
        """By tier, calls that it did not answer; without the tiers that answered all."""
        return _by_name((one.tier, one.errors) for one in self.tiers)


def _by_name(counts: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    added: Counter[str] = Counter()
    for name, count in counts:
        added[name] += count
    return dict(+added)  # without zeros


class _TierCounts:
    __slots__ = (
        "asked_keys",
        "dropped_promotions",
        "errors",
        "fetch_times",
        "hits",
        "promoted_rows",
        "refills",
        "timeouts",
    )

    def __init__(self) -> None:
        self.asked_keys = self.hits = self.errors = self.timeouts = self.promoted_rows = self.dropped_promotions = 0
        self.refills = 0
        self.fetch_times = Histogram(FETCH_BUCKETS_S)


class TableCounting:
    """Counts what happens to one table; every method may be called from any thread.

    Tiers are told by their depth, counted from the fastest, 0.
    """

    def __init__(self, model: str, version: int, table: str, tiers: Sequence[str]) -> None:
        """Start at zero, for tiers of these names, fastest first."""
        self._labels = (model, version, table)
        self._names = tuple(tiers)
        self._lock = threading.Lock()  # guards the counts below; held for a few additions only
        self._keys = 0
        self._defaulted_keys = 0
        self._tiers = tuple(_TierCounts() for _ in tiers)

    def looked_up(self, asked_keys: Sequence[int], hits: Sequence[int], defaulted_keys: int) -> None:
        """One lookup was answered; ``asked_keys`` and ``hits`` are by tier."""
        with self._lock:
            self._defaulted_keys += defaulted_keys
            self._keys += defaulted_keys
            for counts, asked, held in zip(self._tiers, asked_keys, hits, strict=True):
                counts.asked_keys += asked
                counts.hits += held
                self._keys += held

    def all_hit(self, depth: int, keys: int) -> None:
        """One lookup was answered by one tier, which was asked first and held all ``keys``."""
        with self._lock:
            self._keys += keys
            self._tiers[depth].asked_keys += keys
            self._tiers[depth].hits += keys

    def fetched(self, depth: int, seconds: float) -> None:
        """A tier answered a call."""
        with self._lock:
            self._tiers[depth].fetch_times.observe(seconds)

    def failed(self, depth: int, timed_out: bool) -> None:
        """A tier did not answer a call."""
        with self._lock:
            self._tiers[depth].errors += 1
            self._tiers[depth].timeouts += timed_out

    def promoted(self, depth: int, rows: int, dropped_rows: int) -> None:
        """A tier was given rows that a slower one held, and took some."""
        with self._lock:
            self._tiers[depth].promoted_rows += rows
            self._tiers[depth].dropped_promotions += dropped_rows

    def refilled(self, depth: int) -> None:
        """A tier was given back rows that it had lost."""
        with self._lock:
            self._tiers[depth].refills += 1

    def read(self) -> TableCounters:
        """The counts now."""
        model, version, table = self._labels
        with self._lock:
            tiers = tuple(map(_snapshot, self._names, self._tiers))
            return TableCounters(model, version, table, self._keys, self._defaulted_keys, tiers)


def _snapshot(name: str, counts: _TierCounts) -> TierCounters:
    return TierCounters(
        tier=name,
        asked_keys=counts.asked_keys,
        hits=counts.hits,
        errors=counts.errors,
        timeouts=counts.timeouts,
        promoted_rows=counts.promoted_rows,
        dropped_promotions=counts.dropped_promotions,
        refills=counts.refills,
        fetch_times=counts.fetch_times.copy(),
    )
