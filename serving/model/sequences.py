"""Sequences: slots whose rows are not pooled, ``[B, L, D]`` for at most L keys in a sample.

A request has one bag of keys for a sequence, as for a pooled slot. A lookup sees L bags of one key or none, so tables,
tiers and caches know nothing of sequences. The network may read a mask, which says where the keys are.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]  # int32 in requests, int64 in training
Padding = Literal["end", "start"]


class TooLong(NamedTuple):
    """A sequence with more keys than it may have."""

    sample: int
    slot: int
    keys: int


class Positions(NamedTuple):
    """Bags of at most one key for each position of a sequence, and a bag for each pooled slot.

    Attributes:
        row_ptrs: CSR offsets of the bags.
        bags: int32[B * P], the bag of each position of each sample; None: each has its own, in order.
        has_key: bool[B, P], whether the bag of each position has a key.
    """

    row_ptrs: Ints
    bags: NDArray[np.int32] | None
    has_key: NDArray[np.bool_]


class SequenceSlots(NamedTuple):
    """The slots of a sparse input of which at least one is a sequence.

    Attributes:
        most: the most keys of each sequence; 0 for a slot that is pooled.
        mask: the tensor float32[B, P] of the network that is 1 where a position has a key, and otherwise 0; empty: no
            layer reads it.
        padding: where a sequence with fewer keys has positions without a key.
    """

    most: tuple[int, ...]
    mask: str = ""
    padding: Padding = "end"

    @property
    def widths(self) -> tuple[int, ...]:
        """The positions of each slot; a pooled slot has one."""
        return tuple(max(most, 1) for most in self.most)

    @property
    def positions(self) -> int:
        """P, the positions of all slots."""
        return sum(self.widths)

    def too_long(self, sizes: Ints) -> TooLong | None:
        """Return the first sequence with too many keys; ``sizes`` are [B, S], the keys of each slot."""
        is_longer = (sizes > self.most) & (np.array(self.most) > 0)
        if not np.count_nonzero(is_longer):
            return None
        sample, slot = (int(place) for place in np.argwhere(is_longer)[0])
        return TooLong(sample, slot, int(sizes[sample, slot]))

    def spread(self, row_ptrs: Ints, bags: NDArray[np.int32] | None = None) -> Positions:
        """Give each position a bag. The keys stay in their order.

        Args:
            row_ptrs: CSR offsets of R bags, none of a sequence with too many keys.
            bags: int32[B * S], the bag of each slot of each sample; None: each has its own, in order.
        """
        widths = np.array(self.widths)
        slots, positions = widths.size, self.positions
        slot_of_position = np.repeat(np.arange(slots), widths)
        places = np.arange(positions) - np.repeat(np.cumsum(widths) - widths, widths)
        if bags is None:
            begins = row_ptrs[:-1].reshape(-1, slots)[:, slot_of_position]
            ends = row_ptrs[1:].reshape(-1, slots)[:, slot_of_position]
            begins = self._begins(begins, ends, places, slot_of_position).reshape(-1)
        else:
            slot_of_bag = np.zeros(row_ptrs.size - 1, np.int64)
            slot_of_bag[bags] = np.tile(np.arange(slots), bags.size // slots)
            of_bag = widths[slot_of_bag]
            firsts = np.cumsum(of_bag) - of_bag
            bag_of = np.repeat(np.arange(of_bag.size), of_bag)
            own_places = np.arange(bag_of.size) - firsts[bag_of]
            begins = self._begins(row_ptrs[bag_of], row_ptrs[bag_of + 1], own_places, slot_of_bag[bag_of])
            bags = (firsts[bags.reshape(-1, slots)[:, slot_of_position]] + places).astype(np.int32).reshape(-1)
        spread = np.append(begins, row_ptrs[-1:])
        has_key = spread[1:] > spread[:-1]
        return Positions(spread, bags, (has_key if bags is None else has_key[bags]).reshape(-1, positions))

    def _begins(self, begins: Ints, ends: Ints, places: Ints, slots: Ints) -> Ints:
        """Return where the keys of positions begin; ``places`` are those of the positions in their slots."""
        if self.padding == "end":
            at: Ints = np.minimum(begins + places.astype(begins.dtype), ends)
            return at
        rest = np.array(self.most, begins.dtype)[slots] - places.astype(begins.dtype)  # 0 in a pooled slot
        at = np.where(rest == 0, begins, np.maximum(ends - rest, begins))
        return at
