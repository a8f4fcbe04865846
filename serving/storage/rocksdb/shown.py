"""Changes of a table that another process writes, shown until this process's view of the database has them."""

import numpy as np

from kernels.errors import TableFullError
from kernels.host import HostTable
from serving.storage.store import Keys, Mask, Vectors

_FIRST_ROWS = 256


class ShownChanges:
    """The changes of one table in two generations. One thread at a time changes them; readers take no lock.

    New changes go into the young generation. ``rotate`` makes it the old generation, which ``drop_old`` forgets once
    the view has its changes.
    """

    def __init__(self, dim: int) -> None:
        """Show nothing."""
        self._dim = dim
        # Young first; replaced as a whole. A removed key has a row of NaN, which no change has. So one look finds the
        # newest change of a key.
        self._generations: tuple[HostTable, ...] = ()

    def __len__(self) -> int:
        """Changed keys, those of both generations counted twice."""
        return sum(map(len, self._generations))

    @property
    def size_bytes(self) -> int:
        """The bytes of the keys and their rows."""
        return len(self) * (8 + 4 * self._dim)

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
            is_held = generation.fetch(keys[places], rows)
            places, rows = places[is_held], rows[is_held]
            is_there = ~np.isnan(rows[:, 0])
            out[places], found[places] = np.where(is_there[:, None], rows, np.float32(0)), is_there
            is_left[places] = False
        return is_left

    def change(self, keys: Keys, rows: Vectors | None) -> None:
        """Show rows, the last of duplicate keys; None: show that the keys are removed."""
        if rows is None:
            rows = np.full((keys.size, self._dim), np.nan, dtype=np.float32)
        young = self._generations[0] if self._generations else HostTable(self._dim, _FIRST_ROWS)
        self._generations = (_with_room(young, keys, rows), *self._generations[1:])

    def forget(self, keys: Keys) -> None:
        """Let the view answer for keys again: it has newer changes of them."""
        for generation in reversed(self._generations):  # a reader must not find an old change after a new one
            generation.evict(keys)

    def rotate(self) -> None:
        """Begin a young generation, as large as the old one has become; there is no old generation."""
        capacity_rows = self._generations[0].capacity_rows if self._generations else _FIRST_ROWS
        self._generations = (HostTable(self._dim, capacity_rows), *self._generations)

    def drop_old(self) -> None:
        """Forget the old generation."""
        self._generations = self._generations[:1]


def _with_room(table: HostTable, keys: Keys, rows: Vectors) -> HostTable:
    """Insert rows, and return the table; if it has no room, a larger copy. Readers may go on with the old table."""
    try:
        table.insert(keys, rows)
    except TableFullError:
        larger = HostTable(table.dim, 2 * (len(table) + keys.size))
        for held_keys, held_rows in table.items():
            larger.insert(held_keys, held_rows)
        larger.insert(keys, rows)
        return larger
    return table
