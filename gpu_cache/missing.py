"""The distinct keys that a request missed: missing.cuh's set, and what it tells the host.

Letters for shapes: T tables, N keys of a request, M missing keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from secrets import randbits
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import (
    BLOCK_THREADS,
    MISSING_REPORT,
    MISSING_SET_BYTES,
    MISSING_SLOT_BYTES,
    PROGRESS_WORDS,
    TEAM_WORDS,
    missing_words,
)
from kernels.device import Array, Stream

if TYPE_CHECKING:
    from gpu_cache.cache_group import CacheGroup

_MOST_BLOCKS = 1 << 10


@dataclass(frozen=True, slots=True)
class MissingKeys:
    """What a launch found missing in one table's cache.

    Args:
        keys: int64[M], distinct, in the order in which they first appear among the request's keys.
        times: uint32[M], how often each was missed; what ``EmbeddingCache.replace`` asks for as ``misses``.
        positions: how many of the table's keys were missed, with duplicates.
        bags: how many bags lack one of them.
    """

    keys: NDArray[np.int64]
    times: NDArray[np.uint32]
    positions: int
    bags: int


class MissingSet:
    """A workspace's set. What the host reads is in pinned memory, which launches write to.

    Args:
        group: whose kernels are used.
        max_keys: N.
        stream: where launches that use it are queued.
    """

    def __init__(self, group: CacheGroup, max_keys: int, stream: Stream) -> None:
        """Take memory and queue its setting up."""
        device = group.device
        tables, words = len(group.tables), missing_words(max_keys)
        self._stream = stream
        self._nothing = (MissingKeys(np.empty(0, np.int64), np.empty(0, np.uint32), 0, 0),) * tables
        self._forget = group.kernel("forget")
        self._report: NDArray[Any] = device.pinned(tables, MISSING_REPORT)
        self._keys: NDArray[np.int64] = device.pinned(max_keys, np.int64)
        self._times: NDArray[np.uint32] = device.pinned(max_keys, np.uint32)
        self.slots: Array = device.empty((2 * max_keys, MISSING_SLOT_BYTES), np.uint8)
        sizes = (max_keys, words, words, PROGRESS_WORDS, TEAM_WORDS, 2 * tables)
        on_device = [self.slots, *(device.zeros(size, np.uint32) for size in sizes)]
        on_host = [device.device_view(array) for array in (self._report.view(np.uint32), self._keys, self._times)]
        self._arrays = on_device, on_host  # the descriptor has their addresses alone
        self.descriptor: Array = device.empty(MISSING_SET_BYTES, np.uint8)
        seed = np.uint64(randbits(64))
        arguments = (self.descriptor, *on_device, *on_host, np.uint32(2 * max_keys), seed)
        describe = group.kernel("describe_missing")
        with group.readers.reading(stream):
            describe((_blocks(2 * max_keys),), (BLOCK_THREADS,), arguments, stream)

    def forget(self) -> None:
        """Queue the emptying of the set, where the last request left keys in it. Its launches must have run."""
        used = int(self._report["used"][0])
        if used:
            self._forget((_blocks(used),), (BLOCK_THREADS,), (self.descriptor,), self._stream)
            self._report["used"][0] = 0

    def settle(self) -> None:
        """Nothing that was told lacks any more, unless a later launch misses it; all launches must have run."""
        self._report["bags"] = 0

    def read(self) -> tuple[MissingKeys, ...]:
        """Return what the last launch found missing, by table; it must have run."""
        report = self._report
        if not report["bags"].any():
            return self._nothing
        ends = [0, *np.cumsum(report["distinct"]).tolist()]
        return tuple(
            MissingKeys(self._keys[begin:end].copy(), self._times[begin:end].copy(), int(keys), int(bags))
            for (begin, end), keys, bags in zip(pairwise(ends), report["keys"], report["bags"], strict=True)
        )


def _blocks(values: int) -> int:
    return min(-(-values // BLOCK_THREADS), _MOST_BLOCKS)
