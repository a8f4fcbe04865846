"""The hit curve of one table under one policy: how many lookups a cache answers, by the rows it holds."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Lookups answered by the number of rows held: the literature's miss-ratio curve, upside down.

    A step function with P steps: ``rows[i]`` rows answer ``hits[i]`` lookups, and so does every number of rows below
    ``rows[i + 1]``. Every policy is a function that returns a hit curve.

    Attributes:
        rows: int64[P], ascending; the first is 0.
        hits: float64[P], never falling; the first is 0. Hits are whole numbers, except in a curve from a sample.
        lookups: the number of lookups in the trace, including lookups of unknown keys.
    """

    rows: NDArray[np.int64]
    hits: NDArray[np.float64]
    lookups: int

    @classmethod
    def of_steps(cls, rows: NDArray[np.integer], hits: NDArray[np.number], lookups: int) -> Self:
        """Return a curve that starts at no rows and no hits and then takes these steps."""
        return cls(
            rows=np.concatenate(([0], rows)).astype(np.int64),
            hits=np.concatenate(([0.0], hits)),
            lookups=lookups,
        )

    def hits_at(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the lookups that caches of ``rows`` rows answer; ``rows`` may have any shape."""
        return self.hits[np.searchsorted(self.rows, rows, side="right") - 1]

    def hit_rate(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the part of all lookups that caches of ``rows`` rows answer; 0 for an empty trace."""
        return self.hits_at(rows) / max(self.lookups, 1)

    @property
    def best_hit_rate(self) -> float:
        """The hit rate of a cache with room for every row."""
        return float(self.hits[-1]) / max(self.lookups, 1)

    def rows_for(self, hit_rate: float) -> int | None:
        """Return the fewest rows that reach ``hit_rate``, or None if no number of rows does."""
        reached = self.hits / max(self.lookups, 1) >= hit_rate
        return int(self.rows[np.argmax(reached)]) if reached[-1] else None
