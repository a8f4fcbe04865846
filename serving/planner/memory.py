"""The size of rows in each tier, by formula, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_cache.layout import Capacity, Kind, Layout
from kernels.host import HostTable, OverflowPolicy, RowDtype
from serving.config import ModelConfig
from serving.lookup.cache_plan import cache_layout
from serving.parameter_server.table_files import memory_needed, open_table_file

_FLOAT_BYTES = 4

# RocksDB's block-based format, as the store writes it: uncompressed 4 KiB blocks, 10 bits of Bloom filter per key.
_DISK_ROW_BYTES = 11  # sequence number, lengths, restart points and filter, minus the bytes that adjacent keys share
_DISK_BLOCK_BYTES = 4096
_DISK_BLOCK_EXTRA_BYTES = 40  # checksum, overhang of the last row, entry in the index


@dataclass(frozen=True, slots=True)
class TableSize:
    """The memory that one table with all of its rows takes in each tier.

    Attributes:
        name: full name.
        rows: V.
        dim: D.
        ram_bytes: in a memory tier without a budget, including headroom.
        gpu_bytes: in a GPU cache with room for every row.
        disk_bytes: in RocksDB, an estimate.
    """

    name: str
    rows: int
    dim: int
    ram_bytes: int
    gpu_bytes: int
    disk_bytes: int


def ram_bytes(dim: int, rows: int, row_dtype: RowDtype = "fp32", overflow_policy: OverflowPolicy | None = None) -> int:
    """Return the exact RAM of a host table for ``rows`` rows, including spare rows, index and stamps; 0 for no rows."""
    return HostTable.memory_bytes(dim, rows, row_dtype, overflow_policy) if rows else 0


def gpu_bytes(layout: Layout, kind: Kind, rows: int) -> int:
    """Return the exact GPU memory of a cache for ``rows`` rows. Every cache has room for at least one row."""
    return Capacity.of_rows(layout, kind, max(rows, 1)).device_bytes


def disk_bytes(dim: int, rows: int, key_bytes: int) -> int:
    """Estimate the size of a table in RocksDB after loading and compaction.

    A row takes its key (8 bytes, 4 for uint32 models), ``4 * D`` bytes and 11 more. A block of 4 KiB takes 40 more.
    These numbers were measured with rows of 1 to 2,000 floats. While a table of more than 256 MiB is loaded, it takes
    twice its size.
    """
    row_bytes = key_bytes + dim * _FLOAT_BYTES + _DISK_ROW_BYTES
    return int(rows * row_bytes * (1 + _DISK_BLOCK_EXTRA_BYTES / max(_DISK_BLOCK_BYTES, row_bytes)))


def table_sizes(models: Sequence[ModelConfig]) -> list[TableSize]:
    """Return the sizes of every table of ``models``.

    Raises:
        ModelFileError: a file is missing or is not what the configuration says.
    """
    sizes = []
    for config in models:
        needed = memory_needed(config)
        key_bytes = 8 if config.key_type == "I64" else 4
        for table in config.tables:
            rows = open_table_file(config, table).rows
            sizes.append(
                TableSize(
                    name=config.hps_name(table),
                    rows=rows,
                    dim=table.dim,
                    ram_bytes=needed[table.name],
                    gpu_bytes=gpu_bytes(cache_layout(config, table), config.gpu_cache.kind, rows),
                    disk_bytes=disk_bytes(table.dim, rows, key_bytes),
                )
            )
    return sizes
