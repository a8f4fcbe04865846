"""Durations, counted by upper bound."""

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """Counts of durations by upper bound, and their sum. Not thread-safe by itself.

    Attributes:
        bounds_s: upper bounds in seconds, ascending; a duration on a bound counts below it.
        counts: durations up to each bound and above the one before, and at the end those above all.
        sum_s: of all durations.
    """

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Start empty."""
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> "Histogram":
        """The same counts, which stay as they are now."""
        other = Histogram(self.bounds_s)
        other.counts, other.sum_s = self.counts.copy(), self.sum_s
        return other

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's cumulative buckets."""
        bounds = [*(f"{bound:g}" for bound in self.bounds_s), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))
