"""Writes to a cache: slots are locked, then, when nobody reads their rows any more, filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_cache.cache_kernels import CacheKernels
from gpu_cache.capacity import Capacity
from gpu_cache.policy import lottery
from gpu_cache.readers import Readers
from gpu_cache.writers import Writers
from kernels.device import Array, Stream


class RowWrites:
    """What ``EmbeddingCache`` queues for ``replace``, ``update`` and ``erase``. Any thread may call; calls take turns.

    Keys int64[N], N at least 1, and rows float32[N, D] are the device's, ready on the stream, and known to be right.

    Args:
        kernels: of the cache.
        capacity: of the cache.
        table: its descriptor.
        readers: those who may be reading its rows.
        writers: whose turn it is.
    """

    def __init__(
        self, kernels: CacheKernels, capacity: Capacity, table: Array, readers: Readers, writers: Writers
    ) -> None:
        """See the class."""
        self._kernels, self._capacity, self._table = kernels, capacity, table
        self._readers, self._writers = readers, writers
        self._replacements = 0  # calls, for the lots that are drawn in each

    def replace(self, keys: Array, rows: Array, misses: Array | None, stream: Stream) -> None:
        """Queue the offer of new keys; ``misses`` are uint32[N], how often each was missed, or None: once."""
        with self._writers.turn(stream):
            if self._capacity.kind == "static":
                self._write("claim_static", (), keys, rows, stream)
                return
            self._replacements += 1
            has_marks = self._capacity.layout.key_type == "I64"
            lots = lottery(self._replacements, keys.size, self._capacity.slots, has_marks=has_marks)
            counts = keys if misses is None else misses
            self._write("claim", (counts, np.uint32(misses is not None), *lots), keys, rows, stream)

    def update(self, keys: Array, rows: Array, stream: Stream) -> None:
        """Queue the writing of rows of keys that are held."""
        with self._writers.turn(stream):
            self._write("claim_held", (), keys, rows, stream)

    def erase(self, keys: Array, stream: Stream) -> None:
        """Queue the freeing of slots; who found their rows before may go on reading them."""
        with self._writers.turn(stream):
            self._kernels.launch_tiles("erase", keys.size, (self._table, keys, np.uint32(keys.size)), stream)
            self._readers.hiding(stream)

    def _write(self, claim: str, options: tuple[Any, ...], keys: Array, rows: Array, stream: Stream) -> None:
        """Lock slots, wait on the stream for the queries queued until then, fill the slots."""
        numbers = self._kernels.device.empty(keys.size, np.int64)
        count = np.uint32(keys.size)
        self._kernels.launch_tiles(claim, keys.size, (self._table, keys, count, numbers, *options), stream)
        for read in self._readers.hiding(stream):
            stream.wait(read)
        self._kernels.launch_tiles("fill", keys.size, (self._table, keys, count, numbers, rows), stream)
