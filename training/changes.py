"""What changed in a table since it was published last: rows that a step or a load wrote, and keys that have no row."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.host import TrainingTable
from training.row_file import TableRows

Ints = NDArray[np.int64]
_PART_ROWS = 65_536
_EVERY_STEP = 2**31 - 1  # rows that changed after it are those whose last step is not known
_NOTHING: Ints = np.empty(0, np.int64)
_NO_ROWS: NDArray[np.bool_] = np.empty(0, np.bool_)


def sorted_keys(parts: Sequence[Ints]) -> Ints:
    """Return the distinct keys of all parts, sorted. ``np.unique`` of NumPy 2.3 takes seconds for a million of them."""
    keys = np.sort(np.concatenate([_NOTHING, *parts]))
    distinct: Ints = keys[np.concatenate([[True], keys[1:] != keys[:-1]])[: keys.size]]
    return distinct


class TableChanges:
    """The changes of one table. At first, every row is one.

    The steps of the last updates say which rows a step has changed. Everything else is noted: rows that are loaded or
    removed, and with ``max_rows`` the keys that were published, because a new row may replace any of them.
    """

    def __init__(self, table: TrainingTable, has_max_rows: bool) -> None:
        """Begin to note changes."""
        self._table = table
        self._has_max_rows = has_max_rows
        self._forget()
        self._next = (self._since, self._unstepped, self._published)
        self._loaded_before, self._removed_before = 0, 0

    def _forget(self) -> None:
        self._since = -1  # the step up to which changes were published
        self._unstepped = _NO_ROWS  # whether each row was published without a step
        self._published = _NOTHING  # with max_rows: the key of each row
        self._loaded: list[Ints] = []  # keys
        self._removed: list[Ints] = []  # keys that a clear has removed

    def loaded(self, keys: Ints) -> None:
        """Note that rows are written outside of a step."""
        self._loaded.append(np.array(keys))

    def clearing(self) -> None:
        """Note that all rows are about to be removed."""
        rows = self._table.changed_rows()
        parts = (rows[first : first + _PART_ROWS] for first in range(0, len(rows), _PART_ROWS))
        removed = [*(self._table.read(part)[0] for part in parts), *self._removed, self._published]
        self._forget()
        self._removed = [sorted_keys(removed)]

    def collect(self) -> tuple[Ints, Iterator[TableRows]]:
        """Return the keys that have no row any more, and the changed rows, part by part.

        Training must not go on before the last part. ``commit`` says that they are published.
        """
        table = self._table
        deleted, moved, replaced = self._replaced()
        is_unstepped = np.zeros(len(table), np.bool_)
        is_unstepped[table.changed_rows(_EVERY_STEP)] = True
        is_changed = np.zeros(len(table), np.bool_)
        is_changed[table.changed_rows(self._since)] = True
        was_published = self._unstepped.copy()
        was_published[replaced] = False
        is_changed[: was_published.size] &= ~(was_published & is_unstepped[: was_published.size])
        written = table.find(np.concatenate([_NOTHING, *self._loaded]))
        is_changed[written[written >= 0]] = True
        is_changed[moved] = True
        self._next = table.step, is_unstepped, _NOTHING
        self._loaded_before, self._removed_before = len(self._loaded), len(self._removed)
        return deleted, self._parts(np.flatnonzero(is_changed))

    def _replaced(self) -> tuple[Ints, Ints, Ints]:
        """Return keys without a row, new numbers of rows that moved, and numbers at which other rows may be now."""
        rows = self._table.find(self._published)
        places = np.arange(self._published.size)
        is_elsewhere = rows != places
        removed = [self._published[rows < 0]]
        for keys in self._removed:
            removed.append(keys[self._table.find(keys) < 0])
        return sorted_keys(removed), rows[is_elsewhere & (rows >= 0)], places[is_elsewhere]

    def _parts(self, changed: Ints) -> Iterator[TableRows]:
        table = self._table
        published = None
        if self._has_max_rows:
            published = np.empty(len(table), np.int64)
            rows = table.find(self._published)
            published[rows[rows >= 0]] = self._published[rows >= 0]
        for first in range(0, changed.size, _PART_ROWS):
            numbers = changed[first : first + _PART_ROWS]
            part = TableRows(*table.read(numbers))
            if published is not None:
                published[numbers] = part.keys
            yield part
        if published is not None:
            self._next = (*self._next[:2], published)

    def commit(self) -> None:
        """Note that what ``collect`` returned is published."""
        self._since, self._unstepped, self._published = self._next
        del self._loaded[: self._loaded_before]
        del self._removed[: self._removed_before]

    def commit_all(self) -> None:
        """Note that the present rows are what was published."""
        self._forget()
        _, parts = self.collect()
        if self._has_max_rows:
            for _ in parts:
                pass
        self.commit()
