"""How a table gets into the tiers, and how a cache gets its rows back; the package's docstring has the contract."""

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from time import monotonic as now_s

from serving.background import giving_way
from serving.config import ModelConfig
from serving.errors import StoreError, StoreFullError, StoreUnreachableError
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.table import Table, for_all
from serving.parameter_server.table_files import CountedRows, Progress, TableSource, table_source, table_spec
from serving.parameter_server.tier_table import CacheTable, Tier
from serving.parameter_server.truth import LOAD_BATCH_ROWS, TruthTable
from serving.storage import MemoryStore, SharedMemoryStore
from serving.storage.marker import NOT_LOADED, Marker
from serving.storage.row_codec import rounded
from serving.storage.snapshot.store import SnapshotTable
from serving.storage.store import Batches, LastingStore, LastingTable, Store, StoreTable

logger = logging.getLogger(__name__)


def with_kept_tables(store: Store, config: ModelConfig, *, is_filled: bool = True) -> ModelConfig:
    """Let a version keep the tables ``<model>@<version>.<table>`` that earlier releases made in the truth.

    It keeps them if they were loaded from the same files, or if nothing fills the truth (``is_filled``). So rows that
    were written into them stay, and servers of an earlier release go on sharing them.
    """
    kept = config.model_copy(update={"table_tag": str(config.version)})
    if not config.table_tag or not isinstance(store, LastingStore) or isinstance(store, SharedMemoryStore):
        return config
    for table in config.tables:
        marker = store.table(table_spec(kept, table)).marker()
        if marker is None:
            return config
        if is_filled and marker.digest != table_source(kept, table).digest:
            return config
    return kept


def load_tables(tiers: Sequence[Tier], tables: Sequence[Table], progress: Progress | None = None) -> None:
    """Bring the tables of a model into every tier.

    If the truth is memory, it must have room for every row. A cache in memory takes as many rows as it has room for:
    the first rows by ``FirstRows``, then those of the file. Every row must fit the table's row type, wherever it lies.
    A cache that cannot be reached now is left to a later ``fill``.

    Raises:
        StoreFullError: the truth is memory, and has too little room; raised before anything is loaded.
        StoreError: a store cannot take the rows, a value does not fit the table's row type, or a truth that keeps what
            it has holds no rows.
        ModelFileError: a file is damaged.
    """
    *faster, last = tiers
    sources = [table.source for table in tables]
    for table in tables:
        table.take_tiers([CacheTable(tier, table) for tier in faster], TruthTable(last, table))
    share_bounds(tiers, sources)
    for table in tables:
        for in_tier in table.tiers:
            if in_tier.tier.is_in_process:
                giving_way(partial(in_tier.stored.open, table.source.model.rows))
    if last.is_in_process and last.settings.fills_at_start:
        check_room(last.name, {table.name: table.truth.stored.capacity_rows for table in tables}, sources)
    unreachable: set[Tier] = set()
    for table in tables:
        _load_truth(table.truth, progress)
        for cache in reversed(table.caches):
            if cache.lasting is None:
                _fill_memory_cache(cache, progress)
            elif cache.may_refill:
                _fill_lasting_cache(cache, cache.lasting, unreachable)
            else:
                _open_kept_cache(cache, cache.lasting)
        table.truth.is_loaded = True


def share_bounds(tiers: Sequence[Tier], sources: Sequence[TableSource], leaving: Set[str] = frozenset()) -> None:
    """Give ``sources`` their shares of the RAM; see ``MemoryStore.share_bounds``."""
    for tier in tiers:
        if isinstance(tier.store, MemoryStore):
            tier.store.share_bounds([(source.spec, source.model.rows) for source in sources], leaving)


def note_current_caches(table: Table) -> None:
    """Tell the truth which caches that outlive the process have every write, at the end of the table's service.

    Raises:
        StoreError: the truth did not answer.
    """
    lasting = [cache.lasting for cache in table.caches if cache.lasting is not None and cache.is_current]
    current = {cache.store.identity for cache in lasting}
    if not current or table.is_uncertain or table.truth.lasting is None:
        return
    marker = table.truth.lasting.marker()
    if marker is not None and marker.current_caches is not None:
        known = current.union(marker.current_caches)
        table.truth.write_flags(current_caches=tuple(sorted(known)))


def erase_tables(tables: Sequence[Table]) -> None:
    """Remove tables from every store, the truth last; if a cache keeps its rows, so does the truth.

    Raises:
        StoreError: a store did not answer; the first such error.
    """
    try:
        for table in tables:
            table.truth.write_flags(changed=True, current_caches=())
        for_all(partial(cache.tier.store.erase, table.name) for table in tables for cache in table.caches)
        for_all(partial(table.truth.tier.store.erase, table.name) for table in tables)
    except StoreError as err:
        advice = "its rows stay; a later erasure of any model tries again"
        raise type(err)(err.store, err.table, f"{err.reason}; {advice}") from err


def check_room(store: str, room: Mapping[str, int | None], sources: Sequence[TableSource]) -> None:
    """Check that a store has room for every row of a model's tables.

    Args:
        store: its name.
        room: how many rows it takes, by table; None if it has no limit.
        sources: the tables.

    Raises:
        StoreFullError: it has too little; the message says how much, and what can be done.
    """
    for source in sources:
        capacity = room[source.spec.name]
        if capacity is not None and capacity < source.model.rows:
            rows, needed = source.model.rows, sum(each_source.model.rows for each_source in sources)
            reason = (
                f"the model file has {rows:,} rows, but there is room for {capacity:,} (all tables of the model: "
                f"{needed:,}); raise volatile_db.capacity_rows, or the key that you set in its place (overflow_margin "
                "counts the rows of one of num_partitions), or add a persistent_db"
            )
            raise StoreFullError(store, source.spec.name, reason)


def has_rows(stored: StoreTable) -> bool:
    """Whether a table has any row; reads one row, where ``count`` may read all."""
    return any(keys.size for keys, _ in stored.items(batch_rows=1))


def _load_truth(truth: TruthTable, progress: Progress | None) -> None:
    stored, source, name = truth.stored, truth.table.source, truth.tier.name
    is_filled = truth.tier.settings.fills_at_start
    if isinstance(stored, SnapshotTable):
        stored.serve_file(source.model)
    elif not isinstance(stored, LastingTable):
        if is_filled:
            giving_way(partial(_fill_memory, stored, source, None, truth.tier.settings.first_rows, progress))
    elif is_filled:
        load_marked(stored, source, progress)
    else:
        stored.open(source.model.rows)
        if not has_rows(stored):
            reason = "has no rows, and initialize_after_startup is false: nothing is loaded"
            raise StoreError(name, source.spec.name, reason)
    if truth.lasting is not None and stored.capacity_rows is not None:
        reason = "evicts rows, so a slower tier must hold all rows; there is none"
        raise StoreError(name, source.spec.name, reason)
    if truth.lasting is not None:
        truth.reached = truth.lasting.reached()


def load_marked(stored: LastingTable, source: TableSource, progress: Progress | None = None) -> None:
    """Load a table into a truth that outlives the process, unless its marker says that the files are loaded."""
    spec, model, store = source.spec, source.model, stored.store
    row_dtype = spec.row_dtype if store.keeps_row_dtype else "fp32"
    marker = stored.marker()
    if marker is not None and marker.digest == NOT_LOADED:
        marker = None
    if marker is not None and (marker.digest, marker.row_dtype) == (source.digest, row_dtype):
        stored.open(model.rows)
        return
    if marker is not None and marker.changed:
        reason = "the model's files are new, so they replace all rows, including rows written since the last load"
        reason += " and rows of other programs"
        logger.warning("table %r: %s: %s", spec.name, store.name, reason)
    # Every key of the files is checked before an old row is touched.
    with _reported(stored, source, progress) as batches:
        stored.load(batches, Marker(source.digest, model.rows, row_dtype), keep=marker is None)


def _fill_memory_cache(cache: CacheTable, progress: Progress | None) -> None:
    truth, first_rows = cache.table.truth, cache.tier.settings.first_rows
    if cache.tier.settings.fills_at_start:
        if truth.has_rows_of_files:
            giving_way(partial(_fill_memory, cache.stored, cache.table.source, None, first_rows, progress))
        elif truth.may_be_copied:
            _fill_memory(cache.stored, cache.table.source, truth, first_rows, progress)
        else:
            truth.log_no_copies()
    cache.is_filled = True
    cache.begin_service()


def _fill_lasting_cache(cache: CacheTable, lasting: LastingTable, unreachable: set[Tier]) -> None:
    lasting.serve_as_cache(cache.table.truth)
    try:
        if cache.tier not in unreachable:
            cache.fill()
            return
    except StoreUnreachableError as err:
        unreachable.add(cache.tier)
        cache.failed(err)
    cache.removed_keys = set()
    cache.begin_service(is_current=not lasting.is_whole)  # a store with invalid parts bypasses these itself


def _open_kept_cache(cache: CacheTable, lasting: LastingTable) -> None:
    """Open a cache that keeps what it has: nothing fills it, so it must not have missed a write."""
    reason, truth = "", cache.table.truth
    lasting.serve_as_cache(truth, keeps_rows=True)
    try:
        lasting.open(cache.table.source.model.rows)
    except StoreUnreachableError as err:
        reason = err.reason
    if not truth.marker().is_current(lasting.store.identity):
        reason = "it may have missed a write; set initialize_after_startup to true to refill it"
    cache.begin_service(is_current=not reason)
    if reason:
        logger.warning("tier %s is bypassed, table %r: %s", cache.tier.name, cache.table.name, reason)


def _fill_memory(
    stored: StoreTable, source: TableSource, truth: TruthTable | None, first_rows: FirstRows, progress: Progress | None
) -> None:
    """Fill a table in memory with the rows of ``truth``, or, if it is None, of the files."""
    spec = source.spec
    with _reported(stored, source, progress) as batches:
        choice = first_rows.choose(spec.name, source.model, stored.capacity_rows)
        for keys, rows in batches:
            if choice.is_full and (spec.row_dtype == "fp32" or truth is not None):
                return
            taken = choice.take(keys)
            if truth is not None:
                stored.insert(*truth.held_rows(keys[taken]))
            elif taken.all():
                stored.insert(keys, rows)
            else:
                stored.insert(keys[taken], rows[taken])
                # The other rows must fit the row type, too.
                rounded(stored.store.name, spec.name, spec.row_dtype, keys[~taken], rows[~taken])


@contextmanager
def _reported(stored: StoreTable, source: TableSource, progress: Progress | None) -> Iterator[Batches]:
    """Check every key of the files, give their rows, and log the begin and the end of the load."""
    table, rows, store, began = source.spec.name, source.model.rows, stored.store, now_s()
    logger.info("loading %s, %s rows, into %s", table, f"{rows:,}", store.name)
    counted = CountedRows(f"{table} into {store.name}", rows, progress)
    yield counted(source.model.batches(LOAD_BATCH_ROWS))
    logger.info("loaded %s into %s: read %s rows in %.1f s", table, store.name, f"{counted.done:,}", now_s() - began)
