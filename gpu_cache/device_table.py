"""A cache on its device: its lines, rows and counters, the kernels that work on them, and the order of its writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_cache.layout import COUNTERS, MOST_CHAIN_LINES, TABLE_BYTES, Capacity, Layout, admission_limits
from gpu_cache.readers import Readers
from kernels.device import Array, Device, Kernel, Stream

BLOCK_THREADS = 256
QUERY_TILE_KEYS = 4  # keys that a tile of query.cu works on at a time
GATHER_ROWS = 256  # rows of a block of gather.cu
_PART_BYTES = 64 << 20  # of rows that are read out at a time

# The file of each kernel, and whether it touches rows: other kernels are the same for all forms of rows.
_FILES = {
    "describe": ("describe.cu", False),
    "query": ("query.cu", True),
    "claim": ("claim.cu", False),
    "claim_static": ("claim.cu", False),
    "claim_held": ("claim.cu", False),
    "claim_absent": ("claim.cu", False),
    "fill": ("fill.cu", True),
    "erase": ("erase.cu", False),
    "list_keys": ("list_keys.cu", False),
    "gather": ("gather.cu", True),
}


class CacheKernels:
    """The kernels for tables of one layout on one device, each compiled when it is first launched."""

    def __init__(self, device: Device, layout: Layout) -> None:
        """Compile nothing yet."""
        self.device = device
        self._layout = layout
        self._kernels: dict[str, Kernel] = {}

    def compile(self, *names: str) -> None:
        """Compile kernels before a lock is taken, because nobody should wait for a compiler."""
        for name in names:
            if name not in self._kernels:
                file, touches_rows = _FILES[name]
                defines = self._layout.defines() if touches_rows else self._layout.line_defines()
                self._kernels[name] = self.device.kernel(file, name, **defines)

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue a kernel with this many blocks."""
        self.compile(name)
        self._kernels[name]((blocks,), (threads,), arguments, stream)

    def launch_tiles(self, name: str, tiles: int, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue a kernel that gives one tile to each key or line; there is at least one."""
        blocks = -(-tiles * self._layout.tile_lanes // BLOCK_THREADS)
        self.launch(name, blocks, BLOCK_THREADS, arguments, stream)

    def query(self, table: Array, keys: Array, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue query.cu; ``arguments`` follow the number of keys."""
        tiles = -(-keys.size // QUERY_TILE_KEYS)
        self.launch_tiles("query", tiles, (table, keys, np.uint32(keys.size), *arguments), stream)


class DeviceTable:
    """A cache's memory and the work that ``EmbeddingCache`` queues on it, with arguments that were checked.

    Attributes:
        slab: uint8[slots, stride], the rows.
        memory: what must not be freed before work that uses it has run.
    """

    def __init__(self, device: Device, capacity: Capacity, seed: int, readers: Readers, stream: Stream) -> None:
        """Take all memory and wait until it is ready."""
        self._capacity, self._seed, self._readers = capacity, seed, readers
        self._kernels = CacheKernels(device, capacity.layout)
        self._kernels.compile("erase")  # now, because changed rows must be erased even when no memory is left
        self._writers = readers.writers
        self._cap, self._absent_cap = (
            np.full(1, cap, np.uint64) for cap in (capacity.insertion_cap, capacity.absent_cap)
        )
        self._has_marks = capacity.layout.has_marks
        layout = capacity.layout
        slab_shape = (capacity.slots, layout.row_stride_bytes)
        self._lines: Array = device.empty((capacity.line_count, layout.line_keys + 1), layout.key_word)
        self._counters: Array = device.empty(len(COUNTERS), np.uint64)
        self._absent_lines: Array = device.empty((capacity.absent_line_count, *self._lines.shape[1:]), layout.key_word)
        tables = device.empty((2, TABLE_BYTES), np.uint8)
        self._table, self._absent_table = tables[:1], tables[1:]
        self.slab: Array = (
            device.device_view(device.pinned(slab_shape, np.uint8))
            if capacity.kind == "uvm"
            else device.empty(slab_shape, np.uint8)
        )
        self.memory: tuple[Array, ...] = (self._lines, self._absent_lines, self.slab, self._counters)
        with device.using(stream):
            for lines in (self._lines, self._absent_lines):
                lines.fill(layout.empty_key)
                lines[:, layout.line_keys] = layout.key_word(0)  # the meta word
            self._counters.fill(0)
        self.describe(self._table, 0, 0, 0.0, stream)
        self.describe(self._absent_table, 0, 0, 0.0, stream, of_absent_keys=True)
        stream.synchronize()

    def describe(
        self,
        tables: Array,
        index: int,
        form: int,
        default_value: float,
        stream: Stream,
        *,
        of_absent_keys: bool = False,
    ) -> None:
        """See ``EmbeddingCache.describe``; or describe the lines of absent keys as a table, to list its keys."""
        lines, capacity = self._absent_lines if of_absent_keys else self._lines, self._capacity
        chain_lines = MOST_CHAIN_LINES if capacity.kind == "static" else 1
        numbers = (len(lines), capacity.absent_line_count, form, chain_lines, self._seed)
        arrays = (tables, np.uint32(index), lines, self.slab, self._counters, self._absent_lines)
        arguments = (*arrays, *map(np.uint32, numbers), np.float32(default_value))
        self._kernels.launch("describe", 1, 1, arguments, stream)

    def query(self, keys: Array, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue a query; ``arguments`` follow the number of keys in query.cu."""
        self._kernels.compile("query")
        with self._readers.reading(stream):
            self._kernels.query(self._table, keys, arguments, stream)

    def replace_static(self, keys: Array, rows: Array, stream: Stream) -> tuple[int, int]:
        """Write new keys of a static table, wait, and return how many had no slot and how many rows there are."""
        device = self._kernels.device
        before, after = (device.pinned(self._counters.size, np.uint64) for _ in range(2))
        self._kernels.compile("claim_static", "fill")
        with self._writers.turn(stream):
            device.download(self._counters, before, stream)
            self._write("claim_static", (), keys, rows, stream)
            device.download(self._counters, after, stream)
            done = stream.record()
        done.synchronize()
        refused = COUNTERS.index("refused_without_slot")
        return int(after[refused] - before[refused]), int(after[COUNTERS.index("rows")])

    def replace(self, keys: Array, rows: Array, misses: Array | None, stream: Stream) -> None:
        """Queue the offer of new keys; ``misses`` uint32[N] says how often each was missed, None: once."""
        self._kernels.compile("claim", "fill")
        with self._writers.turn(stream):
            (limit,) = admission_limits(self._cap, np.full(1, keys.size, np.uint64), has_marks=self._has_marks)
            counts = keys if misses is None else misses
            options = counts, np.uint32(misses is not None), self._writers.draw_salt(), limit
            self._write("claim", options, keys, rows, stream)

    def update(self, keys: Array, rows: Array, stream: Stream) -> None:
        """Queue new rows for keys that are held."""
        self._kernels.compile("claim_held", "fill")
        with self._writers.turn(stream):
            self._write("claim_held", (), keys, rows, stream)

    def note_absent(self, keys: Array, stream: Stream) -> None:
        """Queue the noting of keys that no tier holds."""
        self._kernels.compile("claim_absent")
        with self._writers.turn(stream):
            count = np.full(1, keys.size, np.uint64)
            (limit,) = admission_limits(self._absent_cap, count, has_marks=self._has_marks)
            arguments = self._table, keys, np.uint32(keys.size), self._writers.draw_salt(), limit
            self._kernels.launch_tiles("claim_absent", keys.size, arguments, stream)

    def erase(self, keys: Array, stream: Stream) -> None:
        """Queue the freeing of slots; a launch that found their rows before may still read them."""
        self._kernels.compile("erase")
        with self._writers.turn(stream):
            self._kernels.launch_tiles("erase", keys.size, (self._table, keys, np.uint32(keys.size)), stream)
            self._readers.hiding(stream)

    def read_counters(self, stream: Stream) -> list[int]:
        """Wait for all writes queued so far, and return the values of ``COUNTERS``."""
        device = self._kernels.device
        on_host = device.pinned(self._counters.size, np.uint64)
        with self._writers.turn(stream):
            device.download(self._counters, on_host, stream)
            done = stream.record()
        done.synchronize()
        counted: list[int] = on_host.tolist()
        return counted

    def read_lines(
        self, with_rows: bool, stream: Stream, of_absent_keys: bool = False
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Yield the keys int64[N] of the next lines and their rows, float32[N, D] or float32[0, D], between writes."""
        device, layout = self._kernels.device, self._capacity.layout
        table, all_lines = (
            (self._absent_table, len(self._absent_lines)) if of_absent_keys else (self._table, len(self._lines))
        )
        most_lines = min(all_lines, max(1, _PART_BYTES // (4 * layout.dim * layout.line_keys)))
        slots = most_lines * layout.line_keys
        numbers, listed = device.empty(slots, np.int64), device.empty(1, np.uint32)
        keys, rows = device.empty(slots, np.int64), device.empty((slots if with_rows else 0, layout.dim), np.float32)
        host_listed, host_keys, host_rows = (device.pinned(array.shape, array.dtype) for array in (listed, keys, rows))
        self._kernels.compile("list_keys", *(["gather"] if with_rows else []))
        for first in range(0, all_lines, most_lines):
            lines = min(most_lines, all_lines - first)
            with self._writers.turn(stream):
                with device.using(stream):
                    listed.fill(0)
                arguments = (table, np.uint32(first), np.uint32(lines), keys, numbers, listed)
                self._kernels.launch_tiles("list_keys", lines, arguments, stream)
                device.download(listed, host_listed, stream)
                device.download(keys, host_keys, stream)
                if with_rows:
                    blocks = -(-slots // GATHER_ROWS)
                    gathered = (self._table, numbers, listed, rows)
                    self._kernels.launch("gather", blocks, BLOCK_THREADS, gathered, stream)
                    device.download(rows, host_rows, stream)
                done = stream.record()
            done.synchronize()
            yield host_keys[: host_listed[0]].copy(), host_rows[: host_listed[0]].copy()

    def _write(self, claim: str, options: tuple[Any, ...], keys: Array, rows: Array, stream: Stream) -> None:
        """Lock slots, let the stream wait for the queries queued until then, and fill the slots."""
        numbers = self._kernels.device.empty(keys.size, np.int64)
        count = np.uint32(keys.size)
        self._kernels.launch_tiles(claim, keys.size, (self._table, keys, count, numbers, *options), stream)
        for read in self._readers.hiding(stream):
            stream.wait(read)
        self._kernels.launch_tiles("fill", keys.size, (self._table, keys, count, numbers, rows), stream)
