"""The memory for the rows of a request, of bags or of single keys, and the launches that write it.

Letters for shapes: B samples, S slots, N keys of a table, D embedding_vec_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpu_cache.bag_layout import BLOCK_THREADS, incomplete_sizes, most_floats, out_floats
from gpu_cache.device_table import QUERY_TILE_KEYS
from kernels.device import Array, Kernel

if TYPE_CHECKING:
    from gpu_cache.cache_group import CacheGroup

# A kernel, and its last arguments.
Launch = tuple[Kernel, tuple[Array, ...]]
Shapes = Sequence[tuple[int, ...]]


class OutputBuffer:
    """Memory for a request's rows and its lists of incomplete bags; it never moves, because graphs know its address.

    Attributes:
        out: float32, for rows.
        incomplete: uint32, two lists of bags or keys without a row: of the last launch and of the next launch.
        floats: the first float of each table's rows in the last request, and the end of the last table's rows.
        shapes: of these rows, by table.
    """

    def __init__(self, group: CacheGroup, max_samples: int, max_single_keys: int) -> None:
        """Take the memory."""
        device, tables = group.device, group.tables
        self.out: Array = device.empty(most_floats(tables, group.dims, max_samples, max_single_keys), np.float32)
        first, second = incomplete_sizes(tables, max_samples, max_single_keys)
        self.incomplete: tuple[Array, Array] = device.empty(first, np.uint32), device.empty(second, np.uint32)
        self.floats: Sequence[int] = [0]
        self.shapes: Shapes = ()

    def place(self, floats: Sequence[int], shapes: Shapes) -> None:
        """Begin a request with these places and shapes of its rows."""
        self.floats, self.shapes = floats, shapes

    @property
    def whole(self) -> Array:
        """float32[...], the memory of all the request's rows."""
        return self.out[: self.floats[-1]]

    @property
    def rows(self) -> tuple[Array, ...]:
        """The request's rows by table, made on demand, because a graph on the buffers does not need them."""
        return self.parts(self.floats, self.shapes)

    def parts(self, floats: Sequence[int], shapes: Shapes) -> tuple[Array, ...]:
        """Return views of the memory with these first floats and shapes."""
        return tuple(self.out[at : at + prod(shape)].reshape(shape) for at, shape in zip(floats, shapes, strict=False))


class Output(Protocol):
    """The launches of a request."""

    def first(self) -> Launch:
        """Return the launch that asks the caches."""

    def again(self) -> Launch:
        """Return the next launch, for the bags or keys that the launch before listed as incomplete."""


class PooledRows:
    """The launches for pooled rows.

    Attributes:
        buffers: float32[max_samples, S, D] per table, where rows are unless ``is_whole`` was asked for.
    """

    def __init__(self, group: CacheGroup, max_samples: int, buffer: OutputBuffer) -> None:
        """Take no memory."""
        self._slots, self._dims = [table.slots for table in group.tables], group.dims
        self._buffer = buffer
        self._pool, self._pool_again = group.kernel("pool"), group.kernel("pool_again")
        floats = out_floats(group.tables, group.dims, max_samples)
        self._samples, self._shapes = max_samples, self._shapes_of(max_samples)
        self.buffers: tuple[Array, ...] = buffer.parts(floats, self._shapes)
        self._round = 0

    def place(self, samples: int, floats: Sequence[int]) -> None:
        """Begin a request of B samples, with the places of each table's rows float32[B, S, D]."""
        self._round = 0
        if samples != self._samples:
            self._samples, self._shapes = samples, self._shapes_of(samples)
        self._buffer.place(floats, self._shapes)

    def first(self) -> Launch:
        """Return the first launch, which is the same for each request, so that a graph can capture it."""
        return self._pool, (self._buffer.incomplete[0], self._buffer.out)

    def again(self) -> Launch:
        """Return the next launch, which takes the list of the launch before and writes the other list."""
        listed = self._round % 2
        self._round += 1
        incomplete = self._buffer.incomplete
        return self._pool_again, (incomplete[listed], incomplete[1 - listed], self._buffer.out)

    def _shapes_of(self, samples: int) -> Shapes:
        return [(samples, slots, dim) for slots, dim in zip(self._slots, self._dims, strict=True)]


class KeyRows:
    """The launches for rows of single keys, compiled at the first request.

    Attributes:
        item_keys: how many keys a block looks up at a time.
    """

    def __init__(self, group: CacheGroup, buffer: OutputBuffer) -> None:
        """Take no memory."""
        self._group, self._buffer = group, buffer
        self.item_keys = BLOCK_THREADS // group.caches[0].layout.tile_lanes * QUERY_TILE_KEYS
        self._kernels: tuple[Kernel, ...] = ()  # the first launch, and the launch for missing rows

    def place(self, counts: Sequence[int], floats: Sequence[int]) -> None:
        """Begin a request of N keys per table, with the places of each table's rows float32[N, D]."""
        if not self._kernels:  # not at the launch, because the readers are locked then
            self._kernels = self._group.kernel("lookup"), self._group.kernel("lookup_again")
        self._buffer.place(floats, list(zip(counts, self._group.dims, strict=True)))

    def first(self) -> Launch:
        """Return the first launch."""
        return self._kernels[0], (self._buffer.incomplete[0], self._buffer.out)

    def again(self) -> Launch:
        """Return the next launch, after which no row is missing."""
        return self._kernels[1], (self._buffer.incomplete[0], self._buffer.out)
