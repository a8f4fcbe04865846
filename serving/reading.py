"""What the parts of a server have to show on its metrics page; needs nothing of Prometheus."""

from dataclasses import dataclass

from serving.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Reading:
    """One value that another part of the server keeps.

    Attributes:
        name: the metric's name without ``_total``.
        help: what it counts.
        labels: label names and values.
        value: of a counter, the count since the start; of a gauge, a number as it is now; of a histogram, its buckets.
        is_gauge: whether the value may fall.
    """

    name: str
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float | Histogram
    is_gauge: bool = False
