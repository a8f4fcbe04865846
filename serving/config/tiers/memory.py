"""The types of ``volatile_db`` whose rows this process reads as memory: RAM, shared memory and snapshots."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kernels.host import OverflowPolicy, RowDtype
from serving.config.clause import Count, FilePath, Part, Switch, Whole, spelled
from serving.config.tiers.volatile import RAM_POLICIES, VolatileTier
from serving.model.capacity import MOST_ROWS

_CAPACITIES = ("capacity_bytes", "capacity_rows", "capacity_rows_per_table")


class _MemoryTier(VolatileTier):
    """A tier whose rows this process reads as memory."""

    row_dtype: RowDtype = "fp32"
    row_dtype_per_table: dict[str, RowDtype] | None = None
    lookup_threads: Annotated[Count, Field(le=64)] | None = None


class HashMapConfig(_MemoryTier):
    """RAM of this process. ``stated_policy`` is ``overflow_policy`` in the file."""

    spellings: ClassVar[tuple[str, ...]] = (
        *("hash_map", "hashmap", "hash", "map"),
        *("parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"),
    )

    type: Literal["hash_map"] = "hash_map"
    capacity_rows: Count | None = None
    capacity_bytes: Count | None = None
    capacity_rows_per_table: dict[str, Whole] | None = None
    overflow_margin: Count | None = None
    num_partitions: Count = 16
    stated_policy: Annotated[
        Literal["evict_random", "evict_least_used", "evict_oldest"] | None, spelled(RAM_POLICIES)
    ] = Field(default=None, validation_alias="overflow_policy")
    overflow_resolution_target: Part = 0.8
    refresh_time_after_fetch: Switch = True
    hot_keys: FilePath | None = None

    @property
    def capacity_rows_of_each_table(self) -> int | None:
        """The most rows of each table, instead of one budget for all tables."""
        return None if self.overflow_margin is None else self.overflow_margin * self.num_partitions

    @property
    def overflow_policy(self) -> OverflowPolicy | None:
        """The rows that leave a full table when new keys come. None means that no row leaves."""
        if self.overflow_margin is None and not self._capacities():
            return None
        policy = self.stated_policy or (None if self._capacities() else "evict_random")
        return policy if policy != "evict_oldest" or self.refresh_time_after_fetch else "evict_oldest_written"

    def _capacities(self) -> list[str]:
        return [name for name in _CAPACITIES if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _has_one_capacity(self) -> Self:
        capacities = self._capacities() + (["overflow_margin"] if self.overflow_margin is not None else [])
        if len(capacities) > 1:
            raise ValueError(f"expected one capacity, got {' and '.join(capacities)}")
        return self


class SharedMemoryConfig(_MemoryTier):
    """RAM that the processes of a machine share, if they use the same name."""

    spellings: ClassVar[tuple[str, ...]] = (
        *("multi_process_hash_map", "multi_process_hashmap", "multi_process_hash", "multi_process_map"),
    )

    type: Literal["multi_process_hash_map"] = "multi_process_hash_map"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")] = Field(
        default="hctr_mp_hash_map_database", validation_alias="shared_memory_name"
    )
    size_bytes: Count = Field(default=16 << 30, validation_alias="shared_memory_size")
    auto_remove: Switch = Field(default=True, validation_alias="shared_memory_auto_remove")

    @classmethod
    def refuse(cls, key: str) -> None:
        """See ``VolatileClause``."""
        if key == "overflow_margin":
            raise ValueError(f"{key}: memory that processes share evicts nothing; shared_memory_size bounds it")
        super().refuse(key)

    @model_validator(mode="after")
    def _holds_all(self) -> Self:
        if self.cache_missed_embeddings:
            raise ValueError("cache_missed_embeddings: memory that processes share has every row of the models' files")
        return self


class SnapshotConfig(_MemoryTier):
    """Snapshot files that processes map. Without a ``path`` the file of every table must be a snapshot."""

    spellings: ClassVar[tuple[str, ...]] = ("snapshot",)

    type: Literal["snapshot"] = "snapshot"
    path: FilePath | None = None
    overlay_capacity_rows: Annotated[Whole, Field(le=MOST_ROWS)] | None = None
    warm_up: Switch = True

    @model_validator(mode="after")
    def _holds_all(self) -> Self:
        if not self.initialize_after_startup:
            raise ValueError("initialize_after_startup: must be true if the type is snapshot, which holds all rows")
        return self
