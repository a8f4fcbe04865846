"""Whether the tiers of a ``ps.json`` would open and take its models, as far as it shows without loading anything."""

from collections.abc import Sequence

from kernels.errors import HotrowError
from serving.config import ModelConfig, ParameterServerConfig, VolatileDbConfig
from serving.errors import MissingExtraError, StoreError, about
from serving.parameter_server.loading import check_room, table_source
from serving.storage.memory_budget import MemoryBudget
from serving.storage.rocksdb_engine import check_database
from serving.storage.snapshot_folder import SnapshotFolder
from serving.storage.snapshot_store import require_snapshot
from serving.storage.store import TableSpec


def check_tiers(ps: ParameterServerConfig, faults: list[HotrowError]) -> None:
    """Find what ``ParameterServer`` would raise, in its words; takes no memory, makes no database, connects to nobody.

    Args:
        ps: the tiers, and the models in the order in which they would be loaded.
        faults: is added to: a StoreFullError of each model for which memory alone has too little room, a
            ModelFileError of each with a table's file that is missing or damaged; of the database a MissingExtraError
            or a StoreError where its folder cannot be made or, only to be read, has none; of snapshots a StoreError
            where their folder cannot be made, or none is given and a table needs it.
    """
    tier, disk = ps.volatile_db, ps.persistent_db
    if disk.type == "rocks_db" and disk.path is not None:
        try:
            check_database(disk.path, disk.read_only)
        except (MissingExtraError, StoreError) as err:
            faults.append(err)
    elif tier.type == "snapshot":
        _check_snapshots(tier, ps.models, faults)
    elif tier.type == "hash_map":
        budget = MemoryBudget(
            tier.capacity_rows,
            tier.capacity_bytes,
            tier.capacity_rows_per_table,
            tier.capacity_rows_of_each_table,
            tier.overflow_policy,
        )
        _check_memory(budget, ps.models, faults)
    elif tier.shared_memory is not None:
        _check_memory(MemoryBudget(capacity_bytes=tier.shared_memory.size_bytes), ps.models, faults)


def _check_snapshots(tier: VolatileDbConfig, models: Sequence[ModelConfig], faults: list[HotrowError]) -> None:
    if tier.path is not None:
        try:
            SnapshotFolder(tier.path).check()
        except StoreError as err:
            faults.append(err)
        return
    for config in models:
        with about(config.name, faults):
            for table in config.tables:
                source = table_source(config, table)
                require_snapshot(source.spec, source.model)


def _check_memory(budget: MemoryBudget, models: Sequence[ModelConfig], faults: list[HotrowError]) -> None:
    held: list[tuple[TableSpec, int]] = []
    for config in models:
        with about(config.name, faults):
            sources = [table_source(config, table) for table in config.tables]
            for source in sources:
                held.append((source.spec, budget.room_for(source.spec, source.model.rows, held).rows))
            check_room("memory", {spec.name: rows for spec, rows in held}, sources)
