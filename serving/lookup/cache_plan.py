"""Plans the sizes of a model's caches on each of its devices, before any memory is allocated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_cache.bag_layout import BagRows, most_floats, workspace_bytes, workspace_host_bytes
from gpu_cache.layout import Capacity, Layout, RowDtype
from kernels.device import Device
from kernels.system_memory import available_memory_bytes
from serving.config import ModelConfig, TableConfig
from serving.errors import ConfigError, DeviceMemoryError
from serving.parameter_server.table_files import open_table_file

# Workspaces start with room for at most this many keys. A request with more keys gets a larger workspace.
_MOST_FIRST_KEYS = 1 << 18
# Single-key lookups answer this many keys at a time, and every workspace has room for that many rows of any table. A
# smaller number costs launches and waits. A larger number costs memory that only single-key lookups need.
SINGLE_KEYS = 1 << 13
ERASED_AT_ONCE = 1 << 12  # keys; each cache has room for them on the device and in page-locked memory


class Memory(NamedTuple):
    """Memory in use, in bytes: on the device, and page-locked on the host."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """One table's cache, and the number of rows in the table's model file."""

    table: TableConfig
    table_rows: int
    capacity: Capacity

    def __str__(self) -> str:
        """One line for an operator."""
        size, layout = self.capacity, self.capacity.layout
        where = f"{size.device_bytes / 2**20:,.1f} MiB"
        if size.host_bytes:
            where += f" and {size.host_bytes / 2**20:,.1f} MiB page-locked"
        form = f"{layout.row_dtype}, 32-bit keys" if layout.key_type == "U32" else layout.row_dtype
        return f"{self.table.name} {size.kind} {size.rows:,} of {self.table_rows:,} rows {form}, {where}"


def plan_caches(config: ModelConfig) -> tuple[PlannedCache, ...]:
    """Plan the caches of a model, one per table, in graph order; raise ConfigError if they would have no row."""
    settings = config.gpu_cache
    if settings.kind != "static" and not settings.size_ratio:
        reason = "gpucacheper (cache_size_percentage) 0: a cache has at least one row; set gpucache to false instead"
        raise ConfigError(config.source, "", reason)
    return tuple(_planned(config, table) for table in config.tables)


def _planned(config: ModelConfig, table: TableConfig) -> PlannedCache:
    settings, rows = config.gpu_cache, open_table_file(config, table).rows
    ratio = 1.0 if settings.kind == "static" else settings.size_ratio
    return PlannedCache(table, rows, Capacity.of_ratio(cache_layout(config, table), settings.kind, max(rows, 1), ratio))


def cache_layout(config: ModelConfig, table: TableConfig) -> Layout:
    """Return the form of the lines and rows of a table's cache."""
    settings = config.gpu_cache
    return Layout(table.dim, _row_dtype(config, table), "U32" if settings.key_bits == 32 else "I64", settings.line_keys)


def _row_dtype(config: ModelConfig, table: TableConfig) -> RowDtype:
    """Return the cache's row dtype: the table's own, except that rows of int8 and uint8 are cached as float32.

    Rows arrive rounded to the table's dtype. Rounding a row again gives the same bits, except in int8 and uint8, where
    the last bit of the scale may differ.
    """
    if config.gpu_cache.fp8_rows:
        return "fp8"
    return table.row_dtype if table.row_dtype in ("fp16", "bf16") else "fp32"


def describe_caches(model: str, plans: Sequence[PlannedCache], devices: Sequence[Device]) -> Iterator[str]:
    """Lines for an operator, before the memory is taken."""
    needed_bytes = sum(plan.capacity.device_bytes for plan in plans)
    tables = "; ".join(str(plan) for plan in plans)
    for device in devices:
        free_bytes, _ = device.memory()
        free = f"{needed_bytes / 2**20:,.1f} MiB of {free_bytes / 2**20:,.1f} MiB free"
        yield f"model {model}: caches on {device.name} take {free}: {tables}"


def idle_refresh(config: ModelConfig) -> str:
    """Return a warning if the refresh times have no effect, otherwise an empty string."""
    settings = config.gpu_cache
    if (
        settings.wanted is False
        or settings.refresh_ratio
        or not (settings.refresh_delay_s or settings.refresh_interval_s)
    ):
        return ""
    return (
        f"model {config.name!r}: refresh_delay and refresh_interval have no effect without a "
        "cache_refresh_percentage_per_iteration"
    )


def keys_left_out(config: ModelConfig) -> str:
    """Return a warning if full-size caches of the asynchronous mode drop keys, otherwise an empty string.

    A hash spreads keys over lines. If a cache has as many places as keys, some lines get more keys than they hold.
    """
    settings = config.gpu_cache
    if settings.wanted is False or settings.kind == "static" or settings.mode == "exact" or settings.size_ratio < 1:
        return ""
    return (
        f"model {config.name!r}: gpucacheper 1 does not hold whole tables: about 10 % of a table's keys find their "
        "lines full, and embedding_cache_mode asynchronous answers them with defaults; the type static holds all rows"
    )


def first_max_keys(config: ModelConfig) -> int:
    """Return how many keys, over all tables, a model's workspaces have room for at first."""
    per_sample = sum(table.max_keys_per_sample or table.positions for table in config.tables)
    return max(min(config.max_batchsize * per_sample, _MOST_FIRST_KEYS), SINGLE_KEYS)


def caches_memory(plans: Sequence[PlannedCache]) -> Memory:
    """Return the memory of a model's caches on one device."""
    capacities = [plan.capacity for plan in plans]
    return Memory(sum(size.device_bytes for size in capacities), sum(size.host_bytes for size in capacities))


def buffers_memory(config: ModelConfig) -> Memory:
    """Return the memory of a model's worker buffers on one device, with their download buffers and erasure buffers."""
    samples, buffers = config.max_batchsize, config.gpu_cache.worker_buffers
    bags = [BagRows(table.positions, table.combiner) for table in config.tables]
    dims = [table.dim for table in config.tables]
    largest = samples, first_max_keys(config), config.dense_width
    device_bytes = workspace_bytes(bags, dims, *largest, SINGLE_KEYS)
    answer_bytes = 4 * (most_floats(bags, dims, samples, SINGLE_KEYS) + samples * config.label_dim)
    host_bytes = workspace_host_bytes(bags, *largest) + answer_bytes
    erased_bytes = 8 * ERASED_AT_ONCE * len(config.tables)
    return Memory(buffers * device_bytes + erased_bytes, buffers * host_bytes + erased_bytes)


def check_memory(config: ModelConfig, plans: Sequence[PlannedCache], device: Device) -> None:
    """Raise DeviceMemoryError if a model's caches and worker buffers do not fit into the device's or host's memory."""
    caches, buffers = caches_memory(plans), buffers_memory(config)
    free_bytes, _ = device.memory()
    if device.uses_host_memory:
        _require_room(config, device, (sum(caches), sum(buffers)), free_bytes, "")
        return
    _require_room(config, device, (caches.device_bytes, buffers.device_bytes), free_bytes, "")
    host_free_bytes = available_memory_bytes()
    if host_free_bytes:  # 0 if the system does not report it
        needed = caches.host_bytes, buffers.host_bytes
        _require_room(config, device, needed, host_free_bytes, " of page-locked host memory")


def _require_room(config: ModelConfig, device: Device, needed: tuple[int, int], free_bytes: int, where: str) -> None:
    """Raise DeviceMemoryError if ``needed``, the bytes of caches and of worker buffers, exceeds ``free_bytes``."""
    settings, (caches_bytes, buffers_bytes) = config.gpu_cache, needed
    needed_bytes = caches_bytes + buffers_bytes
    if needed_bytes <= free_bytes:
        return
    advice = "set gpucacheper lower" if settings.kind != "static" else "the type dynamic can hold a part of the rows"
    if buffers_bytes > free_bytes:
        advice = "set max_batch_size lower"
    reason = (
        f"the {settings.kind} caches of model {config.name!r} take {needed_bytes:,} bytes{where}, {buffers_bytes:,} of "
        f"them for {settings.worker_buffers} worker buffers of max_batch_size {config.max_batchsize:,}, "
        f"but {free_bytes:,} are free; {advice}"
    )
    raise DeviceMemoryError(device.name, reason)
