"""The distinct keys that a request missed (missing.cuh), the rows that the host fetched for them, and their insertion.

Letters for shapes: T tables, N keys of a request, M missing keys, D embedding_vec_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    aligned,
    missing_words,
)
from gpu_cache.layout import admission_limits
from kernels.device import Array, Device, Event, Stream
from kernels.host import pack_rows

if TYPE_CHECKING:
    from gpu_cache.cache_group import CacheGroup

ABSENT = np.uint32(1 << 31)
"""In the ``misses`` of ``Workspace.insert``: no tier holds the key."""

_MOST_BLOCKS = 1 << 10


@dataclass(frozen=True, slots=True)
class MissingKeys:
    """The keys of one table that a launch was the first to miss.

    Args:
        keys: int64[M], distinct, in the order in which they first appear among the request's keys.
        times: uint32[M], how often each key was missed: the ``misses`` of ``EmbeddingCache.replace``.
    """

    keys: NDArray[np.int64]
    times: NDArray[np.uint32]


class Missing:
    """The keys of all tables that a launch was the first to miss: a ``MissingKeys`` per table.

    Attributes:
        keys: int64[M], table after table.
        times: uint32[M].
        ends: where the keys of each table begin, and M.
        positions: how many keys of each table were missed, with duplicates.
        bags: how many bags of each table have a missing key.
    """

    def __init__(
        self,
        keys: NDArray[np.int64],
        times: NDArray[np.uint32],
        distinct: NDArray[np.uint32],
        positions: NDArray[np.uint32],
        bags: NDArray[np.uint32],
    ) -> None:
        """See the class; ``distinct`` is the number of keys of each table."""
        self.keys, self.times, self.positions, self.bags = keys, times, positions, bags
        self.ends: list[int] = [0, *accumulate(distinct.tolist())]

    def __len__(self) -> int:
        """Return T."""
        return len(self.bags)

    def __getitem__(self, table: int) -> MissingKeys:
        """Return the keys of a table, or raise IndexError, which ends a loop over the tables."""
        table = range(len(self))[table]
        part = slice(self.ends[table], self.ends[table + 1])
        return MissingKeys(self.keys[part], self.times[part])


class MissingSet:
    """The missing keys of a workspace, hashed with a random seed; launches write their report into pinned memory.

    Attributes:
        absent: uint32[T], how many of the request's keys were absent, as far as ``read`` has seen.
    """

    def __init__(self, group: CacheGroup, max_keys: int, stream: Stream) -> None:
        """Take memory for N keys, and queue the kernel that sets it up."""
        device = group.device
        tables, words = len(group.tables), missing_words(max_keys)
        self.stream = stream
        self._nothing = Missing(np.empty(0, np.int64), np.empty(0, np.uint32), *np.zeros((3, tables), np.uint32))
        self._forget = group.kernel("forget")
        self._none_absent = np.zeros(tables, np.uint32)
        self.absent = self._none_absent
        self._report: NDArray[Any] = device.pinned(tables, MISSING_REPORT)
        self._keys: NDArray[np.int64] = device.pinned(max_keys, np.int64)
        self._times: NDArray[np.uint32] = device.pinned(max_keys, np.uint32)
        self.slots: Array = device.empty((2 * max_keys, MISSING_SLOT_BYTES), np.uint8)
        sizes = (max_keys, words, words, PROGRESS_WORDS, TEAM_WORDS, 3 * tables)
        on_device = [self.slots, *(device.zeros(size, np.uint32) for size in sizes)]
        on_host = [device.device_view(array) for array in (self._report.view(np.uint32), self._keys, self._times)]
        self._arrays = on_device, on_host  # kept alive: the descriptor has only their addresses
        self.descriptor: Array = device.empty(MISSING_SET_BYTES, np.uint8)
        seed = np.uint64(randbits(64))
        arguments = (self.descriptor, *on_device, *on_host, np.uint32(2 * max_keys), seed)
        describe = group.kernel("describe_missing")
        with group.readers.reading(stream):
            describe((_blocks(2 * max_keys),), (BLOCK_THREADS,), arguments, stream)

    def forget(self) -> None:
        """Queue a kernel that empties the set, if the last request left keys in it; its launches must have run."""
        used = int(self._report["used"][0])
        if used:
            self._forget((_blocks(used),), (BLOCK_THREADS,), (self.descriptor,), self.stream)
            self._report["used"][0] = 0

    def begin(self) -> None:
        """Begin a request."""
        self.forget()
        self.absent = self._none_absent

    def settle(self) -> None:
        """Mark all reported bags as complete until a later launch reports them again; all launches must have run."""
        self._report["bags"] = 0

    def read(self) -> Missing:
        """Return the missing keys of the last launch; the launch must have run."""
        report = self._report
        if np.count_nonzero(report["absent"]):
            self.absent = self.absent + report["absent"]
            report["absent"] = 0  # another call must not count them again
        bags = report["bags"].copy()
        if not np.count_nonzero(bags):
            return self._nothing
        distinct = report["distinct"].copy()
        count = int(distinct.sum())
        return Missing(self._keys[:count].copy(), self._times[:count].copy(), distinct, report["keys"].copy(), bags)


class Staging:
    """The fetched rows of a request, round after round, in the order of each round's missing keys.

    The memory has the rows, then the place of each row, then a head of TableBags[T]. Each round writes the places and
    the head again behind its rows, so that its upload is one copy. The memory grows as needed.
    """

    def __init__(self, device: Device) -> None:
        """Start without rows and without memory."""
        self._device = device
        self._host: NDArray[np.uint8] = device.pinned(0, np.uint8)
        self._on_device: Array = device.empty(0, np.uint8)
        self.counts: list[int] = []  # the number of rows of each round and table
        self._places = np.empty(0, dtype=np.int32)  # of all rounds' rows
        self._rows_end = 0

    def begin(self) -> None:
        """Forget all rows, before the next request."""
        self.counts = []
        self._places = self._places[:0]
        self._rows_end = 0

    @property
    def on_device(self) -> tuple[Array, Array]:
        """The rows of all rounds, and the place of each row in units of 16 bytes."""
        return self._on_device, self._on_device[self._rows_end :]

    def upload(
        self, rows: Sequence[NDArray[np.float32]], head: NDArray[np.void], stream: Stream
    ) -> tuple[Array, Array, Array]:
        """Add a round's rows float32[M, D] by table, and queue the upload; the round before must have been uploaded.

        Returns:
            on the device: the rows of all rounds, the place of each row in units of 16 bytes, and the head.
        """
        sizes, earlier = [len(of_table) for of_table in rows], self._places.size
        rows_bytes = sum([size * aligned(4 * of_table.shape[1]) for size, of_table in zip(sizes, rows, strict=True)])
        places_at, count = self._rows_end + rows_bytes, earlier + sum(sizes)
        head_at = aligned(places_at + 4 * count)
        end = head_at + head.nbytes
        host, on_device, begin = self._host, self._on_device, self._rows_end
        if end > host.size:
            host = self._device.pinned(aligned(2 * end, 256), np.uint8)
            host[:begin] = self._host[:begin]
            on_device, begin = self._device.empty(host.size, np.uint8), 0
        places = host[places_at : places_at + 4 * count].view(np.int32)
        places[:earlier] = self._places
        pack_rows(host, self._rows_end, [np.ascontiguousarray(of_table) for of_table in rows], places[earlier:])
        host[head_at:end] = head.view(np.uint8)
        self._device.upload(host[begin:end], on_device[begin:end], stream)
        # Only now: without memory, the caller may try again.
        self._host, self._on_device, self._rows_end = host, on_device, places_at
        self._places = places.copy()
        self.counts += sizes
        return on_device, on_device[places_at:head_at], on_device[head_at:end]


class Insertion:
    """Inserts the staged rows of a request into the caches of all tables: two launches, and nothing waits."""

    def __init__(self, group: CacheGroup, max_keys: int) -> None:
        """Take memory for N keys."""
        device, caches = group.device, group.caches
        self._group = group
        self._claim, self._fill = group.kernel("claim_missing"), group.kernel("fill_staged")
        self._tile_lanes, self._has_marks = caches[0].layout.tile_lanes, caches[0].layout.has_marks
        caps = [(cache.capacity.insertion_cap, cache.capacity.absent_cap) for cache in caches]
        self._caps = np.array(caps, dtype=np.uint64)
        # A launch must not insert a key twice into one cache.
        self._is_first = np.array([cache not in caches[:t] for t, cache in enumerate(caches)])
        # The limits of all tables, then the misses, so that their upload is one copy.
        self._misses_at = self._caps.nbytes
        self._host: NDArray[np.uint8] = device.pinned(self._misses_at + 4 * max_keys, np.uint8)
        self._on_device: Array = device.empty(self._host.size, np.uint8)
        self._rows: Array = device.empty(max_keys, np.int64)
        self._uploaded: Event | None = None

    def queue(self, misses: NDArray[np.uint32], missing: MissingSet, staging: Staging, head: Array) -> None:
        """Queue the insertion on the stream of the set; see ``Workspace.insert``."""
        group, stream, count = self._group, missing.stream, np.uint32(misses.size)
        limits, on_device = self._upload(misses, staging.counts, stream)
        tables = group.descriptors, head, np.uint32(len(group.caches)), missing.descriptor, count
        blocks = (-(-misses.size * self._tile_lanes // BLOCK_THREADS),)
        readers = group.readers
        with readers.writers.turn(stream):
            salt = readers.writers.draw_salt()
            self._claim(blocks, (BLOCK_THREADS,), (*tables, on_device, limits, salt, self._rows), stream)
            for read in readers.hiding(stream):
                stream.wait(read)
            self._fill(blocks, (BLOCK_THREADS,), (*tables, *staging.on_device, self._rows), stream)

    def _upload(self, misses: NDArray[np.uint32], counts: list[int], stream: Stream) -> tuple[Array, Array]:
        """Queue the upload of the limits and the misses, and return both on the device."""
        tables = len(self._caps)
        table_of = np.repeat(np.arange(len(counts)) % tables, counts)
        if not self._is_first.all():
            misses = np.where(self._is_first[table_of], misses, np.uint32(0))
        kinds = 2 * table_of + (misses >= ABSENT)  # rows, or absent keys
        new_keys = np.bincount(kinds[misses != 0], minlength=2 * tables).astype(np.uint64)
        if self._uploaded is not None:
            self._uploaded.synchronize()  # of the request before, which has ended
        begin, end = self._misses_at, self._misses_at + misses.nbytes
        limits = admission_limits(self._caps.reshape(-1), new_keys, has_marks=self._has_marks)
        self._host[:begin].view(np.uint64)[:] = limits
        self._host[begin:end].view(np.uint32)[:] = misses
        self._group.device.upload(self._host[:end], self._on_device[:end], stream)
        self._uploaded = stream.record()
        return self._on_device[:begin], self._on_device[begin:end]


def _blocks(values: int) -> int:
    return min(-(-values // BLOCK_THREADS), _MOST_BLOCKS)
