"""Changes of a table that another process writes, shown until this process's view of the database has them."""

from dataclasses import dataclass

import numpy as np

from kernels.errors import TableFullError
from kernels.host import HostTable, RowDtype
from serving.storage.store import Keys, Mask, Vectors

_FIRST_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Generation:
    """Changes, the newest of each key. A reader looks up the rows, then the removed keys, so it needs no lock."""

    rows: HostTable
    removed: HostTable  # one column: a set of keys


class ShownChanges:
    """The changes of one table in two generations. One thread at a time changes them; readers take no lock.

    New changes go into the young generation. ``rotate`` makes it the old generation, which ``drop_old`` forgets once
    the view has its changes.
    """

    def __init__(self, dim: int, row_dtype: RowDtype) -> None:
        """Show nothing."""
        self._dim, self._row_dtype = dim, row_dtype
        # Young first; replaced as a whole.
        self._generations: tuple[_Generation, ...] = (self._new(),)

    def __len__(self) -> int:
        """Changed keys, those of both generations counted twice."""
        return sum(len(each.rows) + len(each.removed) for each in self._generations)

    @property
    def has_old(self) -> bool:
        """Whether there is an old generation."""
        return len(self._generations) > 1

    def fetch(self, keys: Keys, out: Vectors, found: Mask) -> Mask:
        """Read the keys that changed into ``out`` and ``found``; returns the keys that did not: bool[N]."""
        is_left = np.ones(keys.size, dtype=np.bool_)
        for generation in self._generations:
            places = np.flatnonzero(is_left)
            if not places.size:
                break
            rows = np.empty((places.size, self._dim), dtype=np.float32)
            is_held = generation.rows.fetch(keys[places], rows)
            out[places[is_held]], found[places[is_held]] = rows[is_held], True
            gone = places[~is_held]
            gone = gone[generation.removed.fetch(keys[gone], np.empty((gone.size, 1), dtype=np.float32))]
            out[gone], found[gone] = 0.0, False
            is_left[places[is_held]] = is_left[gone] = False
        return is_left

    def change(self, keys: Keys, rows: Vectors | None) -> None:
        """Show rows, the last of duplicate keys; None: show that the keys are removed."""
        none = np.zeros((keys.size, 1), dtype=np.float32)
        young, *old = self._generations
        if rows is None:
            young = _Generation(young.rows, _with_room(young.removed, keys, none))
            self._generations = (young, *old)
            young.rows.evict(keys)
        else:
            young = _Generation(_with_room(young.rows, keys, rows), young.removed)
            self._generations = (young, *old)
            young.removed.evict(keys)

    def forget(self, keys: Keys) -> None:
        """Let the view answer for keys again: it has newer changes of them."""
        for generation in self._generations:
            generation.rows.evict(keys)
            generation.removed.evict(keys)

    def rotate(self) -> None:
        """Begin a young generation; there is no old generation."""
        self._generations = (self._new(), *self._generations)

    def drop_old(self) -> None:
        """Forget the old generation."""
        self._generations = self._generations[:1]

    def _new(self) -> _Generation:
        return _Generation(HostTable(self._dim, _FIRST_ROWS, self._row_dtype), HostTable(1, _FIRST_ROWS))


def _with_room(table: HostTable, keys: Keys, rows: Vectors) -> HostTable:
    """Insert rows, and return the table; if it has no room, a larger copy. Readers may go on with the old table."""
    try:
        table.insert(keys, rows)
    except TableFullError:
        larger = HostTable(table.dim, 2 * (len(table) + keys.size), table.row_dtype)
        for held_keys, held_rows in table.items():
            larger.insert(held_keys, held_rows)
        larger.insert(keys, rows)
        return larger
    return table
