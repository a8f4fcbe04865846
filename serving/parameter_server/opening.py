"""The stores of a ``ps.json``, fastest first."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from pydantic import SecretStr

from kernels.host import set_lookup_threads
from serving.config import (
    HashMapConfig,
    ModelConfig,
    ParameterServerConfig,
    PersistentDbConfig,
    RedisConfig,
    SharedMemoryConfig,
    SnapshotConfig,
    UpdateSourceConfig,
    VolatileDbConfig,
)
from serving.errors import StoreError
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.tier_table import TierSettings
from serving.parameter_server.updates import UpdateStream
from serving.parameter_server.updates.rejected import RejectedMessages
from serving.storage import MemoryStore, RedisStore, RocksDbStore, SharedMemoryStore, SnapshotStore
from serving.storage.hps_layout import tag
from serving.storage.store import Store
from serving.stream import UpdateSource
from serving.stream.folder import FolderSource
from serving.stream.kafka import KafkaSource
from serving.stream.redis_stream import RedisAddress, RedisStreamSource

logger = logging.getLogger(__name__)

_STORE_NAMES = {
    "hash_map": "memory",
    "multi_process_hash_map": "shared_memory",
    "redis_cluster": "redis",
    "snapshot": "snapshot",
}


def open_stores(config: ParameterServerConfig, *, may_be_late: bool = False) -> list[Store]:
    """Open every tier that is not disabled, and set ``lookup_threads`` for the process.

    Args:
        config: the tiers.
        may_be_late: a cache may be unreachable now.

    Raises:
        MissingExtraError: a tier needs a package that is not installed.
        StoreError: a tier cannot be opened; the stores that were opened are closed again.
    """
    stores: list[Store] = []
    persistent = config.persistent_db
    for line in warnings_of(config):
        logger.warning("%s", line)
    slower = len(config.volatile_tiers) + (persistent.type != "disabled")
    with ExitStack() as opened:
        for tier in config.volatile_tiers:
            slower -= 1
            is_backed = slower > 0
            ratio = config.headroom_ratio
            if isinstance(tier, SnapshotConfig) and config.update_source.type != "disabled":
                ratio += 1  # of an overlay, which holds every row that changes
            store = _volatile(tier, ratio, is_backed=is_backed, may_be_late=may_be_late and is_backed)
            stores.append(opened.enter_context(closing(store)))
        if persistent.type == "rocks_db" and persistent.path is not None:
            stores.append(_rocksdb(persistent, persistent.path))
        opened.pop_all()
    return stores


def warnings_of(config: ParameterServerConfig) -> list[str]:
    """Surprising effects of a valid configuration, for the operator."""
    lines = list(config.keys_without_effect)
    follows = config.persistent_db.catch_up_interval_ms is not None and config.update_source.type == "disabled"
    if follows and config.volatile_db.type in ("hash_map", "multi_process_hash_map"):
        lines.append(
            "persistent_db.catch_up_interval_ms: rows in RAM stay as they were loaded, whatever the other "
            "process writes; only rows that are read from the database are up to date. To see every change, set "
            "volatile_db to disabled"
        )
    return lines


def asked_tiers(config: ParameterServerConfig) -> ParameterServerConfig:
    """Return the tiers that this process asks.

    A process that follows updates, and reads a database that another process writes, does not ask the caches that the
    other process writes, too: they may not have a change yet that this process has shown already.
    """
    if config.update_source.type == "disabled" or not config.persistent_db.read_only:
        return config
    own = tuple(tier for tier in config.volatile_tiers if not isinstance(tier, RedisConfig | SharedMemoryConfig))
    for tier in config.volatile_tiers:
        if tier not in own:
            logger.info("%s is not asked: the process that writes it may be behind the updates", tier.type)
    return config.model_copy(update={"volatile_tiers": own})


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Name the key of the ``ps.json`` in a StoreError."""
    try:
        yield
    except StoreError as err:
        raise type(err)(err.store, err.table, f"{key}: {err.reason}") from err


def tier_settings(config: ParameterServerConfig) -> dict[str, TierSettings]:
    """The settings of each tier except its store's; a Redis client keeps its time budget itself."""
    persistent = config.persistent_db
    settings = {}
    for tier in config.volatile_tiers:
        settings[_STORE_NAMES[tier.type]] = TierSettings(
            fills_at_start=tier.initialize_after_startup,
            first_rows=FirstRows(tier.initial_cache_rate, tier.hot_keys if isinstance(tier, HashMapConfig) else None),
            takes_copies=tier.cache_missed_embeddings,
        )
    if persistent.type != "disabled":
        settings["rocksdb"] = TierSettings(persistent.timeout_ms, persistent.initialize_after_startup)
    return settings


def _volatile(config: VolatileDbConfig, headroom_ratio: float, *, is_backed: bool, may_be_late: bool) -> Store:
    """Open a tier that is not disabled; ``is_backed``: there is a slower tier."""
    if isinstance(config, RedisConfig):
        return RedisStore(config, may_be_late=may_be_late)
    if config.lookup_threads is not None:
        set_lookup_threads(config.lookup_threads)
    if isinstance(config, SharedMemoryConfig):
        return SharedMemoryStore(config.name, config.size_bytes, config.auto_remove, headroom_ratio=headroom_ratio)
    if isinstance(config, SnapshotConfig):
        return SnapshotStore(config.path, config.overlay_capacity_rows, config.warm_up, headroom_ratio)
    return MemoryStore(
        config.capacity_rows,
        config.capacity_bytes,
        config.capacity_rows_per_table,
        capacity_rows_of_each_table=config.capacity_rows_of_each_table,
        overflow_policy=config.overflow_policy,
        overflow_resolution_target=config.overflow_resolution_target,
        is_backed=is_backed,
        headroom_ratio=headroom_ratio,
    )


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


def open_updates(config: ParameterServerConfig) -> UpdateStream | None:
    """The ``update_source``; None without one. Nothing is contacted yet.

    Raises:
        ConfigError: librdkafka refuses a setting.
        MissingExtraError: the client's package is not installed.
        OutputError: the file of rejected messages cannot be written.
    """
    source = config.update_source
    if source.type == "disabled":
        return None
    _source(source, "", ()).close()
    truth = config.persistent_db if config.persistent_db.type != "disabled" else config.volatile_tiers[-1]
    rejected = None if source.rejected_file is None else RejectedMessages(source.rejected_file)
    poll_s = source.poll_timeout_ms / 1000

    def opened(model: ModelConfig) -> UpdateSource:
        return _source(source, model.name, list(map(model.hps_name, model.tables)))

    return UpdateStream(opened, truth.update_filters, poll_s, source.max_staleness_s, rejected)


def _source(config: UpdateSourceConfig, model: str, tables: Sequence[str]) -> UpdateSource:
    """Open the log of a model, whose tables have these names. Kafka and Redis are not asked yet."""
    own, hps = f"hotrow.{model}", list(map(tag, tables))
    if config.path is not None:
        return FolderSource(config.path)
    if config.brokers is not None:
        settings = {
            "topic.metadata.refresh.interval.ms": str(config.metadata_refresh_interval_ms),
            "fetch.error.backoff.ms": str(config.failure_backoff_ms),
            "reconnect.backoff.ms": str(config.failure_backoff_ms),
            **{name: _setting(value) for name, value in config.kafka.items()},
        }
        refresh_s = config.metadata_refresh_interval_ms / 1000
        secrets = [name for name, value in config.kafka.items() if isinstance(value, SecretStr)]
        return KafkaSource(config.brokers, [own, *hps], settings, refresh_s=refresh_s, secrets=secrets)
    (host, port), tls = (config.address or ())[0], config.tls
    files = {} if tls is None else {
        "ssl_ca_certs": tls.ca_certificate, "ssl_certfile": tls.client_certificate, "ssl_keyfile": tls.client_key,
    }  # fmt: skip
    settings = {"username": config.user_name, "password": config.password.get_secret_value()}
    settings |= {name: str(file) for name, file in files.items() if file is not None}
    given = {name: value for name, value in settings.items() if value}
    return RedisStreamSource(RedisAddress(host, port, 0, tls is not None and tls.enabled, given), [own])


def _setting(value: str | float | SecretStr) -> str:
    """A setting as librdkafka spells it."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value).lower() if isinstance(value, bool) else str(value)
