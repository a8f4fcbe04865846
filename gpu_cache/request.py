"""One request's bags, checked and packed for one upload.

Letters for shapes: B samples, S slots, T tables, N keys, F dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import (
    COMBINERS,
    TABLE_BAGS,
    BagRows,
    aligned,
    choose_item_bags,
    deal_items,
    most_request_bytes,
    out_floats,
    row_floats,
)
from kernels.device import Device

Floats = NDArray[np.float32]
Weights = Floats

_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)  # faster to compare than types


class TableBags(Protocol):
    """The bags of one table, such as a ``serving.batch.TableKeys``."""

    @property
    def keys(self) -> NDArray[np.int64]:
        """int64[N], sample-major: sample 0's slot 0, slot 1, ..., then sample 1's."""

    @property
    def row_ptrs(self) -> NDArray[np.int32]:
        """int32[B * S + 1], CSR offsets of the bags; starts at 0, ends at N."""


class RequestForm(NamedTuple):
    """The sizes of a request, which decide its layout. Consecutive requests often have the same sizes.

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


class RequestLayout(NamedTuple):
    """The places of a request's parts in the buffer.

    Args:
        form: of the requests; None for keys that are answered one by one.
        head: TableBags[T], as it is uploaded.
        row_ptrs: int32, part of the buffer, for all tables.
        keys: int64, part of the buffer, for all tables.
        weights: float32, part of the buffer, for all tables.
        floats: the first float of each table's rows in the answer, and the end of the last table's rows.
        items: the number of items of a launch.
        used_bytes: of the buffer.
        borders: int64[2 T], the places of each table's first and last offset in ``row_ptrs``; empty for single keys.
        at_borders: int32[2 T], the offsets that must be there: 0 and N.
        falls: how often ``row_ptrs`` must fall: back to 0 at each next table, except after a table without keys.
    """

    form: RequestForm | None
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


class RequestLayouts:
    """Lays requests out in one buffer: heads, dense features, then row_ptrs, keys and weights without gaps.

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

    def of_bags(self, form: RequestForm) -> RequestLayout:
        """Lay out requests of bags."""
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

    def of_keys(self, keys: Sequence[int], item_keys: int) -> RequestLayout:
        """Lay out a request with this many keys per table, each key as a bag, and ``item_keys`` keys per item."""
        head, keys_end = self._head(keys, self.head_bytes)
        head["bags"], head["first_bag"] = head["keys"], head["first_position"]
        head["item_bags"] = item_keys
        return self._layout(None, head, (0, 0), row_floats(keys, self._dims), keys_end, np.empty(0, np.int64))

    def _head(self, keys: Sequence[int], keys_at: int) -> tuple[NDArray[np.void], int]:
        """Return new heads with the places of the keys, and the end of the keys."""
        head, keys_of = self._blank.copy(), np.array(keys, dtype=np.int64)
        head["keys"], head["first_position"] = keys_of, _before(keys_of)
        head["keys_at"] = keys_at + 8 * _before(keys_of)
        return head, keys_at + 8 * int(keys_of.sum())

    def _layout(
        self,
        form: RequestForm | None,
        head: NDArray[np.void],
        row_ptrs: tuple[int, int],
        floats: list[int],
        used_bytes: int,
        borders: NDArray[np.int64],
    ) -> RequestLayout:
        head["first_float"] = floats[:-1]
        keys_at = int(head["keys_at"][0])
        keys_end = keys_at + 8 * int(head["keys"].sum(dtype=np.int64))
        return RequestLayout(
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


class RequestBuffer:
    """A request in pinned memory in the layout of bags.cuh: heads, dense features, row_ptrs, keys and weights.

    Dense features have the same place in every request, so that a graph finds them; the rest follows without gaps.

    Args:
        device: whose memory is pinned.
        tables: T parts of a group.
        dims: D of each.
        max_samples: the most B.
        max_keys: the most keys, over all tables.
        dense_dim: F.
    """

    def __init__(
        self,
        device: Device,
        tables: Sequence[BagRows],
        dims: Sequence[int],
        max_samples: int,
        max_keys: int,
        dense_dim: int = 0,
    ) -> None:
        """See the class."""
        self._tables = tables
        self._max_samples, self._max_keys = max_samples, max_keys
        self.bytes = device.pinned(most_request_bytes(tables, max_samples, max_keys, dense_dim), np.uint8)
        self._layouts = RequestLayouts(self.bytes, tables, dims, max_samples, dense_dim)
        head_bytes = self._layouts.head_bytes
        self.head = self.bytes[:head_bytes].view(TABLE_BAGS)
        self.dense_place = slice(head_bytes, head_bytes + 4 * max_samples * dense_dim)
        self._dense = self.bytes[self.dense_place].view(np.float32).reshape(max_samples, dense_dim)
        self._layout: RequestLayout | None = None
        self.samples = self.items = self.used_bytes = 0

    def pack(
        self,
        bags: Sequence[TableBags],
        weights: Sequence[Weights | None] | None,
        dense: Floats | None = None,
        is_whole: bool = False,
    ) -> list[int]:
        """Check and write a request (see ``Workspace.load``), and return ``RequestLayout.floats``."""
        samples, sizes = self._read_sizes(bags)
        self._check_dense(dense, samples)
        form = RequestForm(samples, sizes, self._check_weights(weights, sizes), dense is not None, is_whole)
        layout = self._layout
        if layout is None or layout.form != form:
            layout = self._layouts.of_bags(form)
        np.concatenate([table.row_ptrs for table in bags], out=layout.row_ptrs)
        _check_row_ptrs(layout)
        np.concatenate([table.keys for table in bags], out=layout.keys)
        if dense is not None:
            self._dense[:samples] = dense
        if weights is not None and layout.weights.size:
            np.concatenate([of_table for of_table in weights if of_table is not None], out=layout.weights)
        self.samples = samples
        return self._take(layout)

    def pack_keys(self, keys: Sequence[NDArray[np.int64]], item_keys: int, most_keys: int) -> list[int]:
        """Check and write a request of keys (see ``Workspace.load_keys``), and return ``RequestLayout.floats``."""
        if len(keys) != len(self._tables):
            raise ValueError(f"expected keys of {len(self._tables)} tables, got {len(keys)}")
        for t, of_table in enumerate(keys):
            _require(t, "keys", of_table, _INT64)
        sizes = [of_table.size for of_table in keys]
        _check_total(sizes, most_keys, "single keys")
        layout = self._layouts.of_keys(sizes, item_keys)
        np.concatenate(keys, out=layout.keys)
        return self._take(layout)

    def _take(self, layout: RequestLayout) -> list[int]:
        """Make the request that was written the current one, and return ``RequestLayout.floats``."""
        if layout is not self._layout:
            self.head[:] = layout.head
            self._layout, self.items, self.used_bytes = layout, layout.items, layout.used_bytes
        return layout.floats

    def _read_sizes(self, bags: Sequence[TableBags]) -> tuple[int, tuple[int, ...]]:
        """Return B and the tables' N."""
        if len(bags) != len(self._tables):
            raise ValueError(f"expected bags of {len(self._tables)} tables, got {len(bags)}")
        samples = (bags[0].row_ptrs.size - 1) // self._tables[0].slots
        if not 1 <= samples <= self._max_samples:
            raise ValueError(f"expected 1 to {self._max_samples} samples, got {samples}")
        for t, (table, given) in enumerate(zip(self._tables, bags, strict=True)):
            _require(t, "keys", given.keys, _INT64)
            _require(t, "row_ptrs", given.row_ptrs, _INT32, samples * table.slots + 1)
        sizes = tuple([given.keys.size for given in bags])
        _check_total(sizes, self._max_keys, "keys")
        return samples, sizes

    def _check_dense(self, dense: Floats | None, samples: int) -> None:
        expected = samples, self._dense.shape[1]
        if dense is not None and (dense.dtype != np.float32 or dense.shape != expected):
            raise ValueError(f"dense: expected float32{list(expected)}, got {dense.dtype}{list(dense.shape)}")

    def _check_weights(self, weights: Sequence[Weights | None] | None, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Return whether each table has weights."""
        if weights is None:
            return (False,) * len(sizes)
        if len(weights) != len(sizes):
            raise ValueError(f"expected weights of {len(sizes)} tables, got {len(weights)}")
        for t, (of_table, size) in enumerate(zip(weights, sizes, strict=True)):
            if of_table is not None:
                _require(t, "weights", of_table, _FLOAT32, size)
        return tuple([of_table is not None for of_table in weights])


def _check_total(sizes: Sequence[int], most: int, what: str) -> None:
    if sum(sizes) > most:
        raise ValueError(f"expected at most {most} {what}, for which the workspace was made, got {sum(sizes)}")


def _require(
    table: int, name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], size: int | None = None
) -> None:
    """Check that an array is one-dimensional and has this dtype, and this size if one is given."""
    if array.ndim != 1 or array.dtype != dtype or (size is not None and array.size != size):
        wanted = f"{dtype}[{'N' if size is None else size}]"
        raise ValueError(f"table {table}: {name}: expected {wanted}, got {array.dtype}{list(array.shape)}")


def _check_row_ptrs(layout: RequestLayout) -> None:
    """Raise ValueError unless each table's offsets go from 0 to N and never fall."""
    row_ptrs = layout.row_ptrs
    wrong = row_ptrs[layout.borders] != layout.at_borders
    falls = np.count_nonzero(row_ptrs[1:] < row_ptrs[:-1])
    if not np.count_nonzero(wrong) and falls == layout.falls:  # then they fall nowhere else
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
    """Return the sum of the counts before each count."""
    return np.cumsum(counts) - counts
