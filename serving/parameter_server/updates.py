"""Online updates: one call changes rows in every tier.

The slowest tier is written first. What it has acknowledged survives, and no faster tier ever holds a newer row than it:
where a call ends half-way, a restart at worst brings back what was not promised. Until the call returns a lookup may
meet the old row in one tier and the new one in another; afterwards only the new one. Where the slowest tier fails, no
other has been written; where another one does, all others are, and lookups of this process pass it over until it has
forgotten its old rows (``Backlog``). Either way the call is to be made again, which does no harm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serving.errors import RequestError, StoreError, StoreFullError, UnknownModelError
from serving.model.sparse_rows import KeyType, fault_of_values, key_range
from serving.parameter_server.served_table import ServedTable
from serving.parameter_server.tier import Tier
from serving.storage.row_dtype import rounded
from serving.storage.store import (
    DurableStore,
    Keys,
    RowPtrs,
    SealedStore,
    Store,
    Vectors,
    Weights,
    WitnessStore,
)


def check_keys(table: str, keys: Keys, key_type: KeyType = "I64") -> None:
    """Refuse keys that no table of ``key_type`` can hold.

    Raises:
        RequestError: ``keys`` is not int64[N], or one of them is reserved or beyond what a uint32 model has.
    """
    if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype != np.int64:
        raise RequestError(f"table {table!r}: expected keys of int64[N], got {_form_of(keys)}")
    smallest, largest = key_range(key_type)
    if keys.size and (keys.min() < smallest or keys.max() > largest):
        at = int(np.argmax((keys < smallest) | (keys > largest)))
        fault = "is reserved" if key_type == "I64" else f"is not 0 to {largest}, as the model's uint32 keys are"
        raise RequestError(f"table {table!r}: key {keys[at]} at position {at} {fault}")


def check_weights(table: str, keys: Keys, weights: Weights) -> None:
    """Refuse weights that are not one per key.

    Raises:
        RequestError: ``weights`` is not float32[N].
    """
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32 or weights.shape != keys.shape:
        raise RequestError(f"table {table!r}: expected weights of float32[{keys.size}], got {_form_of(weights)}")


def check_row_ptrs(table: str, row_ptrs: RowPtrs) -> None:
    """Refuse what cannot be offsets of bags; their values are checked where rows are pooled.

    Raises:
        RequestError: ``row_ptrs`` is no array of one dimension, or empty.
    """
    if not isinstance(row_ptrs, np.ndarray) or row_ptrs.ndim != 1 or not row_ptrs.size:
        wanted = "int32[R + 1] or int64[R + 1]"
        raise RequestError(f"table {table!r}: expected row_ptrs of {wanted}, got {_form_of(row_ptrs)}")


def insert(tiers: Sequence[Tier], held: ServedTable, keys: Keys, rows: Vectors) -> None:
    """See ``ParameterServer.insert``; ``tiers`` are fastest first."""
    check_keys(held.name, keys, held.key_type)
    if not isinstance(rows, np.ndarray) or rows.shape != (keys.size, held.dim) or rows.dtype != np.float32:
        wanted = f"float32[{keys.size}, {held.dim}]"
        raise RequestError(f"table {held.name!r}: expected rows of {wanted}, got {_form_of(rows)}")
    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)  # or one tier would take them, another not
    if fault := fault_of_values(keys, rows):  # it would spoil the answer to every request that has the key
        raise RequestError(f"table {held.name!r}: {fault}")
    rounded(tiers[0].name, held.name, held.row_dtype, keys, rows)  # before the first tier is written
    slowest = tiers[-1].store

    def write(store: Store) -> None:
        if store is slowest:
            store.insert(held.name, keys, rows)
        else:
            _overwrite(store, held.name, keys, rows)

    _change(tiers, held, keys, write)


def evict(tiers: Sequence[Tier], held: ServedTable, keys: Keys) -> None:
    """See ``ParameterServer.evict``; ``tiers`` are fastest first."""
    check_keys(held.name, keys, held.key_type)
    keys = np.ascontiguousarray(keys)
    _change(tiers, held, keys, lambda store: store.evict(held.name, keys))


def _form_of(given: Any) -> str:
    return f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"


def _change(tiers: Sequence[Tier], held: ServedTable, keys: Keys, write: Callable[[Store], object]) -> None:
    """Write a change of ``keys`` to every tier, the slowest first.

    Raises:
        StoreError: a tier did not take it, the first that did not. Where that was not the slowest, the others have it.
    """
    *faster, slowest = tiers
    failures: list[StoreError] = []
    with held.changes.lock:
        _check_served(held)
        for tier in faster:
            tier.backlog.make_up(held.name)  # else it would grow while the tier is down
        witness = slowest.store if isinstance(slowest.store, WitnessStore) and faster else None
        is_mended = witness is not None and not _may_lack_older_changes(faster, witness, held.name)
        try:
            _mark_changed(tiers, held.name, witness)
            if witness is not None:
                witness.note_others(held.name, are_behind=True, seal=witness.next_seal(held.name))
            write(slowest.store)
            for tier in reversed(faster):
                try:
                    write(tier.store)
                    tier.backlog.took_change(held.name, keys)
                except StoreError as err:
                    tier.backlog.missed_change(held.name, keys)
                    failures.append(err)
            if witness is not None and is_mended and not failures:
                witness.note_others(held.name, are_behind=False)
        finally:
            held.changes.note(keys)
    if failures:
        raise failures[0]


def _may_lack_older_changes(faster: Sequence[Tier], witness: WitnessStore, table: str) -> bool:
    """Whether one of ``faster`` outlives its process and was not loaded in this one, though it may be behind.

    Another process may have left it so: that must stay noted for the next one that loads it.
    """
    is_kept = any(isinstance(tier.store, DurableStore) and not tier.settings.is_initialized for tier in faster)
    return is_kept and witness.others_are_behind(table)


def _mark_changed(tiers: Sequence[Tier], table: str, witness: WitnessStore | None) -> None:
    """From now on the faster tiers are filled from the durable ones, not from the model's files.

    Those that bear seals get that of the change before the ``witness`` does: it never has one that they lack.
    """
    for tier in reversed(tiers):
        store = tier.store
        if witness is not None and isinstance(store, SealedStore):
            store.put_seal(table, witness.next_seal(table), witness.seal(table), has_changed=True)
        elif isinstance(store, DurableStore):
            store.mark_changed(table)


def _overwrite(store: Store, table: str, keys: Keys, rows: Vectors) -> None:
    """Write rows to a store before a slower one, which has them: where there is no room, only over those it holds."""
    try:
        store.insert(table, keys, rows)
    except StoreFullError:
        found = store.fetch(table, keys, np.empty_like(rows))
        try:
            store.insert(table, keys[found], rows[found])
        except StoreError:
            store.evict(table, keys[found])  # an old row must not stay


def _check_served(held: ServedTable) -> None:
    if held.changes.is_gone:
        raise UnknownModelError(f"table {held.name!r} has been unloaded")
