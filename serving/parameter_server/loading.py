"""How a model's rows get into the tiers: durable ones and snapshots hold all, others as many as they have room for."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.config.capacity import open_table_file
from serving.errors import StoreError, StoreFullError
from serving.model.sparse_file import SparseModel
from serving.parameter_server.first_rows import FirstRows
from serving.storage.row_dtype import may_be_copied, rounded
from serving.storage.store import (
    CHANGED,
    DurableStore,
    Keys,
    ReservingStore,
    SharingStore,
    SourceStore,
    Store,
    TableSpec,
    Vectors,
    files_of,
)

logger = logging.getLogger(__name__)

LOAD_BATCH_ROWS = 65536


@dataclass(frozen=True, slots=True)
class TableSource:
    """One table and the file its rows come from."""

    spec: TableSpec
    model: SparseModel


def table_source(config: ModelConfig, table: TableConfig) -> TableSource:
    """What is to be loaded for ``table``.

    Raises:
        ModelFileError: its file is missing or is not such a model.
    """
    return TableSource(table_spec(config, table), open_table_file(config, table))


def table_spec(config: ModelConfig, table: TableConfig) -> TableSpec:
    """What stores must know of ``table``."""
    key_bytes: Literal[4, 8] = 8 if config.key_type == "I64" else 4
    return TableSpec(config.full_name(table), table.dim, key_bytes, table.row_dtype)


def load_tables(
    stores: Sequence[Store],
    sources: Sequence[TableSource],
    kept: Sequence[Store] = (),
    first_rows: Mapping[str, FirstRows] | None = None,
) -> None:
    """Bring every row of ``sources`` into the stores, but for those that are ``kept`` as they are.

    A durable store is loaded unless it already holds the table from the same files, with or without later changes;
    one before another, unless it has the changes of that.
    Where no store holds all rows by its kind (a durable one, a ``SourceStore``), each must have room for them; else a
    store takes, up to its capacity, those that ``first_rows`` says by the store's name, or the first of the file. Of a
    table with a narrow row type every row must fit that type, wherever it will lie.
    Where the slowest store is durable, and is kept as it is or has changed since it was loaded, its rows, not the
    files', are what the stores before it get; none, where copies would be rounded twice (``may_be_copied``).

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
    for source in sources:
        truth = _load_slowest(whole, source, kept)
        may_fill_others = _may_fill_others(truth, source.spec)
        for store in (store for store in whole[:-1] if isinstance(store, DurableStore)):
            _load_cache(store, source, store in kept, truth, may_fill_others)
        if may_fill_others:
            for store in (store for store in volatile if store not in kept):
                _load_volatile(store, source, truth, (first_rows or {}).get(store.name, FirstRows()))


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
    errors = []
    for store in stores:
        if drop_durable or not isinstance(store, DurableStore):
            for table in tables:
                try:
                    if drop_durable and isinstance(store, SourceStore):
                        store.erase_table(table)
                    else:
                        store.drop_table(table)
                except StoreError as err:
                    errors.append(err)
    if errors:
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


def _load_slowest(
    whole: Sequence[DurableStore | SourceStore], source: TableSource, kept: Sequence[Store]
) -> DurableStore | None:
    """Load the slowest of ``whole``; return it where it has other rows than the files, None where theirs are right.

    Raises:
        StoreError: it is durable, but does not hold all rows, or is to be kept and has none.
    """
    if not whole:
        return None
    slowest, name = whole[-1], source.spec.name
    if isinstance(slowest, SourceStore):
        slowest.load(source.spec, source.model)
        return None
    if slowest in kept:
        slowest.open_table(source.spec, source.model.rows)
        _check_has_rows(slowest, name)
    else:
        _load_durable(slowest, source, source.model.digest())
    _check_holds_all(slowest, name)
    return slowest if slowest in kept or _has_changed(slowest, source) else None


def _load_cache(
    store: DurableStore, source: TableSource, is_kept: bool, truth: DurableStore | None, may_fill: bool
) -> None:
    """Load a durable store before the slowest, with the rows of ``truth``, the files' if it is None.

    ``may_fill``: else it gets none of the rows of ``truth``.
    """
    if is_kept:
        store.open_table(source.spec, source.model.rows)
    elif truth is None:
        _load_durable(store, source, source.model.digest())
    else:
        # Of rows that came without a load all that can be told is that they are not the files'.
        name = source.spec.name
        record = truth.loaded_from(name) or source.model.digest() + CHANGED
        _reserve(store, source, truth.count(name))
        _load_durable(store, source, record, truth.items(name, LOAD_BATCH_ROWS) if may_fill else iter(()))


def _reserve(store: DurableStore, source: TableSource, rows: int = 0) -> None:
    """Say how many rows will be loaded: those of the file, or ``rows`` if that is more."""
    if isinstance(store, ReservingStore):
        store.reserve(source.spec, max(source.model.rows, rows))


def _load_durable(
    store: DurableStore, source: TableSource, wanted: str, batches: Iterator[tuple[Keys, Vectors]] | None = None
) -> None:
    """Load ``batches``, None for the files' rows, with the record ``wanted``, unless it has that, or it and changes."""
    if batches is None:
        _reserve(store, source)
    record = store.loaded_from(source.spec.name)
    if record is not None and wanted in (record, files_of(record)):
        store.open_table(source.spec, source.model.rows)
        return
    _announce(source, store)
    # Every key of the files is checked here, before the old rows are touched.
    store.bulk_load(source.spec, source.model.batches(LOAD_BATCH_ROWS) if batches is None else batches, wanted)


def _check_holds_all(slowest: DurableStore, table: str) -> None:
    if slowest.capacity_rows(table) is not None:
        reason = "evicts rows, so that a slower tier must hold all of them; there is none"
        raise StoreError(slowest.name, table, reason)


def _check_has_rows(store: DurableStore, table: str) -> None:
    if not store.count(table):
        raise StoreError(store.name, table, "has no rows, and initialize_after_startup is false: nothing is loaded")


def _load_volatile(store: Store, source: TableSource, truth: Store | None, first_rows: FirstRows) -> None:
    """Fill a store with some rows of the file.

    ``truth``: the store that has the rows; None: the file.
    """
    _announce(source, store)
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


def _may_fill_others(truth: Store | None, spec: TableSpec) -> bool:
    """Whether faster stores can be filled from the store that has the rows, or, if it is None, from the files."""
    if truth is None or may_be_copied(truth, spec.row_dtype):
        return True
    reason = f"its {spec.row_dtype} rows would be rounded twice"
    logger.warning("%s is served from %s alone: in a faster tier %s", spec.name, truth.name, reason)
    return False


def _has_changed(store: DurableStore, source: TableSource) -> bool:
    """Whether rows came into it that are not the files'."""
    record = store.loaded_from(source.spec.name)
    return record is not None and record.endswith(CHANGED)


def _announce(source: TableSource, store: Store) -> None:
    logger.info("loading %s, %s rows, into %s", source.spec.name, f"{source.model.rows:,}", store.name)
