"""Random numbers that depend only on a key and a seed.

A row's first weights must not depend on when its key was first seen or on which process saw it, so they are a hash of
the key. The hash is SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def keyed_uniform(keys: NDArray[np.int64], columns: int, seed: int) -> NDArray[np.float64]:
    """Draw float64[N, columns] uniformly from [0, 1). Row i depends only on ``keys[i]`` and ``seed``."""
    stream = _mix(np.array([seed & _MASK], dtype=np.uint64))
    start = _mix(keys.astype(np.uint64) ^ stream)
    steps = np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return (_mix(start[:, None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
