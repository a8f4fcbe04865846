"""Where the launches of a workspace write rows: those of bags, and those of single keys, in turn in the same memory.

Letters for shapes: B samples, S slots, N keys of a table, D embedding_vec_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpu_cache.bag_layout import BLOCK_THREADS, lacking_sizes, out_floats, room_floats
from gpu_cache.cache_kernels import QUERY_TILE_KEYS
from kernels.device import Array, Kernel

if TYPE_CHECKING:
    from gpu_cache.cache_group import CacheGroup

# A kernel, and its last arguments.
Launch = tuple[Kernel, tuple[Array, ...]]
Shapes = Sequence[tuple[int, ...]]


class RowRoom:
    """Memory for the rows of a request, and for what lacks one: taken once, for graphs know its address.

    Args:
        group: whose rows they are.
        max_samples: the most B.
        max_single_keys: the most keys of a request that are answered one by one.

    Attributes:
        out: float32, for rows.
        lacking: two of uint32, for what a launch lists and for what the next one does.
        floats: where the last request's rows begin, by table, and last where all end.
        shapes: of these rows, by table.
    """

    def __init__(self, group: CacheGroup, max_samples: int, max_single_keys: int) -> None:
        """Take the memory."""
        device, tables = group.device, group.tables
        self.out: Array = device.empty(room_floats(tables, group.dims, max_samples, max_single_keys), np.float32)
        first, second = lacking_sizes(tables, max_samples, max_single_keys)
        self.lacking: tuple[Array, Array] = device.empty(first, np.uint32), device.empty(second, np.uint32)
        self.floats: Sequence[int] = [0]
        self.shapes: Shapes = ()

    def place(self, floats: Sequence[int], shapes: Shapes) -> None:
        """Begin a request, whose rows are to be there."""
        self.floats, self.shapes = floats, shapes

    @property
    def whole(self) -> Array:
        """float32[...], what the request's rows are parts of, up to where they end."""
        return self.out[: self.floats[-1]]

    @property
    def rows(self) -> tuple[Array, ...]:
        """The request's rows by table. Made when asked for: who runs a graph on the buffers never does."""
        return self.parts(self.floats, self.shapes)

    def parts(self, floats: Sequence[int], shapes: Shapes) -> tuple[Array, ...]:
        """Views of the memory, of these shapes, that begin there."""
        return tuple(self.out[at : at + prod(shape)].reshape(shape) for at, shape in zip(floats, shapes, strict=False))


class Output(Protocol):
    """What a request's launches need beside the request."""

    def first(self) -> Launch:
        """The launch that asks the caches."""

    def again(self) -> Launch:
        """The next launch, for what the one before listed as lacking."""


class PooledRows:
    """Rows of bags.

    Args:
        group: whose kernels are used.
        max_samples: the most B.
        room: where they go.

    Attributes:
        buffers: float32[max_samples, S, D] per table: where rows lie that are not in one piece.
    """

    def __init__(self, group: CacheGroup, max_samples: int, room: RowRoom) -> None:
        """Take no memory."""
        self._slots, self._dims = [table.slots for table in group.tables], group.dims
        self._room = room
        self._pool, self._pool_again = group.kernel("pool"), group.kernel("pool_again")
        floats = out_floats(group.tables, group.dims, max_samples)
        self._samples, self._shapes = max_samples, self._shapes_of(max_samples)
        self.buffers: tuple[Array, ...] = room.parts(floats, self._shapes)
        self._round = 0

    def place(self, samples: int, floats: Sequence[int]) -> None:
        """Begin a request.

        Args:
            samples: B.
            floats: where each table's rows, float32[B, S, D], are to begin, and last where all end.
        """
        self._round = 0
        if samples != self._samples:
            self._samples, self._shapes = samples, self._shapes_of(samples)
        self._room.place(floats, self._shapes)

    def first(self) -> Launch:
        """See ``Output.first``; the same for each request, so that a graph can be made of it."""
        return self._pool, (self._room.lacking[0], self._room.out)

    def again(self) -> Launch:
        """See ``Output.again``."""
        listed = self._round % 2
        self._round += 1
        lacking = self._room.lacking
        return self._pool_again, (lacking[listed], lacking[1 - listed], self._room.out)

    def _shapes_of(self, samples: int) -> Shapes:
        return [(samples, slots, dim) for slots, dim in zip(self._slots, self._dims, strict=True)]


class KeyRows:
    """Rows of single keys. Before the first request, compiles nothing.

    Args:
        group: whose kernels are used.
        room: where they go.

    Attributes:
        item_keys: how many keys a block looks up at a time.
    """

    def __init__(self, group: CacheGroup, room: RowRoom) -> None:
        """Take no memory."""
        self._group, self._room = group, room
        self.item_keys = BLOCK_THREADS // group.caches[0].layout.tile_lanes * QUERY_TILE_KEYS
        self._kernels: tuple[Kernel, ...] = ()  # the first one, and that for what it lacks

    def place(self, counts: Sequence[int], floats: Sequence[int]) -> None:
        """Begin a request.

        Args:
            counts: N per table.
            floats: where each table's rows, float32[N, D], are to begin, and last where all end.
        """
        if not self._kernels:  # not where they are launched: readers are locked then
            self._kernels = self._group.kernel("lookup"), self._group.kernel("lookup_again")
        self._room.place(floats, list(zip(counts, self._group.dims, strict=True)))

    def first(self) -> Launch:
        """See ``Output.first``."""
        return self._kernels[0], (self._room.lacking[0], self._room.out)

    def again(self) -> Launch:
        """See ``Output.again``; it lacks nothing more."""
        return self._kernels[1], (self._room.lacking[0], self._room.out)
