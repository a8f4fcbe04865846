"""Rows of ids, as arrays."""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kernels.host import first_outside

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class IdRows(NamedTuple):
    """The ids of R rows.

    Attributes:
        ids: int64[N], row after row.
        row_ptrs: int64[R + 1], where the ids of each row begin.
        places: int64[N], where each id was in the caller's tensor; -1: the id is none of the caller's. None: the ids
            are the caller's, in the same order.
    """

    ids: Ints
    row_ptrs: Ints
    places: Ints | None = None

    @classmethod
    def read(cls, place: str, rows: Ints, ids: Ints, count: int) -> Self:
        """Take ids with the row of each, in any order. Ids of one row keep their order.

        Raises:
            ValueError: a row is not one of 0 to ``count`` - 1.
        """
        places = None
        if (rows[1:] < rows[:-1]).any():
            places = np.argsort(rows, kind="stable")
            rows, ids = rows[places], ids[places]
        if len(rows) and not 0 <= rows[0] <= rows[-1] < count:
            row = rows[0] if rows[0] < 0 else rows[-1]
            raise ValueError(f"{place}: expected rows from 0 to {count - 1}, as dense_shape says, got row {row}")
        row_ptrs = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=count), out=row_ptrs[1:])
        return cls(ids, row_ptrs, places)

    def select(self, is_kept: NDArray[np.bool_]) -> Self:
        """Return the ids for which ``is_kept``."""
        if is_kept.all():
            return self
        places = np.flatnonzero(is_kept) if self.places is None else self.places[is_kept]
        return self._replace(
            ids=self.ids[is_kept], row_ptrs=np.concatenate([[0], np.cumsum(is_kept)])[self.row_ptrs], places=places
        )

    def filled(self, default_id: int) -> Self:
        """Give each row without ids one id, which is none of the caller's."""
        counts = np.diff(self.row_ptrs)
        is_empty = counts == 0
        if not is_empty.any():
            return self
        row_ptrs = np.concatenate([[0], np.cumsum(counts + is_empty)])
        moved = np.arange(len(self.ids)) + np.repeat(np.cumsum(is_empty), counts)
        ids, places = np.full(row_ptrs[-1], default_id), np.full(row_ptrs[-1], -1)
        ids[moved] = self.ids
        places[moved] = np.arange(len(self.ids)) if self.places is None else self.places
        return self._replace(ids=ids, row_ptrs=row_ptrs, places=places)

    def in_order(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Return the weights of the caller's ids in the order of ``ids``."""
        return weights if self.places is None else weights[self.places]

    def as_given(self, gradients: Floats) -> Floats:
        """Return what belongs to ``ids`` in the order of the caller's ids."""
        if self.places is None:
            return gradients
        given = np.empty_like(gradients)
        given[self.places] = gradients
        return given


def require_ids(place: str, keys: Ints, row_ptrs: Ints | None, rows: int) -> None:
    """Raise IndexError if an id is none of a table's rows."""
    at = first_outside(keys, 0, rows - 1)
    if at < len(keys):
        row = "" if row_ptrs is None else f" in row {np.searchsorted(row_ptrs, at, 'right') - 1}"
        raise IndexError(f"{place}: expected ids from 0 to {rows - 1}, got {keys[at]}{row}")
