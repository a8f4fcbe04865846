"""Online updates: one call changes rows in every tier.

The source of truth is written first. If that fails, the call fails and no cache is written. Then each cache takes
the change, the slowest first. A cache that does not take it is bypassed for this table, and the call succeeds: the
truth has the rows. The cache is refilled in the background. Until the call returns, a lookup may find the old row
in one tier and the new row in another. Afterwards it finds only the new row.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from serving.errors import UnknownModelError
from serving.parameter_server.arguments import check_keys, check_rows
from serving.parameter_server.table import Table
from serving.storage.row_codec import rounded
from serving.storage.store import Change, Keys, Vectors


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
