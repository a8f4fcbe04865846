"""The stores of a ``ps.json``, fastest first."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from kernels.host import set_lookup_threads
from serving.config import ParameterServerConfig, PersistentDbConfig, SharedMemoryConfig
from serving.errors import StoreError
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.tier import TierSettings
from serving.storage import MemoryStore, RedisStore, RocksDbStore, SharedMemoryStore, SnapshotStore
from serving.storage.store import Store

logger = logging.getLogger(__name__)

_STORE_NAMES = {
    "hash_map": "memory",
    "multi_process_hash_map": "shared_memory",
    "redis_cluster": "redis",
    "snapshot": "snapshot",
}


def open_stores(config: ParameterServerConfig) -> list[Store]:
    """Open every tier that is not disabled, and set ``lookup_threads``, which is the process's.

    Raises:
        MissingExtraError: a tier needs a package that is not installed.
        StoreError: a tier cannot be opened; those before it are closed again.
    """
    stores: list[Store] = []
    volatile, persistent = config.volatile_db, config.persistent_db
    for line in warnings_of(config):
        logger.warning("%s", line)
    with ExitStack() as opened:
        if volatile.lookup_threads is not None:
            set_lookup_threads(volatile.lookup_threads)
        if volatile.type == "hash_map":
            memory = MemoryStore(
                volatile.capacity_rows,
                volatile.capacity_bytes,
                volatile.capacity_rows_per_table,
                capacity_rows_of_each_table=volatile.capacity_rows_of_each_table,
                overflow_policy=volatile.overflow_policy,
                overflow_resolution_target=volatile.overflow_resolution_target,
                is_backed=persistent.type != "disabled",
            )
            stores.append(memory)
        if volatile.type == "snapshot":
            stores.append(SnapshotStore(volatile.path, volatile.overlay_capacity_rows, volatile.warm_up))
        if volatile.shared_memory is not None:
            stores.append(opened.enter_context(closing(_shared_memory(volatile.shared_memory))))
        if volatile.redis is not None:
            stores.append(opened.enter_context(closing(RedisStore(volatile.redis))))
        if persistent.type == "rocks_db" and persistent.path is not None:
            stores.append(_rocksdb(persistent, persistent.path))
        opened.pop_all()
    return stores


def warnings_of(config: ParameterServerConfig) -> list[str]:
    """What an operator may not expect of tiers that are right by themselves."""
    follows = config.persistent_db.catch_up_interval_ms is not None
    if follows and config.volatile_db.type in ("hash_map", "multi_process_hash_map"):
        return [
            "persistent_db.catch_up_interval_ms: rows that lie in RAM stay as they were loaded, whatever the other "
            "process writes; only those that are read from the database are caught up. To see every change, set "
            "volatile_db to disabled"
        ]
    return []


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Name the key of the ``ps.json`` in a StoreError of what it says."""
    try:
        yield
    except StoreError as err:
        raise StoreError(err.store, err.table, f"{key}: {err.reason}") from err


def tier_settings(config: ParameterServerConfig) -> dict[str, TierSettings]:
    """What ``config`` says of its tiers beside their stores; a Redis client keeps its time budget itself."""
    volatile, persistent = config.volatile_db, config.persistent_db
    settings = {}
    if volatile.type != "disabled":
        name, first = _STORE_NAMES[volatile.type], FirstRows(volatile.initial_cache_rate, volatile.hot_keys)
        settings[name] = TierSettings(is_initialized=volatile.initialize_after_startup, first_rows=first)
    if persistent.type != "disabled":
        settings["rocksdb"] = TierSettings(persistent.timeout_ms, persistent.initialize_after_startup)
    return settings


def _shared_memory(config: SharedMemoryConfig) -> SharedMemoryStore:
    return SharedMemoryStore(config.name, config.size_bytes, config.auto_remove)


def _rocksdb(config: PersistentDbConfig, path: Path) -> RocksDbStore:
    with naming("persistent_db.path"):
        return RocksDbStore(
            path,
            config.read_only,
            config.num_threads,
            config.max_batch_size,
            row_dtype=config.row_dtype,
            warm_up=config.warm_up,
            catch_up_interval_ms=config.catch_up_interval_ms,
        )
