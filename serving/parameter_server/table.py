"""What the parameter server knows of a table that it serves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from kernels.host import RowDtype
from serving.config import ModelConfig
from serving.model.sparse_rows import KeyType
from serving.parameter_server.counters import RequestCounts, TableCounting
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
    clock: VersionClock = field(default_factory=VersionClock)
    is_written: bool = False
    is_uncertain: bool = False
    removed_keys: set[int] | None = None

    @classmethod
    def all_of(cls, config: ModelConfig, tiers: Sequence[str]) -> list[Self]:
        """The tables of a model, in graph order, in tiers of these names, fastest first."""
        versions, requests = ModelVersions(), RequestCounts(len(config.tables))
        return [cls._of(config, place, tiers, versions, requests) for place in range(len(config.tables))]

    @classmethod
    def _of(
        cls, config: ModelConfig, place: int, tiers: Sequence[str], versions: ModelVersions, requests: RequestCounts
    ) -> Self:
        table = config.tables[place]
        counting = TableCounting(config.name, config.version, table.name, tiers, requests, place)
        name = config.full_name(table)
        clock = VersionClock(versions)
        return cls(name, table.dim, config.key_type, table.row_dtype, table.default_value, counting, clock)
