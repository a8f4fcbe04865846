"""Online updates: one call changes rows in every tier.

The slowest tier is written first. What it has acknowledged survives, and no faster tier ever holds a newer row than it:
where a call ends half-way, a restart at worst brings back what was not promised. Until the call returns a lookup may
meet the old row in one tier and the new one in another; afterwards only the new one. Where the call fails, the tiers
before the one that failed have the new rows, the others the old: it is to be made again, which does no harm.
"""

import numpy as np

from serving.errors import RequestError, StoreError, StoreFullError, UnknownModelError
from serving.model.sparse_rows import KeyType, key_range
from serving.parameter_server.served_table import ServedTable
from serving.storage.row_dtype import rounded
from serving.storage.store import DurableStore, Keys, Store, Vectors, Weights


def check_keys(table: str, keys: Keys, key_type: KeyType = "I64") -> None:
    """Refuse keys that no table of ``key_type`` can hold.

    Raises:
        RequestError: ``keys`` is not int64[N], or one of them is reserved or beyond what a uint32 model has.
    """
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise RequestError(f"table {table!r}: expected keys of int64[N], got {keys.dtype}{list(keys.shape)}")
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
    if weights.dtype != np.float32 or weights.shape != keys.shape:
        came = f"{weights.dtype}{list(weights.shape)}"
        raise RequestError(f"table {table!r}: expected weights of float32[{keys.size}], got {came}")


def insert(stores: tuple[Store, ...], held: ServedTable, keys: Keys, rows: Vectors) -> None:
    """See ``ParameterServer.insert``; ``stores`` are in the server's order, fastest first."""
    check_keys(held.name, keys, held.key_type)
    if rows.shape != (keys.size, held.dim) or rows.dtype != np.float32:
        came = f"{rows.dtype}{list(rows.shape)}"
        raise RequestError(f"table {held.name!r}: expected rows of float32[{keys.size}, {held.dim}], got {came}")
    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)  # or one tier would take them, another not
    rounded(stores[0].name, held.name, held.row_dtype, keys, rows)  # before the first tier is written
    *faster, slowest = stores
    with held.changes.lock:
        _check_served(held)
        try:
            _mark_changed(stores, held.name)
            slowest.insert(held.name, keys, rows)
            for store in reversed(faster):
                _overwrite(store, held.name, keys, rows)
        finally:
            held.changes.note(keys)


def evict(stores: tuple[Store, ...], held: ServedTable, keys: Keys) -> None:
    """See ``ParameterServer.evict``; ``stores`` are in the server's order, fastest first."""
    check_keys(held.name, keys, held.key_type)
    keys = np.ascontiguousarray(keys)
    with held.changes.lock:
        _check_served(held)
        try:
            _mark_changed(stores, held.name)
            for store in reversed(stores):
                store.evict(held.name, keys)
        finally:
            held.changes.note(keys)


def _mark_changed(stores: tuple[Store, ...], table: str) -> None:
    """From now on the faster tiers are filled from the durable ones, not from the model's files."""
    for store in reversed(stores):
        if isinstance(store, DurableStore):
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
