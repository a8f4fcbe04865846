"""One table of a loaded model: its tiers, the order of its writes, and its counters.

One call changes rows in every tier. The source of truth is written first. If that fails, the call fails and no cache is
written. Then each cache takes the change, the slowest first. A cache that does not take it is bypassed for this table,
and the call succeeds: the truth has the rows. The cache is refilled in the background. Until the call returns, a lookup
may find the old row in one tier and the new row in another. Afterwards it finds only the new row.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from serving.config import ModelConfig
from serving.errors import StoreError, UnknownModelError, without_frames
from serving.model.sparse_rows import KeyType
from serving.parameter_server.arguments import check_keys, check_rows
from serving.parameter_server.cache_state import CacheState
from serving.parameter_server.counters import RequestCounts, TableCounters, TableCounting
from serving.parameter_server.health import ModelHealth
from serving.parameter_server.table_files import table_spec
from serving.parameter_server.version_clock import ModelVersions, VersionClock
from serving.storage.row_codec import rounded
from serving.storage.store import Change, Keys, TableSpec, Vectors

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
        is_uncertain: the truth failed in the middle of a change, so caches may differ from it; the same lock guards it.
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


def write(changes: Sequence[Change[Table]]) -> None:
    """Make changes in every tier of their tables, in their order; see ``ParameterServer.write``."""
    changes = [_checked(*change) for change in changes]
    tables = sorted({change.table for change in changes}, key=lambda table: table.name)
    with ExitStack() as held:
        for table in tables:  # in one order, so that two calls cannot wait for each other
            held.enter_context(table.clock.lock)
            if table.clock.is_gone:
                raise UnknownModelError(f"table {table.name!r} has been unloaded")
        for table in tables:
            if not table.is_written:
                table.truth.write_flags(changed=True, current_caches=())
        try:
            _write_truth(tables, changes)
            for table, keys, rows in changes:
                for cache in reversed(table.caches):
                    if not table.is_written:
                        cache.write_flags()
                    cache.write(keys, rows)
                table.is_written = True
        finally:
            for table, keys, _ in changes:
                table.clock.note(keys)


def _checked(table: Table, keys: Keys, rows: Vectors | None) -> Change[Table]:
    check_keys(table.name, keys, table.key_type)
    keys = np.ascontiguousarray(keys)
    if rows is None:
        return Change(table, keys, None)
    check_rows(table.name, keys, rows, table.dim)
    rows = np.ascontiguousarray(rows)
    first = table.tiers[0].tier.name
    rounded(first, table.name, table.spec.row_dtype, keys, rows)  # refuses values before any tier is written
    return Change(table, keys, rows)


def _write_truth(tables: Sequence[Table], changes: Sequence[Change[Table]]) -> None:
    """Write to the source of truth. If it fails in the middle, the caches of the tables may differ from it."""
    for table, keys, rows in changes:
        if rows is None and table.removed_keys is not None:
            table.removed_keys.update(keys.tolist())
    were_uncertain = [table.is_uncertain for table in tables]
    for table in tables:
        table.is_uncertain = True
    stored = [Change(table.truth.stored, keys, rows) for table, keys, rows in changes]
    if stored:
        tables[0].truth.tier.store.write(stored)
    for table, was_uncertain in zip(tables, were_uncertain, strict=True):
        table.is_uncertain = was_uncertain
