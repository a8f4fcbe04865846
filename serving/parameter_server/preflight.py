"""Checks whether the tiers of a ``ps.json`` would open and take its models, without loading anything."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from kernels.errors import HotrowError
from serving.config import (
    HashMapConfig,
    ModelConfig,
    ParameterServerConfig,
    RedisConfig,
    SharedMemoryConfig,
    SnapshotConfig,
)
from serving.errors import ConfigError, MissingExtraError, StoreError, about
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.loading import check_room
from serving.parameter_server.opening import naming, warnings_of
from serving.parameter_server.table_files import TableSource, table_source
from serving.storage import RedisStore
from serving.storage.memory_budget import MemoryBudget, TableRows
from serving.storage.rocksdb.engine import check_database
from serving.storage.rocksdb.follower import verify_database
from serving.storage.shared import least_shared_bytes, shared_capacity
from serving.storage.snapshot.folder import SnapshotFolder
from serving.storage.snapshot.store import is_served_as_it_is, require_snapshot


def check_tiers(ps: ParameterServerConfig, faults: list[HotrowError], *, full: bool = False) -> list[str]:
    """Find what ``ParameterServer`` would raise, with the same messages, without taking memory or making a database.

    Args:
        ps: the tiers, and the models in the order in which they would be loaded.
        full: also read every row of the database, and every byte of snapshots that were made.
        faults: every fault is added: a package that is not installed, a file that is missing or damaged, a folder that
            cannot be created, a tier with too little room.

    Returns:
        the lines that ``ParameterServer`` would log as warnings.
    """
    _check_places(ps, faults, full)
    if _redis_tiers(ps) and (package := _missing_package()):
        faults.append(MissingExtraError(package, "redis", "a volatile_db of type redis_cluster"))
    return warnings_of(ps) + _check_room(ps, faults)


def _check_places(ps: ParameterServerConfig, faults: list[HotrowError], full: bool) -> None:
    tier, disk = ps.volatile_db, ps.persistent_db
    if disk.type == "rocks_db" and disk.path is not None:
        try:
            with naming("persistent_db.path"):
                check_database(disk.path, disk.read_only)
                if full:
                    verify_database(disk.path)
        except (MissingExtraError, StoreError) as err:
            faults.append(err)
    elif isinstance(tier, SnapshotConfig):
        _check_snapshots(tier, ps.models, faults, full)
    try:
        check_hot_keys(ps)
    except ConfigError as err:
        faults.append(err)


def connect_tiers(ps: ParameterServerConfig, faults: list[HotrowError]) -> list[str]:
    """Connect to Redis, and return one line for each tier that answers. A tier that does not answer is a fault."""
    lines = []
    for tier in _redis_tiers(ps) if _missing_package() is None else ():
        try:
            RedisStore(tier).close()
        except StoreError as err:
            faults.append(err)
        else:
            addresses = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in tier.addresses)
            lines.append(f"redis {', '.join(addresses)}: answers")
    return lines


def _redis_tiers(ps: ParameterServerConfig) -> list[RedisConfig]:
    return [tier for tier in ps.volatile_tiers if isinstance(tier, RedisConfig)]


def _missing_package() -> str | None:
    return next((package for package in ("redis", "hiredis") if find_spec(package) is None), None)


def check_hot_keys(ps: ParameterServerConfig) -> None:
    """Check the hot keys of every table before anything is loaded.

    Raises:
        ConfigError: the folder or a file cannot be read, or a file is no list of keys.
    """
    tier = ps.volatile_db
    first_rows = FirstRows(hot_keys=tier.hot_keys if isinstance(tier, HashMapConfig) else None)
    first_rows.check(config.hps_name(table) for config in ps.models for table in config.tables)


def _check_snapshots(
    tier: SnapshotConfig, models: Sequence[ModelConfig], faults: list[HotrowError], full: bool
) -> None:
    folder = SnapshotFolder(tier.path) if tier.path is not None else None
    if folder is not None:
        try:
            folder.check()
        except StoreError as err:
            faults.append(err)
            return
    for config in models:
        for table in config.tables:
            with about(config.name, faults):
                source = table_source(config, table)
                if folder is None:
                    require_snapshot(source.spec, source.model)
                elif not is_served_as_it_is(source.spec, source.model):
                    folder.check_made(source.spec, source.model, full=full)


def _check_room(ps: ParameterServerConfig, faults: list[HotrowError]) -> list[str]:
    """Find the models for which memory has too little room; return warnings about tables that get no room."""
    tier, is_alone = ps.volatile_db, len(ps.volatile_tiers) == 1 and ps.persistent_db.type == "disabled"
    if isinstance(tier, SharedMemoryConfig):
        sources = _sources(ps.models, faults)
        _check_shared_memory(ps.source, tier.size_bytes, ps.headroom_ratio, sources, faults)
    if not isinstance(tier, HashMapConfig):
        return []
    budget = MemoryBudget(
        tier.capacity_rows,
        tier.capacity_bytes,
        tier.capacity_rows_per_table,
        tier.capacity_rows_of_each_table,
        tier.overflow_policy,
    )
    sources = _sources(ps.models, faults)
    wanted = [(source.spec, source.model.rows) for tables in sources.values() for source in tables]
    rooms = {spec.name: room.rows for (spec, _), room in zip(wanted, budget.quotas(wanted, ()), strict=True)}
    if not is_alone:
        return [budget.no_room(table) for table, rows in rooms.items() if budget.shared and not rows]
    for model, tables in sources.items():
        with about(model, faults):
            check_room("memory", rooms, tables)
    return []


def _sources(models: Sequence[ModelConfig], faults: list[HotrowError]) -> dict[str, list[TableSource]]:
    """The tables by model, without models whose files are missing or damaged."""
    sources = {}
    for config in models:
        with about(config.name, faults):
            sources[config.name] = [table_source(config, table) for table in config.tables]
    return sources


def _check_shared_memory(
    config: str,
    size_bytes: int,
    headroom_ratio: float,
    sources: Mapping[str, list[TableSource]],
    faults: list[HotrowError],
) -> None:
    """Find the models that do not fit; tables are made in the order of loading, with all of their rows."""
    wanted: list[TableRows] = []
    given: list[TableRows] = []
    full: list[HotrowError] = []
    for model, tables in sources.items():
        wanted += [(source.spec, source.model.rows) for source in tables]
        with about(model, full):
            for source in tables:
                rows = shared_capacity(size_bytes, source.spec, source.model.rows, given, headroom_ratio)
                given.append((source.spec, rows))
    if full:
        reason = (
            f"expected at least {least_shared_bytes(wanted, headroom_ratio)}, which all tables need, got {size_bytes}"
        )
        faults += [*full, ConfigError(config, "volatile_db.shared_memory_size", reason)]
