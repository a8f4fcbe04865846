"""Where the parts of a request lie in its buffer, and what its heads say of them.

Letters for shapes: B samples, S slots, T tables, N keys, F dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import (
    COMBINERS,
    TABLE_BAGS,
    BagRows,
    aligned,
    choose_item_bags,
    deal_items,
    out_floats,
    row_floats,
)


class Form(NamedTuple):
    """What a request's layout follows from. Requests in a row often have the same.

    Args:
        samples: B.
        keys: N of each table.
        weighted: whether each table's keys have weights.
        has_dense: whether there are dense features.
        is_whole: see ``Workspace.load``.
    """

    samples: int
    keys: tuple[int, ...]
    weighted: tuple[bool, ...]
    has_dense: bool
    is_whole: bool


class Layout(NamedTuple):
    """Where requests of one form lie.

    Args:
        form: of the requests; None: of keys that are answered one by one.
        head: TableBags[T], as it is uploaded.
        row_ptrs: int32, of all tables: part of the buffer; as the next two.
        keys: int64.
        weights: float32.
        floats: where each table's rows begin in the answer, and last where all end.
        items: how many there are to be looked up.
        used_bytes: of the buffer.
        borders: int64[2 T], where in ``row_ptrs`` each table's first and its last offset are; of keys none.
        at_borders: int32[2 T], what these must be: 0 and N.
        falls: how often ``row_ptrs`` must fall: from table to table back to 0, but after a table without keys.
    """

    form: Form | None
    head: NDArray[np.void]
    row_ptrs: NDArray[np.int32]
    keys: NDArray[np.int64]
    weights: NDArray[np.float32]
    floats: list[int]
    items: int
    used_bytes: int
    borders: NDArray[np.int64]
    at_borders: NDArray[np.int32]
    falls: int


class Layouts:
    """Lays requests out in one buffer: heads, dense features, then row_ptrs, keys and weights, closely.

    Args:
        buffer: bytes.
        tables: T parts of a group.
        dims: D of each.
        max_samples: the most B.
        dense_dim: F.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        tables: Sequence[BagRows],
        dims: Sequence[int],
        max_samples: int,
        dense_dim: int,
    ) -> None:
        """See the class."""
        self.head_bytes = aligned(len(tables) * TABLE_BAGS.itemsize)
        self._buffer, self._tables, self._dims, self._dense_dim = buffer, tables, dims, dense_dim
        self._floats = out_floats(tables, dims, max_samples)
        self._slots = np.array([table.slots for table in tables], dtype=np.int64)
        self._blank = np.zeros(len(tables), TABLE_BAGS)
        self._blank["combiner"] = [COMBINERS.index(table.combiner) for table in tables]
        self._blank["max_norm"] = [table.max_norm for table in tables]

    def of_bags(self, form: Form) -> Layout:
        """Lay out requests of a form."""
        bags, weights = form.samples * self._slots, np.multiply(form.keys, form.weighted, dtype=np.int64)
        row_ptrs_at = self.head_bytes + form.has_dense * aligned(4 * form.samples * self._dense_dim)
        row_ptrs_end = row_ptrs_at + 4 * int((bags + 1).sum())
        head, keys_end = self._head(form.keys, aligned(row_ptrs_end))
        floats = out_floats(self._tables, self._dims, form.samples) if form.is_whole else self._floats
        head["bags"], head["first_bag"] = bags, _before(bags)
        head["row_ptrs_at"] = row_ptrs_at + 4 * _before(bags + 1)
        head["weights_at"] = (keys_end + 4 * _before(weights)) * form.weighted
        choose_item_bags(head)
        borders = np.stack((_before(bags + 1), np.cumsum(bags + 1) - 1), axis=1).reshape(-1)
        row_ptrs = (row_ptrs_at, row_ptrs_end)
        return self._layout(form, head, row_ptrs, floats, keys_end + 4 * int(weights.sum()), borders)

    def of_keys(self, keys: Sequence[int], item_keys: int) -> Layout:
        """Lay out a request of so many keys of each table, each as if it were a bag; some make an item."""
        head, keys_end = self._head(keys, self.head_bytes)
        head["bags"], head["first_bag"] = head["keys"], head["first_position"]
        head["item_bags"] = item_keys
        return self._layout(None, head, (0, 0), row_floats(keys, self._dims), keys_end, np.empty(0, np.int64))

    def _head(self, keys: Sequence[int], keys_at: int) -> tuple[NDArray[np.void], int]:
        """Return new heads that say where the keys are, and where these end."""
        head, keys_of = self._blank.copy(), np.array(keys, dtype=np.int64)
        head["keys"], head["first_position"] = keys_of, _before(keys_of)
        head["keys_at"] = keys_at + 8 * _before(keys_of)
        return head, keys_at + 8 * int(keys_of.sum())

    def _layout(
        self,
        form: Form | None,
        head: NDArray[np.void],
        row_ptrs: tuple[int, int],
        floats: list[int],
        used_bytes: int,
        borders: NDArray[np.int64],
    ) -> Layout:
        head["first_float"] = floats[:-1]
        keys_at = int(head["keys_at"][0])
        keys_end = keys_at + 8 * int(head["keys"].sum(dtype=np.int64))
        return Layout(
            form,
            head,
            self._buffer[slice(*row_ptrs)].view(np.int32),
            self._buffer[keys_at:keys_end].view(np.int64),
            self._buffer[keys_end:used_bytes].view(np.float32),
            floats,
            deal_items(head),
            used_bytes,
            borders,
            np.stack((np.zeros(len(head)), head["keys"]), axis=1).astype(np.int32).reshape(-1),
            int(np.count_nonzero(head["keys"][:-1])),
        )


def check_row_ptrs(layout: Layout) -> None:
    """Check the offsets of bags that were written.

    Raises:
        ValueError: those of a table do not go from 0 to N, or fall.
    """
    row_ptrs = layout.row_ptrs
    wrong = row_ptrs[layout.borders] != layout.at_borders
    falls = np.count_nonzero(row_ptrs[1:] < row_ptrs[:-1])
    if not np.count_nonzero(wrong) and falls == layout.falls:  # which it is only if they fall nowhere else
        return
    firsts, keys = layout.borders[::2], layout.head["keys"]
    for t, of_table in enumerate(np.split(row_ptrs, firsts[1:])):
        if wrong[2 * t : 2 * t + 2].any():
            span = f"{of_table[0]} to {of_table[-1]}"
            raise ValueError(f"table {t}: row_ptrs: expected offsets from 0 to {keys[t]}, got {span}")
        at = np.flatnonzero(of_table[1:] < of_table[:-1])
        if at.size:
            raise ValueError(
                f"table {t}: row_ptrs: falls from {of_table[at[0]]} to {of_table[at[0] + 1]} at {at[0] + 1}"
            )


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of all counts before each."""
    return np.cumsum(counts) - counts
