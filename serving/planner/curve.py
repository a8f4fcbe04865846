"""The hit curve of one table under one policy: how many lookups a cache answers, by the rows it holds."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Lookups answered, by rows held; the miss-ratio curve of the literature, upside down.

    A step function with P steps: ``hits[i]`` lookups are answered by ``rows[i]`` rows, and by any number up to
    ``rows[i + 1]``, exclusive. Every policy, whatever its rule, is a function that makes one of these.

    Attributes:
        rows: int64[P], ascending; the first is 0.
        hits: float64[P], never falling; the first is 0. Whole numbers, except for a curve from a sample.
        lookups: how many lookups the trace has, those of unknown keys among them.
    """

    rows: NDArray[np.int64]
    hits: NDArray[np.float64]
    lookups: int

    @classmethod
    def of_steps(cls, rows: NDArray[np.integer], hits: NDArray[np.number], lookups: int) -> Self:
        """A curve that starts at no rows and no hits, and then takes these steps."""
        return cls(
            rows=np.concatenate(([0], rows)).astype(np.int64),
            hits=np.concatenate(([0.0], hits)),
            lookups=lookups,
        )

    def hits_at(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Lookups answered by caches of ``rows`` rows, an array of any shape, none negative."""
        return self.hits[np.searchsorted(self.rows, rows, side="right") - 1]

    def hit_rate(self, rows: ArrayLike) -> NDArray[np.float64]:
        """The part of all lookups that caches of ``rows`` rows answer; 0 for an empty trace."""
        return self.hits_at(rows) / max(self.lookups, 1)

    @property
    def best_hit_rate(self) -> float:
        """That of a cache with room for every row."""
        return float(self.hits[-1]) / max(self.lookups, 1)

    def rows_for(self, hit_rate: float) -> int | None:
        """The fewest rows that reach ``hit_rate``; None where no number does."""
        reached = self.hits / max(self.lookups, 1) >= hit_rate
        return int(self.rows[np.argmax(reached)]) if reached[-1] else None
