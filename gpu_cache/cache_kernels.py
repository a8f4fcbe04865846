"""The kernels of a cache, compiled for the form of its lines and rows when they are first used."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_cache.layout import Layout
from kernels.device import Array, Device, Kernel, Stream

BLOCK_THREADS = 256
QUERY_TILE_KEYS = 4  # keys that a tile of query.cu has under way
GATHER_ROWS = 256  # rows of a block of gather.cu

# In which file a kernel is, and whether it touches rows: those that do not are the same for all forms of rows.
_FILES = {
    "describe": ("describe.cu", False),
    "query": ("query.cu", True),
    "claim": ("claim.cu", False),
    "claim_static": ("claim.cu", False),
    "claim_held": ("claim.cu", False),
    "fill": ("fill.cu", True),
    "erase": ("erase.cu", False),
    "list_keys": ("list_keys.cu", False),
    "gather": ("gather.cu", True),
}


class CacheKernels:
    """Launches, on one device, of kernels for tables of one layout. Any thread may use it."""

    def __init__(self, device: Device, layout: Layout) -> None:
        """Compile nothing yet."""
        self.device = device
        self._layout = layout
        self._kernels: dict[str, Kernel] = {}

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue a kernel with so many blocks."""
        kernel = self._kernels.get(name)
        if kernel is None:
            file, touches_rows = _FILES[name]
            defines = self._layout.defines() if touches_rows else self._layout.line_defines()
            kernel = self._kernels[name] = self.device.kernel(file, name, **defines)
        kernel((blocks,), (threads,), arguments, stream)

    def launch_tiles(self, name: str, tiles: int, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue a kernel that gives each of so many keys or lines a tile; there is at least one."""
        blocks = -(-tiles * self._layout.tile_lanes // BLOCK_THREADS)
        self.launch(name, blocks, BLOCK_THREADS, arguments, stream)

    def query(self, table: Array, keys: Array, arguments: tuple[Any, ...], stream: Stream) -> None:
        """Queue query.cu; ``arguments`` are those after the number of keys."""
        tiles = -(-keys.size // QUERY_TILE_KEYS)
        self.launch_tiles("query", tiles, (table, keys, np.uint32(keys.size), *arguments), stream)
