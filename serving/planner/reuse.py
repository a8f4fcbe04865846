"""Reuse distances: how many other keys were looked up since the last lookup of a key.

An LRU cache of C rows answers a lookup if and only if fewer than C other keys came since the key's last lookup. So one
pass over the lookups gives the hit rate of every C (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for
storage hierarchies", IBM Systems Journal 9(2), 1970).

To count the distinct keys in a window, count the smaller numbers to the left. This module does that for all lookups at
once: it partitions the lookups bit by bit, like the construction of a wavelet tree, in O(N log N) with whole arrays.
"""

import numpy as np
from numpy.typing import NDArray

MOST_LOOKUPS = 2**31 - 1  # places are int32, which halves the memory and the time
NEVER = -1

Ints = NDArray[np.int32]


def reuse_distances(keys: NDArray[np.integer]) -> Ints:
    """Return the reuse distance of every lookup.

    Args:
        keys: int[N], in the order of the lookups, N at most ``MOST_LOOKUPS``.

    Returns:
        int32[N]: the number of distinct other keys since the key's previous lookup; NEVER for a key's first lookup.

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
    # A lookup in the window (began, place) counts if its previous lookup is before the window. All lookups up to and
    # including `began` also have theirs before it, so they are subtracted. All first lookups before `place` count.
    smaller = earlier_and_smaller(order)[order]
    first_lookups = places - np.arange(places.size, dtype=np.int32)
    distances = np.full(keys.size, NEVER, dtype=np.int32)
    distances[places] = smaller + first_lookups - began - 1
    return distances


def previous_lookups(keys: NDArray[np.integer]) -> Ints:
    """Return the position of the previous lookup of each lookup's key: int32[N], NEVER for a key's first lookup."""
    order = np.argsort(keys, kind="stable").astype(np.int32)
    ordered = keys[order]
    repeats = ordered[1:] == ordered[:-1]
    previous = np.full(keys.size, NEVER, dtype=np.int32)
    previous[order[1:][repeats]] = order[:-1][repeats]
    return previous


def earlier_and_smaller(values: Ints) -> Ints:
    """Return for each value how many smaller values come before it.

    Args:
        values: int32[M], a permutation of 0 to M - 1.

    Returns:
        int32[M]; entry v belongs to the value v.
    """
    counts = np.zeros(values.size, dtype=np.int32)
    places = np.arange(values.size, dtype=np.int32)
    for bit in range((values.size - 1).bit_length() - 1, -1, -1):
        # A node is a run of values that agree above `bit`. Because the values are a permutation, the places of the run
        # are the numbers of its values, and the run is in the original order. Each value with the bit moves behind all
        # values without the bit, and counts those that came before it in its node.
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
