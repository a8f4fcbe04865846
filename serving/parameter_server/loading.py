"""How a model's rows get into the tiers: durable ones and snapshots hold all, others as many as they have room for."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from serving.errors import StoreError, StoreFullError, StoreUnreachableError
from serving.parameter_server.durable_load import (
    LOAD_BATCH_ROWS,
    CacheLoad,
    TableSource,
    announce,
    load_durable,
    may_fill_others,
    truth_of,
)
from serving.parameter_server.first_rows import FirstRows
from serving.storage.row_dtype import rounded
from serving.storage.store import (
    DurableStore,
    Keys,
    SharingStore,
    SourceStore,
    Store,
    TableSpec,
    Vectors,
    WitnessStore,
    has_rows,
)


@dataclass(frozen=True, slots=True)
class TriedLoad:
    """A load into a store before the slowest; ``reason``: why the store could not be reached, None: it could be."""

    load: CacheLoad
    reason: str | None


def load_tables(
    stores: Sequence[Store],
    sources: Sequence[TableSource],
    kept: Sequence[Store] = (),
    first_rows: Mapping[str, FirstRows] | None = None,
) -> list[TriedLoad]:
    """Bring every row of ``sources`` into the stores, but for those that are ``kept`` as they are.

    A durable store is loaded unless it already holds the table from the same files, with or without later changes;
    one before another, unless it has the changes of that.
    Where no store holds all rows by its kind (a durable one, a ``SourceStore``), each must have room for them; else a
    store takes, up to its capacity, those that ``first_rows`` says by the store's name, or the first of the file. Of a
    table with a narrow row type every row must fit that type, wherever it will lie.
    Where the slowest store is durable, and is kept as it is or has changed since it was loaded, its rows, not the
    files', are what the stores before it get; none, where copies would be rounded twice (``may_be_copied``).

    Returns:
        the loads into durable stores before another.

    Raises:
        StoreFullError: every store must have room, and one has too little; raised before anything is loaded.
        StoreError: a store cannot take the rows, a value does not fit the table's row type, or a durable store that is
            kept as it is, with none behind it, has no rows of a table.
        ModelFileError: a file is damaged.
    """
    whole = [store for store in stores if isinstance(store, DurableStore | SourceStore)]
    volatile = [store for store in stores if store not in whole]
    share_bounds(volatile, sources)
    for store in volatile:
        for source in sources:
            store.open_table(source.spec, source.model.rows)
    if not whole:
        for store in (store for store in volatile if store not in kept):
            room = {source.spec.name: store.capacity_rows(source.spec.name) for source in sources}
            check_room(store.name, room, sources)
    tried: list[TriedLoad] = []
    unreachable: dict[Store, str] = {}
    for source in sources:
        truth = None
        if whole:
            _load_slowest(whole, source, kept)
            truth = truth_of(whole[-1], source, kept)
            tried += _load_caches(whole, source, kept, unreachable)
        if may_fill_others(truth, source.spec):
            for store in (store for store in volatile if store not in kept):
                _load_volatile(store, source, truth, (first_rows or {}).get(store.name, FirstRows()))
    return tried


def share_bounds(stores: Sequence[Store], sources: Sequence[TableSource]) -> None:
    """Say to the stores whose tables share a bound that ``sources`` are about to be loaded, one model after another."""
    for store in stores:
        if isinstance(store, SharingStore):
            store.share([(source.spec, source.model.rows) for source in sources])


def drop_tables(stores: Sequence[Store], tables: Sequence[str], drop_durable: bool) -> None:
    """Forget ``tables`` in every store; what lies on a disk stays there unless ``drop_durable``.

    Raises:
        StoreError: a store did not answer, the first that did not; the others have forgotten them.
    """
    errors: list[StoreError] = []
    for store in stores:
        if drop_durable or not isinstance(store, DurableStore):
            for table in tables:
                try:
                    if drop_durable and isinstance(store, SourceStore):
                        store.erase_table(table)
                    else:
                        store.drop_table(table)
                except StoreError as err:
                    errors.append(_rows_stay(err) if drop_durable else err)
    if errors:
        if drop_durable and isinstance(stores[-1], WitnessStore):
            _note_kept(stores[-1], errors)
        raise errors[0]


def check_room(store: str, room: Mapping[str, int | None], sources: Sequence[TableSource]) -> None:
    """Check that a store has room for every row of a model's tables.

    Args:
        store: its name.
        room: the most rows it takes, by table; None where it does not say.
        sources: the tables.

    Raises:
        StoreFullError: it has too little; the message says how much, and what can be done.
    """
    for source in sources:
        capacity = room[source.spec.name]
        if capacity is not None and capacity < source.model.rows:
            rows, needed = source.model.rows, sum(one.model.rows for one in sources)
            reason = (
                f"the model file has {rows:,} rows, there is room for {capacity:,} (all tables of the model: "
                f"{needed:,}); raise volatile_db.capacity_rows, or what is set in its place (overflow_margin counts "
                "the rows of one of num_partitions), or add a persistent_db"
            )
            raise StoreFullError(store, source.spec.name, reason)


def _load_slowest(whole: Sequence[DurableStore | SourceStore], source: TableSource, kept: Sequence[Store]) -> None:
    """Load the slowest of ``whole``.

    Raises:
        StoreError: it is durable, but does not hold all rows, or is to be kept and has none.
    """
    slowest, name = whole[-1], source.spec.name
    if isinstance(slowest, SourceStore):
        slowest.load(source.spec, source.model)
        return
    if slowest in kept:
        slowest.open_table(source.spec, source.model.rows)
        _check_has_rows(slowest, name)
    else:
        load_durable(slowest, source, source.model.digest())
    _check_holds_all(slowest, name)


def _load_caches(
    whole: Sequence[DurableStore | SourceStore],
    source: TableSource,
    kept: Sequence[Store],
    unreachable: dict[Store, str],
) -> list[TriedLoad]:
    """Load the durable stores before the slowest; ``unreachable`` ones are not asked, and more may be added."""
    tried = []
    for store in (store for store in whole[:-1] if isinstance(store, DurableStore)):
        load = CacheLoad(store, source, whole[-1], kept)
        try:
            if store not in unreachable:
                load.run()
        except StoreUnreachableError as err:
            unreachable[store] = err.reason
        tried.append(TriedLoad(load, unreachable.get(store)))
    return tried


def _note_kept(slowest: WitnessStore, errors: Sequence[StoreError]) -> None:
    """Have ``slowest`` remember of which tables a store before it has kept rows that were to go."""
    with suppress(StoreError):  # those errors say more; one that may only be read keeps its own rows as well
        for table in {err.table for err in errors if err.store != slowest.name}:
            slowest.note_others(table, are_behind=True)


def _rows_stay(error: StoreError) -> StoreError:
    """The error of a store that was to forget a table for good, with what is left to do."""
    advice = "its rows stay there until a model of this name is loaded again, or loaded and erased"
    return type(error)(error.store, error.table, f"{error.reason}; {advice}")


def _check_holds_all(slowest: DurableStore, table: str) -> None:
    if slowest.capacity_rows(table) is not None:
        reason = "evicts rows, so that a slower tier must hold all of them; there is none"
        raise StoreError(slowest.name, table, reason)


def _check_has_rows(store: DurableStore, table: str) -> None:
    if not has_rows(store, table):
        raise StoreError(store.name, table, "has no rows, and initialize_after_startup is false: nothing is loaded")


def _load_volatile(store: Store, source: TableSource, truth: Store | None, first_rows: FirstRows) -> None:
    """Fill a store with some rows of the file.

    ``truth``: the store that has the rows; None: the file.
    """
    announce(source, store)
    spec = source.spec
    batches = source.model.batches(LOAD_BATCH_ROWS)  # which checks every key
    choice = first_rows.choose(spec.name, source.model, store.capacity_rows(spec.name))
    for keys, rows in batches:
        if choice.is_full and (spec.row_dtype == "fp32" or truth is not None):
            return
        taken = choice.take(keys)
        if truth is not None:
            store.insert(spec.name, *_held(truth, spec, keys[taken]))
        elif taken.all():
            store.insert(spec.name, keys, rows)
        else:
            store.insert(spec.name, keys[taken], rows[taken])
            # They must fit the row type, too.
            rounded(store.name, spec.name, spec.row_dtype, keys[~taken], rows[~taken])


def _held(store: Store, spec: TableSpec, keys: Keys) -> tuple[Keys, Vectors]:
    """Those of ``keys`` that ``store`` holds, and their rows."""
    rows = np.empty((keys.size, spec.dim), dtype=np.float32)
    found = store.fetch(spec.name, keys, rows)
    return keys[found], rows[found]
