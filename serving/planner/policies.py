"""What decides which rows a tier holds, and the hit curve that follows.

Rows are named by their place in the model file, 0 to V - 1. Each function takes the known lookups as places and
returns a ``HitCurve``; a further policy is a further function.

====================  ==============================================================================================
``lru``               the least recently looked-up row leaves; a row comes in when it is looked up. What a cache that
                      learns from traffic can be expected to do. The RAM tier comes near it with ``evict_oldest``.
``pinned``            the rows that the trace looks up most often, chosen knowing the trace and never replaced. No
                      other fixed set answers more; the RAM tier holds it with ``hot_keys``.
``file``              the first rows of the model file: what the RAM tier holds where it has less room than rows, and
                      neither a policy for overflows nor hot keys.
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

#: What makes the RAM tier follow a policy that takes rows in and lets them go: by policy, its ``overflow_policy``.
OVERFLOW_POLICIES: dict[str, OverflowPolicy] = {"lru": "evict_oldest"}

#: Groups of a sample, each an estimate of its own, whose spread is the sample's error.
_GROUPS = 8


def lru_curve(places: Places, lookups: int) -> HitCurve:
    """The exact curve of LRU.

    Args:
        places: int[n], the known lookups in their order.
        lookups: N, those of unknown keys too; an unknown key is never held, so it pushes nothing out.
    """
    distances = reuse_distances(places)
    counts = np.bincount(distances[distances != NEVER])
    occurring = np.flatnonzero(counts)
    return HitCurve.of_steps(occurring + 1, np.cumsum(counts[occurring]), lookups)


def pinned_curve(places: Places, lookups: int) -> HitCurve:
    """The curve of the best fixed set of rows, of every size. See ``lru_curve``."""
    counts = np.bincount(places)
    counts = np.sort(counts[counts > 0])[::-1]
    return HitCurve.of_steps(np.arange(1, counts.size + 1), np.cumsum(counts), lookups)


def file_order_curve(places: Places, lookups: int) -> HitCurve:
    """The curve of the first rows of the file. See ``lru_curve``."""
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
    """Estimate LRU's curve from some of the rows, with all of their lookups.

    SHARDS (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST 2015): a row is in
    the sample if its hash says so, and a distance between sampled rows stands for one ``1 / sample_ratio`` as long.
    The sample's share of lookups differs from its share of rows by the hot rows that are in it or not; as in the
    paper's SHARDS-adj the difference counts as lookups of distance 0: misses, not hits, are scaled up.

    Args:
        places: int[n], the known lookups in their order.
        lookups: N, those of unknown keys too.
        sample_ratio: part of the rows to take, more than 0 and at most 1.

    Returns:
        the estimate, and eight more, each from an eighth of the sample, for ``standard_error``.

    Raises:
        ValueError: an eighth of the sample has none of the rows that were looked up.
    """
    hashes = _hash32(places)
    borders = [round(sample_ratio * part / _GROUPS * 2**32) for part in range(_GROUPS + 1)]
    groups = tuple(
        _scaled_curve(places, places[(hashes >= low) & (hashes < high)], lookups, sample_ratio / _GROUPS)
        for low, high in pairwise(borders)
    )
    return _scaled_curve(places, places[hashes < borders[-1]], lookups, sample_ratio), groups


def standard_error(groups: Sequence[HitCurve], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """The standard error, at each of ``rows``, of the hit rate that all groups of a sample give together."""
    spread: NDArray[np.float64] = np.std([group.hit_rate(rows) for group in groups], axis=0, ddof=1)
    spread /= np.sqrt(len(groups))
    return spread


def _scaled_curve(places: Places, sampled: Places, lookups: int, sample_ratio: float) -> HitCurve:
    if not sampled.size:
        raise ValueError(f"{sample_ratio:g} of the rows are none of those looked up; take a larger sample")
    distances = reuse_distances(sampled)
    counts = np.bincount(distances[distances != NEVER])
    occurring = np.flatnonzero(counts)
    misses = (sampled.size - np.cumsum(counts[occurring])) / sample_ratio
    rows = (occurring / sample_ratio).astype(np.int64) + 1
    return HitCurve.of_steps(rows, np.clip(places.size - misses, 0.0, None), lookups)


def _hash32(places: Places) -> NDArray[np.uint64]:
    """The upper half of SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014): uint64[n] below 2**32."""
    mixed = places.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)
