"""Read the keys of a batch of B samples with S slots, as COO or CSR. Bag ``b * S + s`` is slot s of sample b."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import first_outside
from training.arguments import integers, whole
from training.samples import Bags

_PADDING = -1


def read_coo(place: str, row_indices: Any, values: Any, samples: int, slots: int) -> Bags:
    """Read keys and the bag of each key.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument has another shape.
        IndexError: there is no such bag.
    """
    rows, keys = integers(place, "row_indices", row_indices), integers(place, "values", values)
    if rows.ndim == 2 and len(rows) == 2:  # the columns do not matter
        rows = rows[0]
    if keys.ndim != 1 or rows.shape != keys.shape:
        came = f"{list(keys.shape)} and {list(np.shape(row_indices))}"
        raise ValueError(f"{place}: expected values [N], and row_indices [N] or [2, N], got {came}")
    bags = samples * slots
    at = first_outside(rows, 0, bags - 1)
    if at < len(rows):
        expected = f"row_indices from 0 to {bags - 1}, {samples} samples of {slots} slots"
        raise IndexError(f"{place}: expected {expected}, got {rows[at]} at position {at}")
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, keys = rows[order], keys[order]
    row_ptrs = np.zeros(bags + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=bags), out=row_ptrs[1:])
    return _without_padding(keys, row_ptrs, slots)


def read_csr(place: str, row_offset: Any, values: Any, nnz: Any, samples: int, slots: int) -> Bags:
    """Read keys and where the keys of each bag begin. Keys after the first ``nnz`` do not count.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument has another shape, or the offsets do not ascend from 0 to ``nnz``.
    """
    row_ptrs, keys = integers(place, "row_offset", row_offset), integers(place, "values", values)
    count, bags = whole(place, "nnz", nnz, 0), samples * slots
    if keys.ndim != 1 or count > len(keys):
        raise ValueError(f"{place}: expected values [N] with N of at least nnz = {count}, got {list(keys.shape)}")
    if row_ptrs.shape != (bags + 1,):
        expected = f"row_offset [{bags + 1}], {samples} samples of {slots} slots and 1"
        raise ValueError(f"{place}: expected {expected}, got {list(row_ptrs.shape)}")
    if row_ptrs[0] != 0 or row_ptrs[-1] != count or (row_ptrs[1:] < row_ptrs[:-1]).any():
        came = "a descent" if (row_ptrs[1:] < row_ptrs[:-1]).any() else f"{row_ptrs[0]} to {row_ptrs[-1]}"
        raise ValueError(f"{place}: expected row_offset to ascend from 0 to nnz = {count}, got {came}")
    return _without_padding(keys[:count], row_ptrs, slots)


def _without_padding(keys: NDArray[np.int64], row_ptrs: NDArray[np.int64], slots: int) -> Bags:
    is_key = keys != _PADDING
    if is_key.all():
        return Bags(keys, row_ptrs, slots)
    kept = np.concatenate([[0], np.cumsum(is_key)])
    return Bags(keys[is_key], kept[row_ptrs], slots)
