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
    deal_items,
    most_request_bytes,
    out_floats,
    row_floats,
)
from kernels.device import Device
from kernels.host import RequestPacker

Floats = NDArray[np.float32]
Weights = Floats

_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


class TableBags(Protocol):
    """The bags of one table, such as a ``serving.batch.TableKeys``."""

    @property
    def keys(self) -> NDArray[np.int64]:
        """int64[N], sample-major: sample 0's slot 0, slot 1, ..., then sample 1's."""

    @property
    def row_ptrs(self) -> NDArray[np.int32]:
        """int32[B * S + 1], CSR offsets of the bags; starts at 0, ends at N."""


class _Bags(NamedTuple):
    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int32]


class _Places:
    """The first float of each table's rows, and the end of the last table's rows."""

    def __init__(self, floats: list[int]) -> None:
        self.floats = floats
        self.array = np.array(floats, dtype=np.int64)


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
        self._tables, self._dims = tables, dims
        self._max_samples, self._max_keys, self._dense_dim = max_samples, max_keys, dense_dim
        self.bytes = device.pinned(most_request_bytes(tables, max_samples, max_keys, dense_dim), np.uint8)
        head_bytes = len(tables) * TABLE_BAGS.itemsize
        self.head = self.bytes[:head_bytes].view(TABLE_BAGS)
        self.dense_place = slice(head_bytes, head_bytes + 4 * max_samples * dense_dim)
        combiners = [COMBINERS.index(table.combiner) for table in tables]
        slots, norms = [table.slots for table in tables], [table.max_norm for table in tables]
        self._packer = RequestPacker(self.bytes, slots, combiners, norms, max_samples, max_keys, dense_dim)
        self._apart = _Places(out_floats(tables, dims, max_samples))
        self._whole, self._whole_samples = self._apart, max_samples  # of the last whole request
        self.samples = self.items = self.used_bytes = 0

    def pack(
        self,
        bags: Sequence[TableBags],
        weights: Sequence[Weights | None] | None,
        dense: Floats | None = None,
        is_whole: bool = False,
    ) -> list[int]:
        """Check and write a request (see ``Workspace.load``), and return the first float of each table's rows.

        The last number is the end of the last table's rows.
        """
        places = self._whole_places(bags) if is_whole else self._apart
        packed = self._packer.pack(bags, weights, dense, places.array)
        if packed is None:
            self._check(bags, weights, dense)  # raises for a wrong request, and accepts arrays with gaps
            packed = self._packer.pack(*_copied(bags, weights, dense), places.array)
        if packed is None:
            raise ValueError("the request changed while it was read")
        self.samples, self.items, self.used_bytes = packed
        return places.floats

    def pack_keys(self, keys: Sequence[NDArray[np.int64]], item_keys: int, most_keys: int) -> list[int]:
        """Check and write a request of keys (see ``Workspace.load_keys``), and return what ``pack`` returns.

        Each key is a bag, and an item has ``item_keys`` keys.
        """
        if len(keys) != len(self._tables):
            raise ValueError(f"expected keys of {len(self._tables)} tables, got {len(keys)}")
        for t, of_table in enumerate(keys):
            _require(t, "keys", of_table, _INT64)
        sizes = np.array([of_table.size for of_table in keys], dtype=np.int64)
        _check_total(sizes.tolist(), most_keys, "single keys")
        keys_at, floats = self.head.nbytes, row_floats(sizes.tolist(), self._dims)
        self.used_bytes = keys_at + 8 * int(sizes.sum())
        np.concatenate(keys, out=self.bytes[keys_at : self.used_bytes].view(np.int64))
        head = self.head
        head[:] = 0
        head["keys"] = head["bags"] = sizes
        head["first_position"] = head["first_bag"] = np.cumsum(sizes) - sizes
        head["keys_at"] = keys_at + 8 * (np.cumsum(sizes) - sizes)
        head["first_float"] = floats[:-1]
        head["item_bags"] = item_keys
        self.items = deal_items(head)
        return floats

    def _whole_places(self, bags: Sequence[TableBags]) -> _Places:
        """Return the places of the rows of a whole request; consecutive requests often have as many samples."""
        samples = (bags[0].row_ptrs.size - 1) // self._tables[0].slots if bags else 0
        if samples != self._whole_samples and 1 <= samples <= self._max_samples:
            self._whole, self._whole_samples = _Places(out_floats(self._tables, self._dims, samples)), samples
        return self._whole

    def _check(self, bags: Sequence[TableBags], weights: Sequence[Weights | None] | None, dense: Floats | None) -> None:
        """Raise ValueError if the request is wrong."""
        if len(bags) != len(self._tables):
            raise ValueError(f"expected bags of {len(self._tables)} tables, got {len(bags)}")
        samples = (bags[0].row_ptrs.size - 1) // self._tables[0].slots
        if not 1 <= samples <= self._max_samples:
            raise ValueError(f"expected 1 to {self._max_samples} samples, got {samples}")
        for t, (table, given) in enumerate(zip(self._tables, bags, strict=True)):
            _require(t, "keys", given.keys, _INT64)
            _require(t, "row_ptrs", given.row_ptrs, _INT32, samples * table.slots + 1)
        sizes = [given.keys.size for given in bags]
        _check_total(sizes, self._max_keys, "keys")
        expected = samples, self._dense_dim
        if dense is not None and (dense.dtype != np.float32 or dense.shape != expected):
            raise ValueError(f"dense: expected float32{list(expected)}, got {dense.dtype}{list(dense.shape)}")
        if weights is not None:
            _check_weights(weights, sizes)
        for t, given in enumerate(bags):
            _check_row_ptrs(t, given.row_ptrs, given.keys.size)


def _check_weights(weights: Sequence[Weights | None], sizes: Sequence[int]) -> None:
    if len(weights) != len(sizes):
        raise ValueError(f"expected weights of {len(sizes)} tables, got {len(weights)}")
    for t, (of_table, size) in enumerate(zip(weights, sizes, strict=True)):
        if of_table is not None:
            _require(t, "weights", of_table, _FLOAT32, size)


def _check_row_ptrs(table: int, row_ptrs: NDArray[np.int32], keys: int) -> None:
    """Raise ValueError unless the offsets go from 0 to N and never fall."""
    if row_ptrs[0] != 0 or row_ptrs[-1] != keys:
        span = f"{row_ptrs[0]} to {row_ptrs[-1]}"
        raise ValueError(f"table {table}: row_ptrs: expected offsets from 0 to {keys}, got {span}")
    falls = np.flatnonzero(row_ptrs[1:] < row_ptrs[:-1])
    if falls.size:
        at = int(falls[0])
        raise ValueError(f"table {table}: row_ptrs: falls from {row_ptrs[at]} to {row_ptrs[at + 1]} at {at + 1}")


def _copied(
    bags: Sequence[TableBags], weights: Sequence[Weights | None] | None, dense: Floats | None
) -> tuple[Sequence[TableBags], Sequence[Weights | None] | None, Floats | None]:
    """Return copies of the arrays, without gaps and aligned."""
    copied: list[TableBags] = [_Bags(given.keys.copy(), given.row_ptrs.copy()) for given in bags]
    of_tables = None if weights is None else [None if given is None else given.copy() for given in weights]
    return copied, of_tables, None if dense is None else dense.copy()


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
