"""One request's bags, checked and packed for one upload.

Letters for shapes: B samples, S slots, T tables, N keys, F dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import TABLE_BAGS, BagRows, most_request_bytes
from gpu_cache.request_layout import Form, Layout, Layouts, check_row_ptrs
from kernels.device import Device

Floats = NDArray[np.float32]
Weights = Floats

_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)  # quicker to compare than types


class TableBags(Protocol):
    """The bags of one table; ``serving.batch.TableKeys`` is such."""

    @property
    def keys(self) -> NDArray[np.int64]:
        """int64[N], sample-major: sample 0's slot 0, slot 1, ..., then sample 1's."""

    @property
    def row_ptrs(self) -> NDArray[np.int32]:
        """int32[B * S + 1], CSR offsets of the bags; starts at 0, ends at N."""


class RequestBuffer:
    """A request in pinned memory, as bags.cuh has it: heads, dense features, and of all tables row_ptrs, keys, weights.

    Dense features lie in the same place whatever the request, so that a graph finds them; the rest follows closely.

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
        self._layouts = Layouts(self.bytes, tables, dims, max_samples, dense_dim)
        head_bytes = self._layouts.head_bytes
        self.head = self.bytes[:head_bytes].view(TABLE_BAGS)
        self.dense_place = slice(head_bytes, head_bytes + 4 * max_samples * dense_dim)
        self._dense = self.bytes[self.dense_place].view(np.float32).reshape(max_samples, dense_dim)
        self._layout: Layout | None = None
        self.samples = self.items = self.used_bytes = 0

    def pack(
        self,
        bags: Sequence[TableBags],
        weights: Sequence[Weights | None] | None,
        dense: Floats | None = None,
        is_whole: bool = False,
    ) -> list[int]:
        """Check and write a request; ``samples``, ``items`` and ``used_bytes`` then tell of it.

        Returns:
            the float at which each table's pooled rows begin, and last where all end; see ``Workspace.load``.

        Raises:
            ValueError: see ``Workspace.load``. ``head`` is as it was.
        """
        samples, sizes = self._read_sizes(bags)
        self._check_dense(dense, samples)
        form = Form(samples, sizes, self._check_weights(weights, sizes), dense is not None, is_whole)
        layout = self._layout
        if layout is None or layout.form != form:
            layout = self._layouts.of_bags(form)
        np.concatenate([table.row_ptrs for table in bags], out=layout.row_ptrs)
        check_row_ptrs(layout)
        np.concatenate([table.keys for table in bags], out=layout.keys)
        if dense is not None:
            self._dense[:samples] = dense
        if weights is not None and layout.weights.size:
            np.concatenate([of_table for of_table in weights if of_table is not None], out=layout.weights)
        self.samples = samples
        return self._take(layout)

    def pack_keys(self, keys: Sequence[NDArray[np.int64]], item_keys: int, most_keys: int) -> list[int]:
        """Check and write a request of keys, each as if it were a bag; ``items`` and ``used_bytes`` then tell of it.

        Args:
            keys: T of them: int64[N].
            item_keys: how many make an item.
            most_keys: how many there may be, over all tables.

        Returns:
            the float at which each table's rows begin, and last where all end.

        Raises:
            ValueError: see ``Workspace.load_keys``.
        """
        if len(keys) != len(self._tables):
            raise ValueError(f"expected keys of {len(self._tables)} tables, got {len(keys)}")
        for t, of_table in enumerate(keys):
            _require(t, "keys", of_table, _INT64)
        sizes = [of_table.size for of_table in keys]
        _check_total(sizes, most_keys, "single keys")
        layout = self._layouts.of_keys(sizes, item_keys)
        np.concatenate(keys, out=layout.keys)
        return self._take(layout)

    def _take(self, layout: Layout) -> list[int]:
        """Let the request that was written be what the attributes tell of; return where its rows begin and end."""
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
    """Check that an array is one-dimensional, of a type, and if given of a size."""
    if array.ndim != 1 or array.dtype != dtype or (size is not None and array.size != size):
        wanted = f"{dtype}[{'N' if size is None else size}]"
        raise ValueError(f"table {table}: {name}: expected {wanted}, got {array.dtype}{list(array.shape)}")
