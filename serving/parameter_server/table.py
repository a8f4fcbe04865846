"""One table of a loaded model: its tiers, the order of its writes, and its counters.

A write goes to the source of truth first. If that fails, the call fails and no cache is written. Then each cache takes
the change, the slowest first. Until the call returns, a lookup may find the old row in one tier and the new row in
another. Afterwards it finds only the new row.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from serving.config import ModelConfig
from serving.errors import RequestError, StoreError, UnknownModelError, without_frames
from serving.model.sparse_rows import KeyType
from serving.parameter_server.arguments import check_keys, check_rows
from serving.parameter_server.cache_state import CacheState
from serving.parameter_server.counters import RequestCounts, TableCounters, TableCounting
from serving.parameter_server.health import ModelHealth
from serving.parameter_server.table_files import TableSource, table_source
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.row_codec import rounded
from serving.storage.store import Change, Keys, Mask, Reached, StoreTable, TableSpec, with_sums

if TYPE_CHECKING:
    from serving.parameter_server.promotion import Promoter
    from serving.parameter_server.tier_table import CacheTable, TierTable
    from serving.parameter_server.truth import TruthTable

_STRIPE_BITS = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads neighbouring keys


class ModelVersions:
    """The version of all tables of a model: every change of any of them raises it.

    So one comparison says that no table has changed, however many there are.

    Attributes:
        now: the current version; reading it needs no lock.
        is_gone: the model is no longer served, so nothing may be written; reading it needs no lock.
        lock: guards ``now``, and what clocks note of changes where copies are stored; taken after a clock's lock.
    """

    def __init__(self) -> None:
        """Start with no changes."""
        self.now = 0
        self.is_gone = False
        self.lock = threading.Lock()

    @contextmanager
    def storing(self, clocks: "Sequence[VersionClock]", reads: Sequence[tuple[Sequence[Keys], int]]) -> Iterator[Mask]:
        """Yield which keys may be stored inside the block: bool[N], read after read, table after table.

        Args:
            clocks: of all tables of the model.
            reads: for each read, its keys of each table, and the version before them.

        No other copies are stored, and no change is noted, until the block ends.
        """
        with self.lock:
            if all(version == self.now for _, version in reads):
                yield np.ones(sum(of_table.size for keys, _ in reads for of_table in keys), dtype=np.bool_)
                return
            masks = [
                clock.unchanged_since(of_table, version)
                for keys, version in reads
                for clock, of_table in zip(clocks, keys, strict=True)
            ]
            yield np.concatenate(masks) & (not self.is_gone)


class VersionClock:
    """One writer of a table at a time, and the time of each key's last change.

    A promotion copies a row that it read a while ago. It notes ``now`` before it reads and takes the lock before it
    writes. It skips keys that changed in between. Keys share 4,096 stripes: the clock may report an unchanged key as
    changed, never the reverse.

    Copies outside the tiers are stored inside ``storing``, without the lock. A change is noted when every tier has it,
    and then the listeners are called. A row read before the change is stored before that call, and the listener removes
    it, or it is not stored.

    Attributes:
        lock: held while rows of the table are written, and while the table is removed.
        versions: of all tables of its model.
    """

    def __init__(self, versions: ModelVersions) -> None:
        """Start with no changes; ``versions`` is shared by the clocks of a model's tables."""
        self.lock = threading.Lock()
        self.versions = versions  # its lock guards the fields below where copies are stored
        self._changed_at = np.zeros(1 << _STRIPE_BITS, dtype=np.int64)
        self._notifying = threading.Lock()  # guards the listeners, and is held during their calls; taken after ``lock``
        self._listeners: tuple[Callable[[Keys], None], ...] = ()

    @property
    def is_gone(self) -> bool:
        """See ``ModelVersions``."""
        return self.versions.is_gone

    def end(self) -> None:
        """Stop serving the model; once this was called for each table, no write runs. The caller holds the lock."""
        with self.versions.lock:
            self.versions.is_gone = True
            self.versions.now += 1

    def now(self) -> int:
        """The current version; needs no lock."""
        return self.versions.now

    def note(self, keys: Keys) -> None:
        """Note that ``keys`` changed in all tiers. The caller has held the lock since before the first write."""
        versions = self.versions
        with versions.lock:
            self._changed_at[_stripes(keys)] = versions.now + 1
            versions.now += 1
        if not self._listeners:  # a listener that comes now reads rows that have the change
            return
        with self._notifying, ExitStack() as calls:  # every listener is called, even if another one fails
            for listener in self._listeners:
                calls.callback(listener, keys)

    def listen(self, listener: Callable[[Keys], None]) -> None:
        """Call ``listener`` with the keys of every later change. The lock is held then: it must not take it.

        ``listen`` and ``unlisten`` do not wait for a writer, because filling a tier may take minutes.
        """
        with self._notifying:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[Keys], None]) -> None:
        """Stop calling ``listener``; no call is running when this returns. An unknown listener is no error."""
        with self._notifying:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def unchanged_since(self, keys: Keys, version: int) -> Mask:
        """Which of ``keys`` have certainly not changed since ``version``.

        The caller holds the lock of the clock or of the versions.
        """
        unchanged: Mask = self._changed_at[_stripes(keys)] <= version
        return unchanged


@dataclass(slots=True, eq=False)
class Table:
    """One table of a loaded model; another load of the same model makes another object.

    Attributes:
        source: the file that its rows are loaded from.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        default_value: every float of an unknown key's vector.
        counting: the table's counters.
        health: the outages of the table's model.
        clock: the order of the table's writes.
        promoter: copies rows that slower tiers hold into faster tiers; None: no rows are copied.
        tiers: the table in each tier, fastest first.
        caches: ``tiers`` without the last.
        truth: the last of ``tiers``.
        is_written: this process has changed rows of the table; guarded by the clock's lock.
        is_uncertain: the truth failed in the middle of a change, so caches may differ from it; the same lock guards it.
    """

    source: TableSource
    key_type: KeyType
    default_value: float
    counting: TableCounting
    health: ModelHealth
    clock: VersionClock
    promoter: "Promoter | None" = None
    tiers: "Sequence[TierTable]" = ()
    caches: "Sequence[CacheTable]" = ()
    truth: "TruthTable" = field(init=False)
    is_written: bool = False
    is_uncertain: bool = False

    @property
    def spec(self) -> TableSpec:
        """What stores know of it."""
        return self.source.spec

    @property
    def name(self) -> str:
        """The full name."""
        return self.source.spec.name

    @property
    def dim(self) -> int:
        """D."""
        return self.source.spec.dim

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
        for_all(tier.stored.close for tier in self.tiers)

    def check_loaded(self) -> None:
        """Refuse a write, or an answer whose keys may be unknown for the reason alone that the table was unloaded.

        Raises:
            UnknownModelError: it was.
        """
        if self.clock.is_gone:
            reason = "was unloaded with its model; if it was loaded again, open a new session"
            raise UnknownModelError(f"table {self.name!r} {reason}")

    def read_counters(self) -> TableCounters:
        """The table's counts, and for each tier whether it answers now, and its state."""
        counters = self.counting.read()
        for counts, in_tier in zip(counters.tiers, self.tiers, strict=True):
            counts.is_up = not in_tier.is_failing
        for cache in self.caches:
            counters.tiers[cache.tier.depth].state = cache.state.value
        return counters

    @classmethod
    def all_of(cls, config: ModelConfig, tiers: Sequence[str], promoter: "Promoter | None") -> list[Self]:
        """The tables of a model, in graph order, for tiers of these names, fastest first; they are in no tier yet.

        Raises:
            ModelFileError: a file is missing or is not such a model.
        """
        version = f" version {config.version}" if config.table_tag else ""
        health = ModelHealth(f"{config.name!r}{version}", tiers, config.gpu_cache.mode == "asynchronous")
        versions, requests = ModelVersions(), RequestCounts(len(config.tables))
        return [
            cls(
                table_source(config, table),
                config.key_type,
                table.default_value,
                TableCounting(config.name, config.version, table.name, tiers, requests, place),
                health,
                VersionClock(versions),
                promoter,
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


def write(changes: Sequence[Change[Table]], reached: Reached | None = None) -> None:
    """Make changes in every tier of their tables, in their order; see ``ParameterServer.write`` and ``Store.write``."""
    changes = [_checked(change, is_from_log=reached is not None) for change in changes]
    tables = [changes[0].table] if len(changes) == 1 else sorted({change.table for change in changes}, key=_name_of)
    _check_additions(changes)
    with ExitStack() as locks:
        for table in tables:  # in one order, so that two calls cannot wait for each other
            locks.enter_context(table.clock.lock)
            table.check_loaded()
        is_of_many = reached is not None and not tables[0].truth.tier.store.has_one_writer
        if not is_of_many:
            changes = [with_sums(change, change.table.name, change.table.truth.stored.fetch) for change in changes]
        for table in tables:
            if not table.is_written:
                table.truth.write_flags(changed=True, current_caches=())
        try:
            if is_of_many:
                try:
                    _write_truth(tables, changes, reached)
                finally:  # another process may have made some of the changes, and later ones
                    _write_caches([change._replace(rows=None) for change in changes])
            else:
                _write_truth(tables, changes, reached)
                _write_caches(changes)
        finally:
            for change in changes:
                change.table.clock.note(change.keys)


def show(change: Change[Table], view: RocksDbTable, is_reached: Callable[[Mapping[str, str]], bool]) -> None:
    """Bring a change that another process writes to readers and caches of this process; see ``RocksDbTable.show``."""
    change = _checked(change, is_from_log=True)
    table = change.table
    with table.clock.lock:
        table.check_loaded()
        shown = view.show(Change(view, *change[1:]), is_reached) or Change(view, change.keys, None)
        try:
            for cache in reversed(table.caches):
                if cache.lasting is None:  # the process that writes the truth writes the others
                    cache.write(shown.keys, shown.rows)
        finally:
            table.clock.note(change.keys)


def _checked(change: Change[Table], *, is_from_log: bool) -> Change[Table]:
    table, keys, rows, adds, _ = change
    check_keys(table.name, keys, table.key_type)
    keys = np.ascontiguousarray(keys)
    if rows is None:
        return Change(table, keys, None)
    check_rows(table.name, keys, rows, table.dim)
    rows = np.ascontiguousarray(rows)
    first = table.tiers[0].tier.name
    rounded(first, table.name, table.spec.row_dtype, keys, rows)  # refuses values before any tier is written
    if adds:
        table.truth.check_adding(is_from_log=is_from_log)
    return Change(table, keys, rows, adds, table.default_value)


def _check_additions(changes: Sequence[Change[Table]]) -> None:
    """Refuse an addition next to another change of its table: its base would be the row before the other change."""
    for table in {change.table for change in changes if change.adds}:
        if sum(change.table is table for change in changes) > 1:
            raise RequestError(f"table {table.name!r}: a change that adds to rows must be its table's only change")


def _name_of(table: Table) -> str:
    return table.name


def _write_truth(tables: Sequence[Table], changes: Sequence[Change[Table]], reached: Reached | None) -> None:
    """Write to the source of truth. If it fails in the middle, the caches of the tables may differ from it."""
    for table, keys, rows, *_ in changes:
        for cache in table.caches if rows is None else ():
            if cache.removed_keys is not None:
                cache.removed_keys.update(keys.tolist())
    were_uncertain = [table.is_uncertain for table in tables]
    for table in tables:
        table.is_uncertain = True
    stored = [Change[StoreTable](change.table.truth.stored, *change[1:]) for change in changes]
    if stored:
        tables[0].truth.tier.store.write(stored, reached)
    for table, was_uncertain in zip(tables, were_uncertain, strict=True):
        table.is_uncertain = was_uncertain


def _write_caches(changes: Sequence[Change[Table]]) -> None:
    for table, keys, rows, *_ in changes:
        for cache in reversed(table.caches):
            if not table.is_written:
                cache.write_flags()
            cache.write(keys, rows)
        table.is_written = True


def _stripes(keys: Keys) -> NDArray[np.uint64]:
    return (keys.view(np.uint64) * _GOLDEN) >> np.uint64(64 - _STRIPE_BITS)
