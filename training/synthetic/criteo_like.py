"""Generate samples of Criteo's form from a known truth, so that the best possible AUC is known.

Keys follow a power law in every slot. A sample's logit is a sum of planted weights: one per key (a hash of the key, so
nothing is stored), one per dense feature, and one per pair of keys in a few pairs of slots. The logit gives the chance
that the label is 1. No model can rank samples better than this chance does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from training.data.criteo import DENSE_FEATURES, SLOTS, encode_categories, encode_counts
from training.model.metrics import area_under_curve
from training.samples import Bags, Samples
from training.synthetic.keyed_random import keyed_uniform

_ALPHA = 1.1
_SMALLEST_SLOT, _LARGEST_SLOT = 10, 10_000
_MISSING_COUNT_RATIO = 0.1
_MISSING_CATEGORY_RATIO = 0.03
_PAIRS = ((0, 1), (2, 3), (4, 5))  # slots whose keys also have a weight as a pair
_SCRAMBLE = 2654435761  # odd, so rank * _SCRAMBLE mod 2^32 is unique
_BLOCK_ROWS = 65_536
# Added to the seeds of the truth. Tables draw first weights with the same hash and a run's seed or the next ones, and a
# model must not start with what it should learn.
_TRUTH_SEEDS = 2**32


def power_law_keys(uniform: NDArray[np.float64], alpha: float, lowest: int, highest: int) -> NDArray[np.int64]:
    """Turn uniform numbers from [0, 1] into keys ``lowest`` ... ``highest``. Low keys are the most frequent.

    With M = highest - lowest + 1 the key is round(((M^(1 - alpha) - 1) u + 1)^(1 / (1 - alpha))) + lowest - 1, the
    inverse distribution function of HugeCTR's data generator.

    Raises:
        ValueError: ``alpha`` is not positive or is 1, or the range is empty.
    """
    if not alpha > 0 or alpha == 1:
        raise ValueError(f"alpha must be positive and not 1, got {alpha}")
    if highest < lowest:
        raise ValueError(f"no keys from {lowest} to {highest}")
    span = float(highest - lowest + 1)
    y = ((span ** (1 - alpha) - 1) * uniform + 1) ** (1 / (1 - alpha))
    keys: NDArray[np.int64] = np.rint(y).astype(np.int64) + lowest - 1
    return keys.clip(lowest, highest)


@dataclass(frozen=True, slots=True)
class SyntheticSamples:
    """Generated samples and their truth.

    Attributes:
        samples: what a model may see.
        probabilities: float64[B, L], the chance that each label had of being 1.
    """

    samples: Samples
    probabilities: NDArray[np.float64]

    def best_known_auc(self, rows: slice = slice(None), label: int = 0) -> float:
        """Return the AUC of the true probabilities. A model exceeds it only by chance."""
        return area_under_curve(self.samples.labels[rows, label], self.probabilities[rows, label])


@dataclass(frozen=True, slots=True)
class SyntheticCriteo(SyntheticSamples):
    """Generated samples of Criteo's form.

    Attributes:
        counts: float64[B, 13], the counts of ``samples.dense``, NaN if missing.
    """

    counts: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Concatenate samples. ``parts`` has at least one item."""
        return cls(
            samples=Samples.joined([part.samples for part in parts]),
            probabilities=np.concatenate([part.probabilities for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
        )


def generate(rows: int, seed: int) -> SyntheticCriteo:
    """Draw ``rows`` samples, at least 1. The same seed gives the same samples and truth."""
    return SyntheticCriteo.joined(list(generate_blocks(rows, seed)))


def generate_blocks(rows: int, seed: int) -> Iterator[SyntheticCriteo]:
    """Draw samples in blocks. See ``generate``."""
    rng = np.random.default_rng(seed)
    for start in range(0, rows, _BLOCK_ROWS):
        yield _draw(rng, min(_BLOCK_ROWS, rows - start), seed)


def _draw(rng: np.random.Generator, rows: int, seed: int) -> SyntheticCriteo:
    largest = np.geomspace(_SMALLEST_SLOT, _LARGEST_SLOT, SLOTS).astype(np.int64)
    uniform = rng.random((rows, SLOTS))
    ranks = np.stack(
        [power_law_keys(uniform[:, slot], _ALPHA, 0, size - 1) for slot, size in enumerate(largest)], axis=1
    )
    categories = (ranks * _SCRAMBLE).astype(np.uint32)
    keys = encode_categories(categories, missing=rng.random((rows, SLOTS)) < _MISSING_CATEGORY_RATIO)

    counts = np.floor(np.exp(rng.normal(1.5, 1.5, (rows, DENSE_FEATURES)))) - 1
    counts[rng.random((rows, DENSE_FEATURES)) < _MISSING_COUNT_RATIO] = np.nan
    dense = encode_counts(counts)

    probabilities = 1 / (1 + np.exp(-true_logits(dense, keys, seed)))
    labels = (rng.random(rows) < probabilities).astype(np.float32)
    samples = Samples(labels[:, None], dense, Bags.one_key_each(keys))
    return SyntheticCriteo(samples, probabilities[:, None], counts)


def true_logits(dense: NDArray[np.float32], keys: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Return the logits, float64[B], of float32[B, 13] and int64[B, 26] under a seed's truth."""
    key_weights = planted_weights(keys.reshape(-1), seed).reshape(keys.shape).sum(axis=1) * 0.25
    dense_weights = planted_weights(np.arange(DENSE_FEATURES), seed) * 0.2
    logits = key_weights + (dense - 1.5) @ dense_weights - 1
    for number, (left, right) in enumerate(_PAIRS):
        both = keys[:, left] * SLOTS + keys[:, right]
        logits = logits + planted_weights(both, seed + 1 + number) * 0.3
    return np.asarray(logits, dtype=np.float64)


def true_uniform(keys: NDArray[np.int64], columns: int, seed: int) -> NDArray[np.float64]:
    """Draw float64[N, columns] of the truth from [0, 1). No table's first weights use the same numbers."""
    return keyed_uniform(keys, columns, seed + _TRUTH_SEEDS)


def planted_weights(keys: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Return float64[N] of the truth: one weight of mean 0 and variance 1 for every key of int64[N]."""
    return np.asarray((2 * true_uniform(keys, 1, seed)[:, 0] - 1) * 3**0.5)
