"""One table of a loaded model: its tiers, the order of its writes, and its counters."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from serving.config import ModelConfig
from serving.errors import StoreError, UnknownModelError, without_frames
from serving.model.sparse_rows import KeyType
from serving.parameter_server.cache_state import CacheState
from serving.parameter_server.counters import RequestCounts, TableCounters, TableCounting
from serving.parameter_server.health import ModelHealth
from serving.parameter_server.table_files import table_spec
from serving.parameter_server.version_clock import ModelVersions, VersionClock
from serving.storage.store import TableSpec

if TYPE_CHECKING:
    from serving.parameter_server.tier_table import CacheTable, TierTable
    from serving.parameter_server.truth import TruthTable


@dataclass(slots=True, eq=False)
class Table:
    """One table of a loaded model; another load of the same model makes another object.

    Attributes:
        spec: what stores know of it.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        default_value: every float of an unknown key's vector.
        counting: the table's counters.
        health: the outages of the table's model.
        clock: the order of the table's writes.
        tiers: the table in each tier, fastest first.
        caches: ``tiers`` without the last.
        truth: the last of ``tiers``.
        is_written: this process has changed rows of the table; guarded by the clock's lock.
        is_uncertain: the truth failed in the middle of a change, so caches may differ from it; guarded likewise.
        removed_keys: keys that were removed since the load, while a cache has not been filled yet; None: none waits.
    """

    spec: TableSpec
    key_type: KeyType
    default_value: float
    counting: TableCounting
    health: ModelHealth
    clock: VersionClock = field(default_factory=VersionClock)
    tiers: "Sequence[TierTable]" = ()
    caches: "Sequence[CacheTable]" = ()
    truth: "TruthTable" = field(init=False)
    is_written: bool = False
    is_uncertain: bool = False
    removed_keys: set[int] | None = None

    @property
    def name(self) -> str:
        """The full name."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """D."""
        return self.spec.dim

    def take_tiers(self, caches: "Sequence[CacheTable]", truth: "TruthTable") -> None:
        """Take the tiers, caches fastest first."""
        self.tiers, self.caches, self.truth = (*caches, truth), tuple(caches), truth

    def end(self) -> None:
        """Stop serving the table; nothing is written to it any more."""
        with self.clock.lock:
            self.clock.end()
            for cache in self.caches:
                cache.become(CacheState.DROPPED)

    def close(self) -> None:
        """Close the table in every tier; rows that outlive the process stay.

        Raises:
            StoreError: a store did not answer; the first such error, after all stores were asked.
        """
        for_all(tier.close for tier in self.tiers)

    def check_loaded(self) -> None:
        """Refuse an answer during which the table was unloaded: its keys may be unknown for that reason alone.

        Raises:
            UnknownModelError: it was.
        """
        if self.clock.is_gone:
            raise UnknownModelError(f"table {self.name!r} was unloaded during the lookup")

    def read_counters(self) -> TableCounters:
        """The table's counts, and for each tier whether it answers now, and its state."""
        counters = self.counting.read()
        for depth, tier in enumerate(counters.tiers):
            tier.is_up = self.health.is_up(depth, self.name)
        for cache in self.caches:
            counters.tiers[cache.tier.depth].state = cache.state.value
        return counters

    @classmethod
    def all_of(cls, config: ModelConfig, tiers: Sequence[str]) -> list[Self]:
        """The tables of a model, in graph order, for tiers of these names, fastest first; they are in no tier yet."""
        version = f" version {config.version}" if config.table_tag else ""
        health = ModelHealth(f"{config.name!r}{version}", tiers, config.gpu_cache.mode == "asynchronous")
        versions, requests = ModelVersions(), RequestCounts(len(config.tables))
        return [
            cls(
                table_spec(config, table),
                config.key_type,
                table.default_value,
                TableCounting(config.name, config.version, table.name, tiers, requests, place),
                health,
                VersionClock(versions),
            )
            for place, table in enumerate(config.tables)
        ]


def for_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make every call, also after one has failed.

    Raises:
        StoreError: the first error of a store.
    """
    errors: list[StoreError] = []
    for call in calls:
        try:
            call()
        except StoreError as err:
            errors.append(without_frames(err))
    if errors:
        raise without_frames(errors[0])
