"""``slot_size_array``: the keys of each slot begin at 0, and become keys of one table.

The sizes of the slots before are added to a key, as in HugeCTR. Training, exports and requests use this definition.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.model.records import Graph
from serving.model.strict_json import Fields

#: Keys of requests: as in the table; from 0 in each slot; or already shifted, although the graph has sizes.
SlotKeys = Literal["stored", "unshifted", "shifted"]
#: Stands for a key beyond its slot. No table of shifted keys has this key.
UNKNOWN_KEY = -1

Ints = NDArray[np.int64]


class SlotRange(NamedTuple):
    """The keys of one slot: what is added to them, and how many they are."""

    offset: int
    size: int


def slot_ranges(slot_sizes: Sequence[int], slots: int) -> tuple[Ints, Ints]:
    """Return what is added to the keys of each slot, and the number of its keys.

    The sizes of the slots before are added. A slot of size 0 shares the keys of the next slot.

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


def ranges_by_input(graph: Graph) -> dict[str, tuple[SlotRange, ...]]:
    """Return the range of each slot of each sparse input of a graph with ``slot_sizes``."""
    assert graph.slot_sizes is not None
    offsets, sizes = slot_ranges(graph.slot_sizes, len(graph.slot_sizes))
    in_order = map(SlotRange, offsets.tolist(), sizes.tolist())
    return {entry.top: tuple(islice(in_order, entry.slots)) for entry in graph.sparse}


def shift_keys(keys: Ints, bag_sizes: Ints, ranges: tuple[Ints, Ints]) -> Ints:
    """Turn keys that begin at 0 in each slot into keys of a table.

    Args:
        keys: int64[N], sample by sample.
        bag_sizes: int[B * S], how many keys each slot of each sample has.
        ranges: what ``slot_ranges`` returns for the S slots.

    Returns:
        int64[N]. A key outside its slot becomes UNKNOWN_KEY.
    """
    slots = np.repeat(np.arange(bag_sizes.size) % ranges[0].size, bag_sizes)
    offsets, sizes = ranges[0][slots], ranges[1][slots]
    is_known = (keys >= 0) & (keys < sizes)
    return np.where(is_known, keys + offsets, UNKNOWN_KEY)


def read_slot_sizes(data: Fields, slots: int) -> tuple[int, ...] | None:
    """Return the sizes in a Data layer whose files have keys that begin at 0 in each slot, or None.

    The keys of Norm files are those of the table, whatever the sizes are.

    Raises:
        ConfigError: the sizes are not one number per slot.
    """
    if data.value("format", "Norm") == "Norm" or "slot_size_array" not in data:
        return None
    sizes = data.integers("slot_size_array", minimum=0)
    if len(sizes) != slots:
        raise data.error(f"expected {slots} numbers, one per slot, got {len(sizes)}", "slot_size_array")
    return sizes
