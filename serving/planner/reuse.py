"""Reuse distances: how many other keys were looked up since a key was looked up last.

An LRU cache of C rows answers a lookup exactly if fewer than C other keys came since the key's last lookup, whatever
C is; so one pass gives the hit rate of every size (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for
storage hierarchies", IBM Systems Journal 9(2), 1970).

Counting distinct keys in a window is counting smaller numbers to the left, which is done here for all lookups at once
by partitioning them bit by bit, as a wavelet tree is built: O(N log N), whole arrays at a time.
"""

import numpy as np
from numpy.typing import NDArray

MOST_LOOKUPS = 2**31 - 1  # places are int32, which halves the memory and the time
NEVER = -1

Ints = NDArray[np.int32]


def reuse_distances(keys: NDArray[np.integer]) -> Ints:
    """The reuse distance of every lookup.

    Args:
        keys: int[N], in the order of the lookups, N at most ``MOST_LOOKUPS``.

    Returns:
        int32[N]: distinct other keys since the key's previous lookup; NEVER for a key's first lookup.

    Raises:
        ValueError: there are more lookups.
    """
    if keys.size > MOST_LOOKUPS:
        raise ValueError(f"expected at most {MOST_LOOKUPS:,} lookups, got {keys.size:,}")
    previous = previous_lookups(keys)
    places = np.flatnonzero(previous != NEVER).astype(np.int32)  # lookups that have a previous one
    began = previous[places]
    is_previous = np.zeros(keys.size, dtype=np.bool_)
    is_previous[began] = True
    order = np.cumsum(is_previous, dtype=np.int32)[began] - 1  # a permutation: no two have the same previous lookup
    # The keys distinct in the window (began, place) are those whose previous lookup lies before it. All lookups up to
    # `began`, itself included, have theirs before it too and are taken off; first lookups before `place` count in full.
    smaller = earlier_and_smaller(order)[order]
    first_lookups = places - np.arange(places.size, dtype=np.int32)
    distances = np.full(keys.size, NEVER, dtype=np.int32)
    distances[places] = smaller + first_lookups - began - 1
    return distances


def previous_lookups(keys: NDArray[np.integer]) -> Ints:
    """Where each lookup's key was looked up last: int32[N], NEVER for a key's first lookup."""
    order = np.argsort(keys, kind="stable").astype(np.int32)
    ordered = keys[order]
    repeats = ordered[1:] == ordered[:-1]
    previous = np.full(keys.size, NEVER, dtype=np.int32)
    previous[order[1:][repeats]] = order[:-1][repeats]
    return previous


def earlier_and_smaller(values: Ints) -> Ints:
    """By value: how many smaller values stand before it.

    Args:
        values: int32[M], a permutation of 0 to M - 1.

    Returns:
        int32[M]; entry v belongs to the value v.
    """
    counts = np.zeros(values.size, dtype=np.int32)
    places = np.arange(values.size, dtype=np.int32)
    for bit in range((values.size - 1).bit_length() - 1, -1, -1):
        # A node is the run of values that agree above `bit`. As they are a permutation, the run stands at the places
        # that its values name, in the original order. Those with the bit pass all of those without it that stand
        # before them in their node, and go behind them.
        half = 1 << bit
        has_bit = (values & half) != 0
        passed = np.cumsum(~has_bit, dtype=np.int32)
        passed -= ~has_bit
        passed -= np.repeat(passed[:: 2 * half], 2 * half)[: values.size]
        counts += passed * has_bit
        moved = np.where(has_bit, places - passed + half, (places & ~(2 * half - 1)) + passed)
        values_then, counts_then = values, counts
        values, counts = np.empty_like(values), np.empty_like(counts)
        values[moved], counts[moved] = values_then, counts_then
    return counts
