"""Checks whether the tiers of a ``ps.json`` would open and take its models, without loading anything."""

from collections.abc import Mapping, Sequence

from kernels.errors import HotrowError
from serving.config import ModelConfig, ParameterServerConfig, VolatileDbConfig
from serving.errors import ConfigError, MissingExtraError, StoreError, about
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.loading import TableSource, check_room, table_source
from serving.parameter_server.opening import naming, warnings_of
from serving.storage.memory_budget import MemoryBudget, TableRows
from serving.storage.rocksdb.engine import check_database
from serving.storage.rocksdb.follower import verify_database
from serving.storage.shared import least_shared_bytes, shared_capacity
from serving.storage.snapshot.folder import SnapshotFolder
from serving.storage.snapshot.store import is_served_as_it_is, require_snapshot


def check_tiers(ps: ParameterServerConfig, faults: list[HotrowError], *, full: bool = False) -> list[str]:
    """Find the errors that ``ParameterServer`` would raise; takes no memory, makes no database, connects to nothing.

    Args:
        ps: the tiers, and the models in the order in which they would be loaded.
        faults: errors are appended. StoreFullError: memory is the only tier, or is shared, and has too little room for
            a model. ModelFileError: a table's file is missing or damaged. MissingExtraError: a package is not
            installed. StoreError: the database or the snapshots' folder is missing, cannot be made, or is damaged.
            ConfigError: hot keys cannot be read, or shared memory is too small; it says how much is needed.
        full: also read every row of the database, and every byte of the snapshots.

    Returns:
        The warnings that ``ParameterServer`` would log.
    """
    _check_places(ps, faults, full)
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
    elif tier.type == "snapshot":
        _check_snapshots(tier, ps.models, faults, full)
    try:
        check_hot_keys(ps)
    except ConfigError as err:
        faults.append(err)


def check_hot_keys(ps: ParameterServerConfig) -> None:
    """Check the hot keys of every table before anything is loaded.

    Raises:
        ConfigError: the folder or a file cannot be read, or a file is no list of keys.
    """
    first_rows = FirstRows(hot_keys=ps.volatile_db.hot_keys)
    first_rows.check(config.full_name(table) for config in ps.models for table in config.tables)


def _check_snapshots(
    tier: VolatileDbConfig, models: Sequence[ModelConfig], faults: list[HotrowError], full: bool
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
    if tier.shared_memory is not None:
        _check_shared_memory(ps.source, tier.shared_memory.size_bytes, _sources(ps.models, faults), faults)
    if tier.type != "hash_map":
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
    config: str, size_bytes: int, sources: Mapping[str, list[TableSource]], faults: list[HotrowError]
) -> None:
    """Find the models that do not fit; tables are made in the order of loading, with all of their rows."""
    wanted: list[TableRows] = []
    held: list[TableRows] = []
    full: list[HotrowError] = []
    for model, tables in sources.items():
        wanted += [(source.spec, source.model.rows) for source in tables]
        with about(model, full):
            for source in tables:
                held.append((source.spec, shared_capacity(size_bytes, source.spec, source.model.rows, held)))
    if full:
        reason = f"expected at least {least_shared_bytes(wanted)}, which all tables need, got {size_bytes}"
        faults += [*full, ConfigError(config, "volatile_db.shared_memory_size", reason)]
