"""Copies of rows outside the tiers, for example in a GPU's cache; no copy outlives a change."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.parameter_server.lookup import Times, look_up
from serving.parameter_server.table import Table
from serving.storage.store import Keys, Mask, Vectors

# Called with keys, int64[N], that changed in all tiers. When it returns, no copy of their old rows may be found.
OnChange = Callable[[Keys], None]


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows as the tiers had them.

    Attributes:
        keys: int64[N] of each table, distinct.
        rows: float32[N, D] of each table; a key that no tier holds has the table's default value, which must not be
            kept.
        found: bool[...], table after table.
        version: ``VersionClock.now`` before the first row was read.
    """

    keys: Sequence[Keys]
    rows: Sequence[Vectors]
    found: Mask
    version: int


class Copies:
    """One holder of copies of rows of some tables of a model. Every method may be called from any thread.

    A row may change after it is read and before it is stored. Copies are therefore stored inside ``storing``, which
    leaves out rows that changed. A change calls ``on_change`` when all tiers have it, before ``insert`` or ``evict``
    returns. So a copy of an old row is either left out or removed.

    Attributes:
        tables: the tables, at least one.
    """

    def __init__(self, tables: Sequence[Table], on_change: OnChange | None = None) -> None:
        """Listen to changes of each table until ``close``; without ``on_change``, other holders listen."""
        self.tables = tuple(tables)
        self._on_change = on_change
        if on_change is not None:
            for table in self.tables:
                table.clock.listen(on_change)
                table.health.copies.add(self)

    def read(self, keys: Sequence[Keys], times: Times | None = None, *, is_request: bool = True) -> ReadRows:
        """Read rows from the tiers.

        Args:
            keys: int64[N] of each table, distinct.
            times: how often the client's request has each key, table after table; None: once.
            is_request: a client asked for the rows: the tiers' calls are counted, and rows promoted to faster tiers.

        Raises:
            UnknownModelError: the model has been unloaded.
            StoreError: a key was not found, and the truth did not answer.
        """
        version = self.tables[0].clock.now()
        self.check_loaded()
        rows, found = look_up(self.tables, keys, times, is_request)
        self.check_loaded()
        return ReadRows(keys, rows, found, version)

    def check_loaded(self) -> None:
        """See ``Table.check_loaded``; the tables of a model are unloaded together."""
        self.tables[0].check_loaded()

    def answered(self, keys: Sequence[int], defaulted_keys: NDArray[np.int64] | None) -> None:
        """Count an answered request; see ``RequestCounts.answered``."""
        self.tables[0].counting.requests.answered(keys, defaulted_keys)

    def storing(self, reads: Sequence[ReadRows]) -> AbstractContextManager[Mask]:
        """Yield which keys have certainly not changed since they were read: bool[N], read after read.

        Store the rows of these keys, if they were found, inside the block. It waits for no writer. After the table was
        unloaded, no key may be stored.
        """
        clocks = [table.clock for table in self.tables]
        return clocks[0].versions.storing(clocks, [(read.keys, read.version) for read in reads])

    def close(self) -> None:
        """Stop listening. Closing twice is allowed."""
        if self._on_change is not None:
            for table in self.tables:
                table.clock.unlisten(self._on_change)
                table.health.copies.discard(self)
