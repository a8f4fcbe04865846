"""Reading a cache out between writes and beside queries: what it counted, and its lines, some at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpu_cache.cache_kernels import BLOCK_THREADS, GATHER_ROWS, CacheKernels
from gpu_cache.capacity import Capacity
from gpu_cache.writers import Writers
from kernels.device import Array, Device, Stream

_PART_BYTES = 64 << 20  # of rows that are read at a time


def read_counters(device: Device, counters: Array, writers: Writers, stream: Stream) -> list[int]:
    """Wait for all writes queued so far, and read what a cache has counted: uint64 on the device, of ``COUNTERS``."""
    on_host = device.pinned(counters.size, np.uint64)
    with writers.turn(stream):
        device.download(counters, on_host, stream)
        done = stream.record()
    done.synchronize()
    counted: list[int] = on_host.tolist()
    return counted


def read_lines(
    kernels: CacheKernels, capacity: Capacity, table: Array, writers: Writers, stream: Stream, with_rows: bool
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Read what the lines hold; writers get their turns between two parts.

    Args:
        kernels: of the cache.
        capacity: of the cache.
        table: its descriptor.
        writers: its writers.
        stream: where the reading is queued.
        with_rows: whether rows are read too.

    Yields:
        keys int64[N] of the next lines and their rows float32[N, D], or float32[0, D].
    """
    device, layout = kernels.device, capacity.layout
    most_lines = min(capacity.line_count, max(1, _PART_BYTES // (4 * layout.dim * layout.line_keys)))
    slots = most_lines * layout.line_keys
    numbers, listed = device.empty(slots, np.int64), device.empty(1, np.uint32)
    keys, rows = device.empty(slots, np.int64), device.empty((slots if with_rows else 0, layout.dim), np.float32)
    host_listed, host_keys, host_rows = (device.pinned(array.shape, array.dtype) for array in (listed, keys, rows))
    for first in range(0, capacity.line_count, most_lines):
        lines = min(most_lines, capacity.line_count - first)
        with writers.turn(stream):
            with device.using(stream):
                listed.fill(0)
            arguments = (table, np.uint32(first), np.uint32(lines), keys, numbers, listed)
            kernels.launch_tiles("list_keys", lines, arguments, stream)
            device.download(listed, host_listed, stream)
            device.download(keys, host_keys, stream)
            if with_rows:
                blocks = -(-slots // GATHER_ROWS)
                kernels.launch("gather", blocks, BLOCK_THREADS, (table, numbers, listed, rows), stream)
                device.download(rows, host_rows, stream)
            done = stream.record()
        done.synchronize()
        yield host_keys[: host_listed[0]].copy(), host_rows[: host_listed[0]].copy()
