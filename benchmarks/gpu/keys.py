"""Keys and their rows, made the same way on the host and on the device so that answers can be checked.

A row follows from its key. Its columns are values that the row's form holds exactly. So every form must return them
bit for bit, and the sum of a hundred rows is exact in any order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_cache.embedding_cache import EmbeddingCache

ZIPF_EXPONENT = 1.05
OFFERED_RATIO = 0.75  # of the slots, so that few lines are full
POPULATION_RATIO = 0.65
FIRST_ABSENT_KEY = 1 << 40
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_CHUNK_KEYS = 1 << 18


class WrongAnswerError(Exception):
    """An answer is wrong, so nothing is timed."""


def codes_of(row_dtype):
    """float32[256]: the values of columns. Column 0 is the largest, so that a row's scale is 1.

    Whole numbers up to 127; for fp8, which has four significant bits, up to 448.
    """
    if row_dtype == "fp8":
        signs, exponents, fractions = np.meshgrid([-1, 1], np.arange(16) % 5, np.arange(8), indexing="ij")
        return (signs * (8 + fractions) * 2**exponents).ravel().astype(np.float32), np.float32(448)
    return (np.arange(256) % 255 - 127).astype(np.float32), np.float32(127)


def rows_of(xp, keys, dim, row_dtype):
    """float32[N, D], the rows of keys int64[N]; both in the array namespace ``xp``."""
    codes, largest = codes_of(row_dtype)
    mixed = keys * _GOLDEN >> 33
    columns = xp.arange(1, 2 * dim, 2, dtype=np.int64)
    rows = xp.asarray(codes)[mixed[:, None] * columns[None, :] >> 5 & 255]
    rows[:, 0] = largest
    return rows


def positions(distribution, population, count, seed=1):
    """int64[count]: places in a population, ``"uniform"`` or ``"zipf"``: the i-th as often as 1 / i^1.05 says."""
    rng = np.random.default_rng(seed)
    if distribution == "uniform":
        return rng.integers(population, size=count)
    shares = np.cumsum(np.arange(1, population + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
    return np.searchsorted(shares, rng.random(count) * shares[-1]).clip(max=population - 1)


@dataclass(frozen=True)
class Filled:
    """A filled cache and some of its keys, in no particular order."""

    cache: EmbeddingCache
    population: np.ndarray

    def close(self):
        self.cache.close()


def filled_cache(device, slots, dim, row_dtype="fp32", line_keys=15, readers=None):
    """Offer keys to a new cache; what it kept of them is the population, of the same size for all forms."""
    cache = EmbeddingCache(dim, slots, device, row_dtype, line_keys=line_keys, seed=0, readers=readers)
    for first in range(0, int(slots * OFFERED_RATIO), _CHUNK_KEYS):
        keys = device.xp.arange(first, min(first + _CHUNK_KEYS, int(slots * OFFERED_RATIO)), dtype=np.int64)
        cache.replace(keys, rows_of(device.xp, keys, dim, row_dtype))
    held, _ = cache.dump()
    size = int(slots * POPULATION_RATIO)
    if held.size < size:
        raise WrongAnswerError(f"of {int(slots * OFFERED_RATIO)} keys for {slots} slots, {held.size} are held")
    return Filled(cache, np.random.default_rng(0).permutation(held)[:size])


@dataclass(frozen=True)
class Pool:
    """The keys of the queries, int64[P] on the host and on the device. Batches are consecutive slices."""

    host_keys: np.ndarray
    keys: Any
    distribution: str
    hit_rate: float

    def batches(self, batch, most):
        """Slices of the device's keys and their starts."""
        count = min(most, len(self.host_keys) // batch)
        return [self.keys[first : first + batch] for first in range(0, count * batch, batch)]


def pool_of(device, population, places, distribution, hit_rate):
    """Keys of the population at those places. Some, at random, are replaced by unknown keys."""
    keys = population[places]
    misses = np.random.default_rng(2).random(keys.size) >= hit_rate
    keys[misses] = FIRST_ABSENT_KEY + np.arange(int(misses.sum()))
    return Pool(keys, device.xp.asarray(keys), distribution, hit_rate)


def check_rows(device, what, host_keys, rows, row_dtype, missing=None):
    """Compare all rows on the device, and some of them on the host with NumPy.

    Raises:
        WrongAnswerError: one differs.
    """
    count, dim = rows.shape
    some = np.unique(np.linspace(0, count - 1, min(count, 4096)).astype(np.int64))
    wanted = rows_of(np, host_keys[some], dim, row_dtype)
    if missing is not None:
        wanted[missing[some]] = 0.0
    if not np.array_equal(device.to_host(rows[device.xp.asarray(some)]), wanted):
        raise WrongAnswerError(f"{what}: rows differ from NumPy's")
    for first in range(0, count, _CHUNK_KEYS):
        part = slice(first, min(first + _CHUNK_KEYS, count))
        expected = rows_of(device.xp, device.xp.asarray(host_keys[part]), dim, row_dtype)
        if missing is not None:
            expected[device.xp.asarray(missing[part])] = 0.0
        if int(device.to_host((rows[part] != expected).sum())):
            raise WrongAnswerError(f"{what}: rows {first} to {part.stop} are not those of their keys")
