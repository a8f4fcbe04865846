"""What a parameter server counts of each table. Plain numbers; how they are shown is the metrics' business."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableCounters:
    """Counts of one table since it was loaded; every key of a request counts, duplicates too.

    Attributes:
        model: the model's name.
        version: its version; 0 where it has none.
        table: the table's name inside the model.
        keys: keys looked up.
        hits: by tier, keys that it answered.
        defaulted_keys: keys that no tier holds, answered with the default value.
        tier_errors: by tier, calls that it did not answer.
    """

    model: str
    version: int
    table: str
    keys: int
    hits: Mapping[str, int]
    defaulted_keys: int
    tier_errors: Mapping[str, int]


class TableCounting:
    """Counts lookups of one table; every method may be called from any thread."""

    def __init__(self, model: str, version: int, table: str) -> None:
        """Start at zero."""
        self._labels = (model, version, table)
        self._lock = threading.Lock()  # guards the counts below; held for a few additions only
        self._keys = 0
        self._hits: Counter[str] = Counter()
        self._defaulted_keys = 0
        self._tier_errors: Counter[str] = Counter()

    def looked_up(self, hits: Mapping[str, int], defaulted_keys: int) -> None:
        """One lookup was answered."""
        with self._lock:
            self._hits.update(hits)
            self._defaulted_keys += defaulted_keys
            self._keys += sum(hits.values()) + defaulted_keys

    def tier_failed(self, tier: str) -> None:
        """A tier did not answer a call."""
        with self._lock:
            self._tier_errors[tier] += 1

    def read(self) -> TableCounters:
        """The counts now."""
        model, version, table = self._labels
        with self._lock:
            hits, errors = dict(self._hits), dict(self._tier_errors)
            return TableCounters(model, version, table, self._keys, hits, self._defaulted_keys, errors)
