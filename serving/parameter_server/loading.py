"""How a table gets into the tiers, and how a cache gets its rows back; the package's docstring has the contract."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic as now_s

from serving.config import ModelConfig
from serving.errors import StoreError, StoreFullError, StoreUnreachableError, without_frames
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.progress import Batches, CountedRows, Progress
from serving.parameter_server.table import ServedTable
from serving.parameter_server.table_files import TableSource, table_source
from serving.parameter_server.tier import Tier
from serving.parameter_server.truth import LOAD_BATCH_ROWS, TableTruth, held_rows
from serving.storage import SharedMemoryStore
from serving.storage.marker import NOT_LOADED, Marker
from serving.storage.row_codec import rounded
from serving.storage.store import Store, TableSpec, has_rows

logger = logging.getLogger(__name__)

# The pause after a failed attempt to fill a cache, doubled from the first to the last.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
# A cache that loses rows again and again spends at most a fifth of the time being filled.
REST_RATIO = 4.0


@dataclass(eq=False)
class CachedTable:
    """A table in a cache that is refilled if it becomes invalid.

    Attributes:
        tier: the cache.
        table: the table.
        spec: what the store knows of it.
        truth: its source of truth.
        is_filled: the cache has had the table since the model was loaded.
        due_at_s: when it may be filled again.
        pause_s: how long it rests if that fails.
    """

    tier: Tier
    table: ServedTable
    spec: TableSpec
    truth: TableTruth
    is_filled: bool = False
    due_at_s: float = 0.0
    pause_s: float = 0.0

    def refill_if_due(self) -> None:
        """Fill the cache if it is invalid and has rested after the last attempt."""
        began = now_s()
        if self.tier.is_current(self.table.name) or self.table.clock.is_gone or began < self.due_at_s:
            return
        try:
            self.fill()
        except StoreError as err:
            self.tier.could_not_fill(self.table, err)
            self.pause_s = min(max(2 * self.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self.due_at_s = now_s() + self.pause_s
        else:
            self.pause_s = 0.0
            self.due_at_s = now_s() + REST_RATIO * (now_s() - began)

    def fill(self) -> None:
        """Bring the cache up to the truth.

        Raises:
            StoreError: see ``Store.fill``.
        """
        tier, was_written = self.tier, True
        with self.table.clock.lock:
            missed_write = tier.begin_refill(self.table.name)
        if tier.store.outlives_process:
            was_written = tier.store.fill(self.spec, self.truth, starting=missed_write or not self.is_filled)
        else:
            first_rows = tier.settings.first_rows if tier.settings.is_initialized else FirstRows(cache_rate=0.0)
            self.truth.refill(tier.store, first_rows)
        with self.table.clock.lock:
            is_current = tier.end_refill(self.table.name)
        if is_current:
            tier.was_filled(self.table, again=self.is_filled and was_written)
        self.is_filled, self.table.removed_keys = True, None


def with_kept_tables(store: Store, config: ModelConfig, *, is_filled: bool = True) -> ModelConfig:
    """Let a version keep the tables ``<model>@<version>.<table>`` that earlier releases made in the truth.

    It keeps them if they were loaded from the same files, or if nothing fills the truth (``is_filled``). So rows that
    were written into them stay, and servers of an earlier release go on sharing them.
    """
    kept = config.model_copy(update={"table_tag": str(config.version)})
    if not config.table_tag or not store.outlives_process or isinstance(store, SharedMemoryStore):
        return config
    for table in config.tables:
        held = store.marker(kept.full_name(table))
        if held is None:
            return config
        if is_filled and held.digest != table_source(kept, table).digest:
            return config
    return kept


def load_tables(
    tiers: Sequence[Tier], loads: Sequence[tuple[ServedTable, TableSource]], progress: Progress | None = None
) -> list[CachedTable]:
    """Bring the tables of a model into every tier; returns those in caches that can be refilled.

    If the truth is memory, it must have room for every row. A cache in memory takes as many rows as it has room for:
    the first rows by ``FirstRows``, then those of the file. Every row must fit the table's row type, wherever it lies.
    A cache that cannot be reached now is left to a later ``fill``.

    Raises:
        StoreFullError: the truth is memory, and has too little room; raised before anything is loaded.
        StoreError: a store cannot take the rows, a value does not fit the table's row type, or a truth that keeps what
            it has holds no rows.
        ModelFileError: a file is damaged.
    """
    *caches, last = tiers
    sources = [source for _, source in loads]
    announce_tables(tiers, sources)
    for store in (tier.store for tier in tiers if _is_volatile(tier.store)):
        for source in sources:
            store.open_table(source.spec, source.model.rows)
    if _is_volatile(last.store) and last.settings.is_initialized:
        room = {source.spec.name: last.store.capacity_rows(source.spec.name) for source in sources}
        check_room(last.name, room, sources)
    cached: list[CachedTable] = []
    unreachable: set[Tier] = set()
    for table, source in loads:
        _load_truth(last, source, progress)
        truth = TableTruth(last, table, source)
        for cache in reversed(caches):
            if not cache.store.outlives_process:
                _fill_memory_cache(cache, last, source, truth, progress)
                cached.append(CachedTable(cache, table, source.spec, truth, is_filled=True))
            elif cache.settings.is_initialized:
                cached.append(CachedTable(cache, table, source.spec, truth))
                _fill_lasting_cache(cached[-1], unreachable)
            else:
                _open_kept_cache(cache, source, truth)
        truth.was_loaded()
    return cached


def announce_tables(tiers: Sequence[Tier], sources: Sequence[TableSource], leaving: Set[str] = frozenset()) -> None:
    """Announce ``sources`` to stores whose tables share a bound; tables that are ``leaving`` make room for them."""
    for tier in tiers:
        tier.store.announce([(source.spec, source.model.rows) for source in sources], leaving)


def drop_tables(tiers: Sequence[Tier], tables: Sequence[str]) -> None:
    """Forget ``tables`` in every store; rows that outlive the process stay.

    Raises:
        StoreError: a store did not answer; the first such error, after all stores were asked.
    """
    stores = [tier.store for tier in tiers]
    _for_all((store.close_table if store.outlives_process else store.drop_table for store in stores), tables)


def note_current_caches(tiers: Sequence[Tier], table: ServedTable) -> None:
    """Tell the truth which caches that outlive the process have every write, at the end of the table's service.

    Raises:
        StoreError: the truth did not answer.
    """
    *caches, truth = tiers
    current = {one.store.identity for one in caches if one.store.outlives_process and one.is_current(table.name)}
    if not current or table.is_uncertain:
        return
    held = truth.store.marker(table.name)
    if held is not None and held.current_caches is not None:
        known = current.union(held.current_caches)
        truth.store.write_flags(table.name, current_caches=tuple(sorted(known)))


def erase_tables(tiers: Sequence[Tier], tables: Sequence[str]) -> None:
    """Remove ``tables`` from every store, the truth last; if a cache keeps its rows, so does the truth.

    Raises:
        StoreError: a store did not answer; the first such error.
    """
    *caches, truth = [tier.store for tier in tiers]
    try:
        for table in tables:
            truth.write_flags(table, changed=True, current_caches=())
        _for_all((store.erase_table for store in caches), tables)
        _for_all((truth.erase_table,), tables)
    except StoreError as err:
        advice = "its rows stay; a later erasure of any model tries again"
        raise type(err)(err.store, err.table, f"{err.reason}; {advice}") from err


def check_room(store: str, room: Mapping[str, int | None], sources: Sequence[TableSource]) -> None:
    """Check that a store has room for every row of a model's tables.

    Args:
        store: its name.
        room: the most rows it takes, by table; None if it has no limit.
        sources: the tables.

    Raises:
        StoreFullError: it has too little; the message says how much, and what can be done.
    """
    for source in sources:
        capacity = room[source.spec.name]
        if capacity is not None and capacity < source.model.rows:
            rows, needed = source.model.rows, sum(one.model.rows for one in sources)
            reason = (
                f"the model file has {rows:,} rows, but there is room for {capacity:,} (all tables of the model: "
                f"{needed:,}); raise volatile_db.capacity_rows, or the key that you set in its place (overflow_margin "
                "counts the rows of one of num_partitions), or add a persistent_db"
            )
            raise StoreFullError(store, source.spec.name, reason)


def _is_volatile(store: Store) -> bool:
    """Whether a store keeps rows in this process's memory only."""
    return not store.outlives_process and not store.reads_model_files


def _load_truth(tier: Tier, source: TableSource, progress: Progress | None) -> None:
    store, spec, model = tier.store, source.spec, source.model
    if store.reads_model_files:
        store.serve_file(spec, model)
    elif not store.outlives_process:
        if tier.settings.is_initialized:
            _fill_memory(store, source, None, tier.settings.first_rows, progress)
    elif tier.settings.is_initialized:
        load_marked(store, source, progress)
    else:
        store.open_table(spec, model.rows)
        if not has_rows(store, spec.name):
            reason = "has no rows, and initialize_after_startup is false: nothing is loaded"
            raise StoreError(store.name, spec.name, reason)
    if store.outlives_process and store.capacity_rows(spec.name) is not None:
        reason = "evicts rows, so a slower tier must hold all rows; there is none"
        raise StoreError(store.name, spec.name, reason)


def load_marked(store: Store, source: TableSource, progress: Progress | None = None) -> None:
    """Load a table into a truth that outlives the process, unless its marker says that the files are loaded."""
    spec, model = source.spec, source.model
    row_dtype = spec.row_dtype if store.keeps_row_dtype else "fp32"
    held = store.marker(spec.name)
    if held is not None and held.digest == NOT_LOADED:
        held = None
    if held is not None and (held.digest, held.row_dtype) == (source.digest, row_dtype):
        store.open_table(spec, model.rows)
        return
    if held is not None and held.changed:
        reason = "the model's files are new, so they replace all rows, including rows written since the last load"
        reason += " and rows of other programs"
        logger.warning("table %r: %s: %s", spec.name, store.name, reason)
    # Every key of the files is checked before an old row is touched.
    with _reported(store, source, progress) as batches:
        store.load(spec, batches, Marker(source.digest, model.rows, row_dtype), keep=held is None)


def _fill_memory_cache(
    cache: Tier, last: Tier, source: TableSource, truth: TableTruth, progress: Progress | None
) -> None:
    if not cache.settings.is_initialized:
        return
    if truth.has_rows_of_files:
        _fill_memory(cache.store, source, None, cache.settings.first_rows, progress)
    elif truth.gives_rows:
        _fill_memory(cache.store, source, last.store, cache.settings.first_rows, progress)
    else:
        truth.log_no_copies()


def _fill_lasting_cache(cached: CachedTable, unreachable: set[Tier]) -> None:
    tier, spec = cached.tier, cached.spec
    tier.store.serve_as_cache(spec, cached.truth)
    try:
        if tier not in unreachable:
            cached.fill()
            return
    except StoreUnreachableError as err:
        unreachable.add(tier)
        tier.could_not_fill(cached.table, err)
    cached.table.removed_keys = set()
    if tier.store.is_whole(spec.name):  # a store with invalid parts bypasses these itself
        tier.bypass(spec.name)


def _open_kept_cache(cache: Tier, source: TableSource, truth: TableTruth) -> None:
    """Open a cache that keeps what it has: nothing fills it, so it must not have missed a change."""
    reason = ""
    cache.store.serve_as_cache(source.spec, truth, keeps_rows=True)
    try:
        cache.store.open_table(source.spec, source.model.rows)
    except StoreUnreachableError as err:
        reason = err.reason
    if not truth.marker().is_current(cache.store.identity):
        reason = "it may have missed a change; set initialize_after_startup to true to refill it"
    if reason:
        cache.bypass(source.spec.name)
        logger.warning("tier %s is bypassed, table %r: %s", cache.name, source.spec.name, reason)


def _fill_memory(
    store: Store, source: TableSource, truth: Store | None, first_rows: FirstRows, progress: Progress | None
) -> None:
    """Fill a store in memory; ``truth`` is the store that has the rows, or None for the files."""
    spec = source.spec
    with _reported(store, source, progress) as batches:
        choice = first_rows.choose(spec.name, source.model, store.capacity_rows(spec.name))
        for keys, rows in batches:
            if choice.is_full and (spec.row_dtype == "fp32" or truth is not None):
                return
            taken = choice.take(keys)
            if truth is not None:
                store.insert(spec.name, *held_rows(truth, spec, keys[taken]))
            elif taken.all():
                store.insert(spec.name, keys, rows)
            else:
                store.insert(spec.name, keys[taken], rows[taken])
                # The other rows must fit the row type, too.
                rounded(store.name, spec.name, spec.row_dtype, keys[~taken], rows[~taken])


@contextmanager
def _reported(store: Store, source: TableSource, progress: Progress | None) -> Iterator[Batches]:
    """Check every key of the files, give their rows, and log the begin and the end of the load."""
    table, rows, began = source.spec.name, source.model.rows, now_s()
    logger.info("loading %s, %s rows, into %s", table, f"{rows:,}", store.name)
    counted = CountedRows(f"{table} into {store.name}", rows, progress)
    yield counted(source.model.batches(LOAD_BATCH_ROWS))
    logger.info("loaded %s into %s: read %s rows in %.1f s", table, store.name, f"{counted.done:,}", now_s() - began)


def _for_all(removals: Iterable[Callable[[str], None]], tables: Sequence[str]) -> None:
    errors: list[StoreError] = []
    for remove in removals:
        for table in tables:
            try:
                remove(table)
            except StoreError as err:
                errors.append(without_frames(err))
    if errors:
        raise without_frames(errors[0])
