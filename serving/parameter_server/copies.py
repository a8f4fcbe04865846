"""Rows of a table that are kept outside the tiers, in a GPU's cache say, and never stay behind what the tiers have."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from serving.errors import UnknownModelError
from serving.parameter_server.lookup import TierLookup
from serving.parameter_server.table import ServedTable
from serving.storage.store import Keys, Mask, Vectors

# Called with keys, int64[N], that have changed in all tiers; when it returns, no copy of their old rows may be found.
OnChange = Callable[[Keys], None]


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows as the tiers had them.

    Attributes:
        keys: int64[N], distinct.
        rows: float32[N, D]; of a key that no tier holds the table's default value, which is not to be kept.
        found: bool[N].
        moment: ``VersionClock.now`` before the first was read.
    """

    keys: Keys
    rows: Vectors
    found: Mask
    moment: int


class TableCopies:
    """One holder of copies of a table's rows. Every method may be called from any thread.

    A row that is read may have changed before it is stored, so it is stored inside ``storing``, which leaves out what
    has changed since. Whoever changes rows calls ``on_change`` when all tiers have them, before he tells that it is
    done: a copy is either left out here, or removed there.
    """

    def __init__(self, held: ServedTable, lookup: TierLookup, on_change: OnChange) -> None:
        """Listen to what changes; ``close`` ends that."""
        self._held = held
        self._lookup = lookup
        self._on_change = on_change
        held.clock.listen(on_change)

    def read(self, keys: Keys, is_request: bool) -> ReadRows:
        """Read rows from the tiers.

        Args:
            keys: int64[N], distinct.
            is_request: a client asked for them: they are counted, and promoted to faster tiers.

        Raises:
            UnknownModelError: the model has been unloaded.
            StoreError: a store did not answer that may hold a key which was not found.
        """
        if self._held.clock.is_gone:
            raise UnknownModelError(f"table {self._held.name!r} was unloaded with its model")
        moment = self._held.clock.now()
        rows, found = self._lookup.rows(self._held, np.ascontiguousarray(keys), is_request)
        if self._held.clock.is_gone:  # keys may be unknown for that reason alone
            raise UnknownModelError(f"table {self._held.name!r} was unloaded during the lookup")
        return ReadRows(keys, rows, found, moment)

    def storing(self, read: ReadRows) -> AbstractContextManager[Mask]:
        """Which keys certainly have not changed since they were read: bool[N]; rows of these may be kept, if found.

        They are to be stored inside the block, which waits for no writer. Of a table that was unloaded it is none.
        """
        return self._held.clock.storing(read.keys, read.moment)

    def close(self) -> None:
        """Listen no more. Closing twice is allowed."""
        self._held.clock.unlisten(self._on_change)
