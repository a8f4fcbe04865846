"""What a cache answers: rows and misses of a query, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.device import Array, Device, Stream


class CacheAnswer:
    """Where one query of up to N keys puts its answer; may be used for query after query on one stream.

    All of it is valid once the query's stream has run.

    Attributes:
        rows: float32[N, D] on the device; those of missing keys are zeros.
        missing_keys: int64[N] on the device; the first M are the keys missed, with duplicates, in no particular order.
        missing_positions: int32[N] on the device: where each of them stands among the keys asked for.
        missing_count: int32[1], M, in the host's memory.
    """

    def __init__(self, device: Device, max_keys: int, dim: int, stream: Stream) -> None:
        """Take memory for queries on ``stream``."""
        self.rows: Array = device.empty((max_keys, dim), np.float32)
        self.missing_keys: Array = device.empty(max_keys, np.int64)
        self.missing_positions: Array = device.empty(max_keys, np.int32)
        self.missing_count: npt.NDArray[np.int32] = device.pinned(1, np.int32)
        self._count_view: Array = device.device_view(self.missing_count)
        with device.using(stream):
            # The kernel's own. The stream's own too, so that dropped at once its memory is no other stream's meanwhile.
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
    """What a cache holds, and what has become of the keys it was given, since it was made.

    Args:
        capacity_rows: rows it has room for.
        device_bytes: of the device's memory.
        host_bytes: of page-locked memory of the host.
        found_keys: keys of queries that were held, with duplicates.
        missed_keys: keys of queries that were not.
        rows: rows held now.
        inserted_rows: new keys that took an empty slot.
        replaced_rows: new keys that took another key's slot.
        refused_first_misses: new keys that were refused because their line is full and they were not missed before.
        refused_by_cap: new keys that were refused because their call brought too many.
        refused_by_counters: new keys that were refused because all rows of their line were used of late.
        refused_without_slot: new keys of a static cache that had no place.
        unfit_rows: rows left out because the cache's form of rows cannot hold one of their values.
        updated_rows: rows written anew.
        erased_rows: keys erased.
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

    @property
    def hit_ratio(self) -> float:
        """Part of the keys asked for that were held; 1 if none was asked for."""
        asked = self.found_keys + self.missed_keys
        return self.found_keys / asked if asked else 1.0
