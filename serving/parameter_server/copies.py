"""Copies of a table's rows outside the tiers, for example in a GPU's cache; no copy outlives a change."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from serving.errors import UnknownModelError
from serving.parameter_server.lookup import TierLookup, Times
from serving.parameter_server.table import Table
from serving.storage.store import Keys, Mask, Vectors

# Called with keys, int64[N], that changed in all tiers. When it returns, no copy of their old rows may be found.
OnChange = Callable[[Keys], None]


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows as the tiers had them.

    Attributes:
        keys: int64[N], distinct.
        rows: float32[N, D]; a key that no tier holds has the table's default value, which must not be kept.
        found: bool[N].
        version: ``VersionClock.now`` before the first row was read.
    """

    keys: Keys
    rows: Vectors
    found: Mask
    version: int

    def part(self, rows: slice) -> Self:
        """Return some of the rows."""
        return replace(self, keys=self.keys[rows], rows=self.rows[rows], found=self.found[rows])


class TableCopies:
    """One holder of copies of a table's rows. Every method may be called from any thread.

    A row may change after it is read and before it is stored. Copies are therefore stored inside ``storing``, which
    leaves out rows that changed. A change calls ``on_change`` when all tiers have it, before ``insert`` or ``evict``
    returns. So a copy of an old row is either left out or removed.

    Attributes:
        held: the table.
        lookup: reads its rows.
    """

    def __init__(self, held: Table, lookup: TierLookup, on_change: OnChange) -> None:
        """Listen to changes until ``close``."""
        self.held = held
        self.lookup = lookup
        self._on_change = on_change
        held.clock.listen(on_change)
        held.health.copies.add(self)

    def read(self, keys: Keys, is_request: bool) -> ReadRows:
        """Read rows from the tiers.

        Args:
            keys: int64[N], distinct.
            is_request: a client asked for the rows: the tiers' calls are counted, and rows promoted to faster tiers.

        Raises:
            UnknownModelError: the model has been unloaded.
            StoreError: a key was not found, and the truth did not answer.
        """
        if self.held.clock.is_gone:
            raise UnknownModelError(f"table {self.held.name!r} was unloaded with its model")
        version = self.held.clock.now()
        rows, found = self.lookup.rows(self.held, np.ascontiguousarray(keys), is_request)
        if self.held.clock.is_gone:  # which alone makes keys unknown
            raise UnknownModelError(f"table {self.held.name!r} was unloaded during the lookup")
        return ReadRows(keys, rows, found, version)

    def storing(self, read: ReadRows) -> AbstractContextManager[Mask]:
        """Yield which keys have certainly not changed since they were read: bool[N].

        Store the rows of these keys, if they were found, inside the block. It waits for no writer. After the table was
        unloaded, no key may be stored.
        """
        return self.held.clock.versions.storing([self.held.clock], [([read.keys], read.version)])

    def close(self) -> None:
        """Stop listening. Closing twice is allowed."""
        self.held.clock.unlisten(self._on_change)
        self.held.health.copies.discard(self)


@dataclass(frozen=True, slots=True)
class ReadTables:
    """Rows of several tables as the tiers had them; see ``ReadRows``.

    Attributes:
        keys: int64[N] of each table.
        rows: float32[N, D] of each table.
        found: bool[...], table after table.
        version: before the first row was read.
    """

    keys: Sequence[Keys]
    rows: Sequence[Vectors]
    found: Mask
    version: int


class ModelCopies:
    """Copies of all tables of one model, read and stored in one call. Every method may be called from any thread."""

    def __init__(self, tables: Sequence[TableCopies]) -> None:
        """Take at least one table. Each still listens to its own changes."""
        self._held = [one.held for one in tables]
        self._lookup = tables[0].lookup

    def read(self, keys: Sequence[Keys], times: Times | None = None) -> ReadTables:
        """Read rows of each table for a client; see ``TableCopies.read``.

        Args:
            keys: int64[N] of each table, distinct.
            times: how often the client's request has each key, table after table; None: once.
        """
        version = self._held[0].clock.now()
        self._require_loaded()
        rows, found = self._lookup.rows_of_tables(self._held, keys, times)
        self._require_loaded()
        return ReadTables(keys, rows, found, version)

    def answered(self, keys: Sequence[int], defaulted_keys: NDArray[np.int64] | None) -> None:
        """Count an answered request; see ``RequestCounts.answered``."""
        self._held[0].counting.requests.answered(keys, defaulted_keys)

    def storing(self, reads: Sequence[ReadTables]) -> AbstractContextManager[Mask]:
        """Yield which keys have certainly not changed since they were read; see ``TableCopies.storing``.

        The keys are in one bool[N], read after read, table after table.
        """
        clocks = [held.clock for held in self._held]
        return clocks[0].versions.storing(clocks, [(read.keys, read.version) for read in reads])

    def _require_loaded(self) -> None:
        for held in self._held:
            if held.clock.is_gone:  # which alone makes keys unknown
                raise UnknownModelError(f"table {held.name!r} was unloaded with its model")
