"""Sequences: slots whose rows are not pooled, ``[B, L, D]`` for at most L keys in a sample.

A request has one bag of keys for a sequence, as for a pooled slot. A lookup sees L bags of one key or none, so tables,
tiers and caches know nothing of sequences. The network may read a mask, which says where the keys are.
"""

from functools import cache
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
    """

    row_ptrs: Ints
    bags: NDArray[np.int32] | None


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
        is_longer = sizes > _layout(self).limits
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
        slots, layout = len(self.most), _layout(self)
        if bags is None:
            begins, ends = (part.reshape(-1, slots)[:, layout.slots] for part in (row_ptrs[:-1], row_ptrs[1:]))
            begins = self._begins(begins, ends, layout.places, layout.slots).reshape(-1)
        else:
            slot_of_bag = slots_of_bags(slots, row_ptrs.size - 1, bags)
            widths = layout.widths[slot_of_bag]
            firsts = np.cumsum(widths) - widths
            bag_of = np.repeat(np.arange(widths.size), widths)
            places = (np.arange(bag_of.size) - firsts[bag_of]).astype(np.int32)
            begins = self._begins(row_ptrs[bag_of], row_ptrs[bag_of + 1], places, slot_of_bag[bag_of])
            bags = (firsts[bags.reshape(-1, slots)[:, layout.slots]] + layout.places).astype(np.int32).reshape(-1)
        return Positions(np.append(begins, row_ptrs[-1:]), bags)

    def _begins(self, begins: Ints, ends: Ints, places: Ints, slots: Ints) -> Ints:
        """Return where the keys of positions begin; ``places`` are those of the positions in their slots."""
        if self.padding == "end":
            at: Ints = np.minimum(begins + places, ends)
            return at
        rest = np.array(self.most, np.int32)[slots] - places  # 0 in a pooled slot
        at = np.where(rest == 0, begins, np.maximum(ends - rest, begins))
        return at


class _Layout(NamedTuple):
    """The positions of a sample: the slot of each, and its place in the slot; of each slot the width and the limit."""

    slots: NDArray[np.int64]
    places: NDArray[np.int32]
    widths: NDArray[np.int64]
    limits: NDArray[np.int64]


def slots_of_bags(slots: int, count: int, bags: NDArray[np.int32] | None) -> Ints:
    """Return the slot of each of ``count`` bags of a table; ``bags`` as in ``SequenceSlots.spread``."""
    if bags is None:
        return np.arange(count) % slots
    found = np.zeros(count, np.int64)
    found[bags] = np.arange(bags.size) % slots
    return found


@cache
def _layout(sequences: SequenceSlots) -> _Layout:
    widths, most = np.array(sequences.widths), np.array(sequences.most)
    places = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    limits = np.where(most > 0, most, np.iinfo(np.int64).max)
    return _Layout(np.repeat(np.arange(widths.size), widths), places.astype(np.int32), widths, limits)
