"""What rows take in each tier, by formula, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_cache.layout import Capacity, Kind, Layout
from kernels.host import HostTable, OverflowPolicy, RowDtype
from serving.config import ModelConfig
from serving.lookup.cache_plan import cache_layout
from serving.parameter_server.table_files import memory_needed, open_table_file

_FLOAT_BYTES = 4

# RocksDB's block-based format, as the store writes it: uncompressed 4 KiB blocks, 10 bits of Bloom filter per key.
_DISK_ROW_BYTES = 11  # sequence number, lengths, restart points and filter, less the bytes that neighbours' keys share
_DISK_BLOCK_BYTES = 4096
_DISK_BLOCK_EXTRA_BYTES = 40  # checksum, the last row's overhang, and the block's entry in the index


@dataclass(frozen=True, slots=True)
class TableSize:
    """What one table takes in each tier, with all of its rows.

    Attributes:
        name: full name.
        rows: V.
        dim: D.
        ram_bytes: in a memory tier without a budget, with the headroom that it gets there.
        gpu_bytes: of a GPU's memory, in a cache with room for every row.
        disk_bytes: in RocksDB, an estimate.
    """

    name: str
    rows: int
    dim: int
    ram_bytes: int
    gpu_bytes: int
    disk_bytes: int


def ram_bytes(dim: int, rows: int, row_dtype: RowDtype = "fp32", overflow_policy: OverflowPolicy | None = None) -> int:
    """RAM of a host table with room for ``rows`` rows: rows, spare rows, index and stamps, exact; 0 for no rows."""
    return HostTable.memory_bytes(dim, rows, row_dtype, overflow_policy) if rows else 0


def gpu_bytes(layout: Layout, kind: Kind, rows: int) -> int:
    """GPU memory of a cache with room for ``rows`` rows, exact; no cache has room for fewer than one."""
    return Capacity.of_rows(layout, kind, max(rows, 1)).device_bytes


def disk_bytes(dim: int, rows: int, key_bytes: int) -> int:
    """About what a table takes in RocksDB once it is loaded and compacted.

    Per row its key (8 bytes, 4 for uint32 models), ``4 * D`` bytes and 11 more, and 40 per block of 4 KiB, as measured
    on tables of 1 to 2,000 floats. A table of more than 256 MiB takes twice that while it is loaded.
    """
    row_bytes = key_bytes + dim * _FLOAT_BYTES + _DISK_ROW_BYTES
    return int(rows * row_bytes * (1 + _DISK_BLOCK_EXTRA_BYTES / max(_DISK_BLOCK_BYTES, row_bytes)))


def table_sizes(models: Sequence[ModelConfig]) -> list[TableSize]:
    """What every table of ``models`` takes.

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
                    name=config.full_name(table),
                    rows=rows,
                    dim=table.dim,
                    ram_bytes=needed[table.name],
                    gpu_bytes=gpu_bytes(cache_layout(config, table), config.gpu_cache.kind, rows),
                    disk_bytes=disk_bytes(table.dim, rows, key_bytes),
                )
            )
    return sizes
