"""Online updates: one call changes rows in every tier.

The source of truth is written first. If that fails, the call fails and no cache is written. Then each cache takes
the change, the slowest first. A cache that does not take it is bypassed for this table, and the call succeeds: the
truth has the rows. The cache is refilled in the background. Until the call returns, a lookup may find the old row
in one tier and the new row in another. Afterwards it finds only the new row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from serving.errors import RequestError, StoreError, StoreFullError, UnknownModelError
from serving.model.sparse_rows import KeyType, fault_of_values, key_range
from serving.parameter_server.table import ServedTable
from serving.parameter_server.tier import Tier
from serving.storage.row_codec import rounded
from serving.storage.store import Keys, RowPtrs, Store, Vectors, Weights


def check_keys(table: str, keys: Keys, key_type: KeyType = "I64") -> None:
    """Refuse keys that no table of ``key_type`` can hold.

    Raises:
        RequestError: ``keys`` is not int64[N], or a key is reserved or outside the range of a uint32 model.
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
    """Refuse an array that cannot hold offsets of bags; the pooling kernel checks the values.

    Raises:
        RequestError: ``row_ptrs`` does not have one dimension, or is empty.
    """
    if not isinstance(row_ptrs, np.ndarray) or row_ptrs.ndim != 1 or not row_ptrs.size:
        wanted = "int32[R + 1] or int64[R + 1]"
        raise RequestError(f"table {table!r}: expected row_ptrs of {wanted}, got {_form_of(row_ptrs)}")


def insert(tiers: Sequence[Tier], table: ServedTable, keys: Keys, rows: Vectors) -> None:
    """See ``ParameterServer.insert``; ``tiers`` are fastest first."""
    check_keys(table.name, keys, table.key_type)
    if not isinstance(rows, np.ndarray) or rows.shape != (keys.size, table.dim) or rows.dtype != np.float32:
        wanted = f"float32[{keys.size}, {table.dim}]"
        raise RequestError(f"table {table.name!r}: expected rows of {wanted}, got {_form_of(rows)}")
    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
    if fault := fault_of_values(keys, rows):  # one such row would spoil the answer to every request with its key
        raise RequestError(f"table {table.name!r}: {fault}")
    rounded(tiers[0].name, table.name, table.row_dtype, keys, rows)  # refuses values before any tier is written
    _change(
        tiers,
        table,
        keys,
        lambda truth: truth.insert(table.name, keys, rows),
        lambda cache: _overwrite(cache, table.name, keys, rows),
    )


def evict(tiers: Sequence[Tier], table: ServedTable, keys: Keys) -> None:
    """See ``ParameterServer.evict``; ``tiers`` are fastest first."""
    check_keys(table.name, keys, table.key_type)
    keys = np.ascontiguousarray(keys)

    def remove(store: Store) -> None:
        store.evict(table.name, keys)

    def remove_from_truth(store: Store) -> None:
        if table.removed_keys is not None:
            table.removed_keys.update(keys.tolist())
        remove(store)

    _change(tiers, table, keys, remove_from_truth, remove)


def _change(
    tiers: Sequence[Tier],
    table: ServedTable,
    keys: Keys,
    write: Callable[[Store], None],
    write_cache: Callable[[Store], None],
) -> None:
    """Write a change of ``keys`` to the truth, then to every cache.

    Raises:
        StoreError: the truth did not take it.
    """
    *caches, truth = tiers
    with table.clock.lock:
        if table.clock.is_gone:
            raise UnknownModelError(f"table {table.name!r} has been unloaded")
        if not table.is_written:
            truth.store.write_flags(table.name, changed=True, current_caches=())
        try:
            table.is_uncertain, was_uncertain = True, table.is_uncertain
            write(truth.store)
            table.is_uncertain = was_uncertain
            for cache in reversed(caches):
                if not table.is_written:
                    cache.write(table, lambda store: store.write_flags(table.name, changed=True))
                cache.write(table, write_cache)
            table.is_written = True
        finally:
            table.clock.note(keys)


def _overwrite(store: Store, table: str, keys: Keys, rows: Vectors) -> None:
    """Write rows to a cache; if it has no room for new keys, write over those that it holds."""
    try:
        store.insert(table, keys, rows)
    except StoreFullError:
        found = store.fetch(table, keys, np.empty_like(rows))
        try:
            store.insert(table, keys[found], rows[found])
        except StoreError:
            store.evict(table, keys[found])  # an old row must not stay


def _form_of(given: Any) -> str:
    return f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
