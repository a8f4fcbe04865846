"""``slot_size_array``: the keys of each slot begin at 0 in the file, and become keys of one table."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def slot_ranges(slot_sizes: Sequence[int], slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what is added to the keys of each slot, and the number of its keys.

    The sizes of the slots before are added, as in HugeCTR. A slot of size 0 shares the keys of the next slot.

    Raises:
        ValueError: there is not one size per slot.
    """
    if len(slot_sizes) != slots:
        raise ValueError(f"slot_sizes: expected {slots} numbers, got {len(slot_sizes)}")
    sizes = np.array(slot_sizes, np.int64)
    offsets = np.cumsum(sizes) - sizes
    for slot in reversed(range(slots - 1)):
        if not sizes[slot]:
            sizes[slot] = sizes[slot + 1]
    return offsets, sizes
