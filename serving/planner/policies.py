"""Policies, which decide which rows a tier holds, and their hit curves.

A row is named by its place in the model file, 0 to V - 1. Each function takes the known lookups as places and returns a
``HitCurve``. To add a policy, add a function.

====================  ==============================================================================================
``lru``               a lookup inserts its row, and the least recently used row is evicted. A cache that learns from
                      traffic can be expected to do as well. The RAM tier is close to it with ``evict_oldest``.
``pinned``            the rows that the trace looks up most often, never replaced. No other fixed set of rows has more
                      hits on this trace. The RAM tier holds these rows with ``hot_keys``.
``file``              the first rows of the model file. The RAM tier holds these rows if it is too small for all rows
                      and has neither an overflow policy nor hot keys.
====================  ==============================================================================================
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.host import OverflowPolicy
from serving.planner.curve import HitCurve
from serving.planner.reuse import NEVER, reuse_distances

Places = NDArray[np.integer]

#: The ``overflow_policy`` that makes the RAM tier follow a policy which inserts and evicts rows.
OVERFLOW_POLICIES: dict[str, OverflowPolicy] = {"lru": "evict_oldest"}

#: Groups of a sample. Each group gives an estimate, and the spread of the estimates gives the sample's error.
_GROUPS = 8


def lru_curve(places: Places, lookups: int) -> HitCurve:
    """Return the exact curve of LRU.

    Args:
        places: int[n], the known lookups in order.
        lookups: N, including lookups of unknown keys. An unknown key is never held, so it evicts nothing.
    """
    distances = reuse_distances(places)
    counts = np.bincount(distances[distances != NEVER])
    occurring = np.flatnonzero(counts)
    return HitCurve.of_steps(occurring + 1, np.cumsum(counts[occurring]), lookups)


def pinned_curve(places: Places, lookups: int) -> HitCurve:
    """Return the curve of the best fixed set of rows of every size. See ``lru_curve``."""
    counts = np.bincount(places)
    counts = np.sort(counts[counts > 0])[::-1]
    return HitCurve.of_steps(np.arange(1, counts.size + 1), np.cumsum(counts), lookups)


def file_order_curve(places: Places, lookups: int) -> HitCurve:
    """Return the curve of the first rows of the file. See ``lru_curve``."""
    counts = np.bincount(places)
    occurring = np.flatnonzero(counts)
    return HitCurve.of_steps(occurring + 1, np.cumsum(counts[occurring]), lookups)


#: By name, in the order of reports.
POLICIES: dict[str, Callable[[Places, int], HitCurve]] = {
    "lru": lru_curve,
    "pinned": pinned_curve,
    "file": file_order_curve,
}


def sampled_lru_curves(places: Places, lookups: int, sample_ratio: float) -> tuple[HitCurve, tuple[HitCurve, ...]]:
    """Estimate LRU's curve from a sample of the rows and all lookups of these rows.

    SHARDS (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST 2015): the hash of
    a row decides whether the row is in the sample. Each distance in the sample is scaled by ``1 / sample_ratio``. The
    sample's share of lookups is not its share of rows, because a few hot rows have many lookups. As in the paper's
    SHARDS-adj, the difference counts as lookups of distance 0, so misses are scaled up and hits are not.

    Args:
        places: int[n], the known lookups in order.
        lookups: N, including lookups of unknown keys.
        sample_ratio: the part of the rows in the sample, more than 0 and at most 1.

    Returns:
        the estimate, and one estimate from each eighth of the sample, for ``standard_error``.

    Raises:
        ValueError: an eighth of the sample has no row that was looked up.
    """
    hashes = _hash32(places)
    borders = [round(sample_ratio * part / _GROUPS * 2**32) for part in range(_GROUPS + 1)]
    groups = tuple(
        _scaled_curve(places, places[(hashes >= low) & (hashes < high)], lookups, sample_ratio / _GROUPS)
        for low, high in pairwise(borders)
    )
    return _scaled_curve(places, places[hashes < borders[-1]], lookups, sample_ratio), groups


def standard_error(groups: Sequence[HitCurve], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the standard error of a sample's hit rate at each of ``rows``."""
    spread: NDArray[np.float64] = np.std([group.hit_rate(rows) for group in groups], axis=0, ddof=1)
    spread /= np.sqrt(len(groups))
    return spread


def _scaled_curve(places: Places, sampled: Places, lookups: int, sample_ratio: float) -> HitCurve:
    if not sampled.size:
        raise ValueError(
            f"a sample of {sample_ratio:g} of the rows has no row that was looked up; take a larger sample"
        )
    distances = reuse_distances(sampled)
    counts = np.bincount(distances[distances != NEVER])
    occurring = np.flatnonzero(counts)
    misses = (sampled.size - np.cumsum(counts[occurring])) / sample_ratio
    rows = (occurring / sample_ratio).astype(np.int64) + 1
    return HitCurve.of_steps(rows, np.clip(places.size - misses, 0.0, None), lookups)


def _hash32(places: Places) -> NDArray[np.uint64]:
    """Return the upper half of SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014): uint64[n] below 2**32."""
    mixed = places.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)
