"""What a cache has of a device's memory: lines, rows, counters, and the descriptor that tells kernels of them."""

from __future__ import annotations

import numpy as np

from gpu_cache.cache_kernels import CacheKernels
from gpu_cache.capacity import Capacity
from gpu_cache.layout import COUNTERS, MOST_CHAIN_LINES, TABLE_BYTES
from kernels.device import Array, Stream


class CacheArrays:
    """An empty cache's memory.

    Attributes:
        counters: uint64, of ``COUNTERS``.
        table: ``Table[1]``, for launches that ask this cache alone.
    """

    def __init__(self, kernels: CacheKernels, capacity: Capacity, seed: int, stream: Stream) -> None:
        """Take all memory and wait until it is ready.

        Args:
            kernels: of the cache.
            capacity: of the cache.
            seed: of the hash.
            stream: where the work is queued.
        """
        self._kernels, self._capacity, self._seed = kernels, capacity, seed
        device, layout = kernels.device, capacity.layout
        slab_shape = (capacity.slots, layout.row_stride_bytes)
        self._lines: Array = device.empty((capacity.line_count, layout.line_keys + 1), layout.key_word)
        self.counters: Array = device.empty(len(COUNTERS), np.uint64)
        self.table: Array = device.empty((1, TABLE_BYTES), np.uint8)
        self._slab: Array = (
            device.device_view(device.pinned(slab_shape, np.uint8))
            if capacity.kind == "uvm"
            else device.empty(slab_shape, np.uint8)
        )
        with device.using(stream):
            self._lines.fill(layout.empty_key)
            self._lines[:, layout.line_keys] = layout.key_word(0)  # the meta word
            self.counters.fill(0)
        self.describe(self.table, 0, 0, 0.0, stream)
        stream.synchronize()

    def describe(self, tables: Array, index: int, form: int, default_value: float, stream: Stream) -> None:
        """See ``EmbeddingCache.describe``."""
        capacity = self._capacity
        chain_lines = MOST_CHAIN_LINES if capacity.kind == "static" else 1
        numbers = (np.uint32(number) for number in (capacity.line_count, form, chain_lines, self._seed))
        arrays = (tables, np.uint32(index), self._lines, self._slab, self.counters)
        self._kernels.launch("describe", 1, 1, (*arrays, *numbers, np.float32(default_value)), stream)

    @property
    def memory(self) -> tuple[Array, ...]:
        """What must not be given back before work that uses it has run."""
        return self._lines, self._slab, self.counters
