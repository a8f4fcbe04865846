"""What a cache returns: rows and misses of a query, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.device import Array, Device, Stream


class CacheAnswer:
    """The answer of one query of up to N keys. One answer may serve query after query on one stream.

    Everything in it is valid once the query's stream has run.

    Attributes:
        rows: float32[N, D] on the device; rows of missing keys are zeros.
        missing_keys: int64[N] on the device. The first M are the missing keys, with duplicates, in no particular order.
        missing_positions: int32[N] on the device: the position of each missing key among the keys of the query.
        missing_count: int32[1] in host memory: M.
    """

    def __init__(self, device: Device, max_keys: int, dim: int, stream: Stream) -> None:
        """Take memory for queries on ``stream``."""
        self.rows: Array = device.empty((max_keys, dim), np.float32)
        self.missing_keys: Array = device.empty(max_keys, np.int64)
        self.missing_positions: Array = device.empty(max_keys, np.int32)
        self.missing_count: npt.NDArray[np.int32] = device.pinned(1, np.int32)
        self._count_view: Array = device.device_view(self.missing_count)
        with device.using(stream):
            # Allocated on the stream: if the answer is dropped at once, no other stream gets this memory too early.
            self.progress: Array = device.empty(1, np.uint64)
            self.progress.fill(0)

    @property
    def max_keys(self) -> int:
        """N."""
        return int(self.rows.shape[0])

    def arguments(self) -> tuple[Any, ...]:
        """Return the arrays in the order of query.cu."""
        return self.rows, self.missing_keys, self.missing_positions, self.progress, self._count_view


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds, and what happened to its keys since it was made.

    Args:
        capacity_rows: rows that fit.
        device_bytes: device memory.
        host_bytes: page-locked host memory.
        found_keys: keys of queries that were held, with duplicates.
        missed_keys: keys of queries that were not held, with duplicates.
        rows: rows held now.
        inserted_rows: new keys that took an empty slot.
        replaced_rows: new keys that took another key's slot.
        refused_first_misses: new keys refused because their line was full and they had not been missed before.
        refused_by_cap: new keys refused because their call brought too many.
        refused_by_counters: new keys refused because all rows of their line were used recently.
        refused_without_slot: new keys of a static cache that had no free slot.
        unfit_rows: rows left out because the cache's row dtype cannot hold one of their values.
        updated_rows: rows that were overwritten.
        erased_rows: keys that were erased.
        absent_keys: keys that are known to be in no tier now.
        absent_answers: keys of pooled or single-key lookups that were known to be in no tier, with duplicates. They are
            neither found nor missed keys.
    """

    capacity_rows: int
    device_bytes: int
    host_bytes: int
    found_keys: int
    missed_keys: int
    rows: int
    inserted_rows: int
    replaced_rows: int
    refused_first_misses: int
    refused_by_cap: int
    refused_by_counters: int
    refused_without_slot: int
    unfit_rows: int
    updated_rows: int
    erased_rows: int
    absent_keys: int
    absent_answers: int

    @property
    def hit_ratio(self) -> float:
        """The share of the queried keys that was held; 1 if there was no query."""
        asked = self.found_keys + self.missed_keys
        return self.found_keys / asked if asked else 1.0
