"""How large the caches of a model are on each of its devices, known before any memory is taken."""

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

# Workspaces are made for requests of so many keys at most; one that comes with more gets a larger one.
_MOST_FIRST_KEYS = 1 << 18
# Keys that are looked up one by one are answered so many at a time: every workspace has room for their rows, of
# whichever tables. Fewer would cost more launches and waits, more memory that only such lookups need.
SINGLE_KEYS = 1 << 13
ERASED_AT_ONCE = 1 << 12  # keys, of which each table's cache has room on the device and in page-locked memory


class Memory(NamedTuple):
    """What something takes.

    Attributes:
        device_bytes: of a device's memory.
        host_bytes: of page-locked memory of the host.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """One table's cache.

    Attributes:
        table: the table.
        table_rows: rows of its model file.
        capacity: of the cache.
    """

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
    """The caches of a model, one per table, in graph order.

    Raises:
        ConfigError: ``gpucacheper`` leaves them no row.
        ModelFileError: a table's file is missing or is not such a model.
    """
    said = config.gpu_cache
    if said.kind != "static" and not said.size_ratio:
        reason = "gpucacheper (cache_size_percentage) 0: a cache has room for at least one row; ask for none instead"
        raise ConfigError(config.source, "", reason)
    return tuple(_planned(config, table) for table in config.tables)


def _planned(config: ModelConfig, table: TableConfig) -> PlannedCache:
    said, rows = config.gpu_cache, open_table_file(config, table).rows
    ratio = 1.0 if said.kind == "static" else said.size_ratio
    return PlannedCache(table, rows, Capacity.of_ratio(cache_layout(config, table), said.kind, max(rows, 1), ratio))


def cache_layout(config: ModelConfig, table: TableConfig) -> Layout:
    """The form of the lines and rows of a table's cache."""
    return Layout(table.dim, _row_dtype(config, table), "U32" if config.gpu_cache.key_bits == 32 else "I64")


def _row_dtype(config: ModelConfig, table: TableConfig) -> RowDtype:
    """The form of the cache's rows: the table's own where it gives the same bits back, as rows come rounded to it.

    Of int8 and uint8 the scale of a row that is rounded again may differ in its last bit: these are kept as float32.
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
    """What an operator is told of a clock that has no refresh to start; empty where all is well."""
    said = config.gpu_cache
    if said.wanted is False or said.refresh_ratio or not (said.refresh_delay_s or said.refresh_interval_s):
        return ""
    return (
        f"model {config.name!r}: refresh_delay and refresh_interval have no effect without a "
        "cache_refresh_percentage_per_iteration"
    )


def keys_left_out(config: ModelConfig) -> str:
    """What an operator is told of caches as large as their tables whose answers do not wait; empty where all is well.

    Keys are spread over lines by a hash. Where there are as many places as keys, some lines get more than they hold.
    """
    said = config.gpu_cache
    if said.wanted is False or said.kind == "static" or said.mode == "exact" or said.size_ratio < 1:
        return ""
    return (
        f"model {config.name!r}: gpucacheper 1 does not hold whole tables: some 10 % of a table's keys find their "
        "lines full, and embedding_cache_mode asynchronous answers these with defaults; the type static holds all rows"
    )


def first_max_keys(config: ModelConfig) -> int:
    """How many keys, over all tables, a model's workspaces are made for at first."""
    per_sample = sum(table.max_keys_per_sample or table.slots for table in config.tables)
    return max(min(config.max_batchsize * per_sample, _MOST_FIRST_KEYS), SINGLE_KEYS)


def caches_memory(plans: Sequence[PlannedCache]) -> Memory:
    """What the caches of a model take, on one device."""
    capacities = [plan.capacity for plan in plans]
    return Memory(sum(size.device_bytes for size in capacities), sum(size.host_bytes for size in capacities))


def buffers_memory(config: ModelConfig) -> Memory:
    """What a model's workspaces take, on one device: those of as many requests as there may be at a time, and erasures.

    What they are downloaded to is counted too: rows, and the probabilities of a network on the device.
    """
    samples, buffers = config.max_batchsize, config.gpu_cache.worker_buffers
    bags = [BagRows(table.slots, table.combiner) for table in config.tables]
    dims = [table.dim for table in config.tables]
    most = samples, first_max_keys(config), config.dense_dim
    device_bytes = workspace_bytes(bags, dims, *most, SINGLE_KEYS)
    answer_bytes = 4 * (most_floats(bags, dims, samples, SINGLE_KEYS) + samples * config.label_dim)
    host_bytes = workspace_host_bytes(bags, *most) + answer_bytes
    erased_bytes = 8 * ERASED_AT_ONCE * len(config.tables)
    return Memory(buffers * device_bytes + erased_bytes, buffers * host_bytes + erased_bytes)


def check_memory(config: ModelConfig, plans: Sequence[PlannedCache], device: Device) -> None:
    """Refuse caches that there is no room for on the device, or on the host, with the worker buffers of the model.

    Raises:
        DeviceMemoryError: there is less free memory than they take.
    """
    caches, buffers = caches_memory(plans), buffers_memory(config)
    free_bytes, _ = device.memory()
    if device.uses_host_memory:
        _require_room(config, device, (sum(caches), sum(buffers)), free_bytes, "")
        return
    _require_room(config, device, (caches.device_bytes, buffers.device_bytes), free_bytes, "")
    host_free_bytes = available_memory_bytes()
    if host_free_bytes:  # else the system does not say
        needed = caches.host_bytes, buffers.host_bytes
        _require_room(config, device, needed, host_free_bytes, " of page-locked host memory")


def _require_room(config: ModelConfig, device: Device, needed: tuple[int, int], free_bytes: int, where: str) -> None:
    """Raise DeviceMemoryError where caches and worker buffers, ``needed``, are more than there is."""
    said, (caches_bytes, buffers_bytes) = config.gpu_cache, needed
    needed_bytes = caches_bytes + buffers_bytes
    if needed_bytes <= free_bytes:
        return
    advice = "set gpucacheper lower" if said.kind != "static" else "the type dynamic holds a part of them"
    if buffers_bytes > free_bytes:
        advice = "set max_batch_size lower"
    reason = (
        f"the {said.kind} caches of model {config.name!r} take {needed_bytes:,} bytes{where}, {buffers_bytes:,} of "
        f"them for {said.worker_buffers} worker buffers of max_batch_size {config.max_batchsize:,}, "
        f"{free_bytes:,} are free; {advice}"
    )
    raise DeviceMemoryError(device.name, reason)
