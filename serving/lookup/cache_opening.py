"""Opens a model's caches on one device, and the workspaces that query all of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from gpu_cache.cache_group import CacheGroup
from gpu_cache.readers import Readers
from kernels.device import Device
from serving.config import ModelConfig
from serving.errors import DeviceMemoryError
from serving.lookup.cache_plan import PlannedCache, first_max_keys
from serving.lookup.device_health import DeviceHealth
from serving.lookup.device_workspace import DeviceWorkspace
from serving.lookup.table_cache import TableCache
from serving.lookup.workspaces import Workspaces
from serving.parameter_server import ParameterServer


def open_caches(
    server: ParameterServer,
    config: ModelConfig,
    plans: Sequence[PlannedCache],
    device: Device,
    health: DeviceHealth,
    opened: ExitStack,
) -> tuple[TableCache, ...]:
    """Allocate a cache per table; ``opened`` frees the caches."""
    readers = Readers()
    caches = []
    for plan in plans:
        cache = TableCache(server, config.full_name(plan.table), plan, device, readers, health)
        caches.append(opened.enter_context(closing(cache)))
    return tuple(caches)


def open_workspaces(
    config: ModelConfig, caches: Sequence[TableCache], opened: ExitStack
) -> Workspaces[DeviceWorkspace]:
    """Return a pool that makes each workspace when it is first needed; ``opened`` drops them."""
    group = CacheGroup(
        [cache.cache for cache in caches],
        [table.slots for table in config.tables],
        [table.combiner for table in config.tables],
        [table.default_value for table in config.tables],
    )

    def make(max_keys: int) -> DeviceWorkspace:
        with within_memory(config, group.device, max_keys):
            return DeviceWorkspace(group, config.max_batchsize, max_keys, config.dense_dim)

    return opened.enter_context(closing(Workspaces(make, config.gpu_cache.worker_buffers, first_max_keys(config))))


@contextmanager
def within_memory(config: ModelConfig, device: Device, keys: int) -> Iterator[None]:
    """Turn a MemoryError in this block into a DeviceMemoryError that names the model and the request's size."""
    try:
        yield
    except MemoryError as err:
        reason = f"no memory for requests of {keys:,} keys to model {config.name!r}: {err}"
        raise DeviceMemoryError(device.name, reason) from err
