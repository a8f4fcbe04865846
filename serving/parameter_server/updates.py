"""Online updates: one call changes rows in every tier.

The source of truth is written first. If that fails, the call fails and no cache is written. Then each cache takes
the change, the slowest first. A cache that does not take it is bypassed for this table, and the call succeeds: the
truth has the rows. The cache is refilled in the background. Until the call returns, a lookup may find the old row
in one tier and the new row in another. Afterwards it finds only the new row.
"""

from collections.abc import Callable, Sequence

import numpy as np

from serving.errors import StoreError, StoreFullError, UnknownModelError
from serving.parameter_server.arguments import check_keys, check_rows
from serving.parameter_server.table import ServedTable
from serving.parameter_server.tier import Tier
from serving.storage.row_codec import rounded
from serving.storage.store import Keys, Store, Vectors


def insert(tiers: Sequence[Tier], table: ServedTable, keys: Keys, rows: Vectors) -> None:
    """See ``ParameterServer.insert``; ``tiers`` are fastest first."""
    check_keys(table.name, keys, table.key_type)
    check_rows(table.name, keys, rows, table.dim)
    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
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
