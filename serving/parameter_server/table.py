"""What the parameter server knows of a table that it serves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from kernels.host import RowDtype
from serving.config import ModelConfig
from serving.model.sparse_rows import KeyType
from serving.parameter_server.counters import RequestCounts, TableCounters, TableCounting
from serving.parameter_server.health import ModelHealth
from serving.parameter_server.version_clock import ModelVersions, VersionClock


@dataclass(slots=True, eq=False)
class ServedTable:
    """One table of a loaded model; another load of the same model makes another record.

    Attributes:
        name: full name.
        dim: D.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        row_dtype: the row type to which every answer's rows are rounded.
        default_value: every float of an unknown key's vector.
        counting: the table's counters.
        health: the outages of the table's model.
        clock: the order of the table's writes.
        is_written: this process has changed rows of the table; guarded by the clock's lock.
        is_uncertain: the truth failed in the middle of a change, so caches may differ from it; guarded likewise.
        removed_keys: keys that were removed since the load, while a cache has not been filled yet; None: none waits.
    """

    name: str
    dim: int
    key_type: KeyType
    row_dtype: RowDtype
    default_value: float
    counting: TableCounting
    health: ModelHealth
    clock: VersionClock = field(default_factory=VersionClock)
    is_written: bool = False
    is_uncertain: bool = False
    removed_keys: set[int] | None = None

    def read_counters(self) -> TableCounters:
        """The table's counts, and whether each tier answers now."""
        counters = self.counting.read()
        for depth, tier in enumerate(counters.tiers):
            tier.is_up = self.health.is_up(depth, self.name)
        return counters

    @classmethod
    def all_of(cls, config: ModelConfig, tiers: Sequence[str]) -> list[Self]:
        """The tables of a model, in graph order, in tiers of these names, fastest first."""
        version = f" version {config.version}" if config.table_tag else ""
        health = ModelHealth(f"{config.name!r}{version}", tiers, config.gpu_cache.mode == "asynchronous")
        versions, requests = ModelVersions(), RequestCounts(len(config.tables))
        return [
            cls(
                config.full_name(table),
                table.dim,
                config.key_type,
                table.row_dtype,
                table.default_value,
                TableCounting(config.name, config.version, table.name, tiers, requests, place),
                health,
                VersionClock(versions),
            )
            for place, table in enumerate(config.tables)
        ]
