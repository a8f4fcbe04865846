"""The record of a measurement."""

import json
from dataclasses import asdict, dataclass, field
from statistics import median

from benchmarks.report import hardware, versions


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        name: the measurement.
        dim: columns of a row; None where there are no rows.
        dtype: the form of the rows.
        batch: keys per call over all tables; samples of a pooled lookup.
        distribution: of the keys.
        hit_rate: the share of keys that hit.
        median_us: microseconds per call, the median over the rounds.
        spread: the least and the most microseconds.
        ratio: the peer's time over ours, or our rate over the limit; the median over the rounds. More is better. None
            if there is no peer.
        ratio_to: the peer or the limit, or the reason why there is none.
        details: bytes, rates and other figures.
    """

    name: str
    dim: int | None
    dtype: str | None
    batch: int
    distribution: str | None
    hit_rate: float | None
    median_us: float
    spread: tuple[float, float]
    ratio: float | None
    ratio_to: str
    details: dict = field(default_factory=dict)

    @classmethod
    def of(cls, name, rounds, ratio_to, *, dim=None, dtype=None, batch=1, distribution=None, hit_rate=None, **details):
        """Make a record from the times of ``take_turns``: ours, and the peer's if there is a peer."""
        ours = [times[0] for times in rounds]
        ratio = median(times[1] / times[0] for times in rounds) if len(rounds[0]) > 1 else None
        spread = min(ours), max(ours)
        return cls(name, dim, dtype, batch, distribution, hit_rate, median(ours), spread, ratio, ratio_to, details)

    def __str__(self):
        form = [str(value) for value in (self.dim, self.dtype, self.distribution, self.hit_rate) if value is not None]
        ratio = "absent" if self.ratio is None else f"{self.ratio:.2f}"
        details = " ".join(f"{key}={_short(value)}" for key, value in self.details.items())
        return (
            f"{self.name:<20} {self.batch:>8} {' '.join(form):<24} {self.median_us:>10.2f} us"
            f" ({self.spread[0]:.2f}..{self.spread[1]:.2f})  {ratio} of {self.ratio_to}  {details}"
        )


def about(device):
    """Return the machine and the versions of a run."""
    return {
        "device": {"device": device.name, **device.properties()},
        "hardware": hardware(),
        "versions": versions(),
    }


def write(file, where, records, failures, absent):
    """Write the document to ``file``, if given: the machine, failures, absent peers and records.

    Called after each record, so that an interrupted run leaves a complete file.
    """
    if file is None:
        return
    document = {**where, "failures": failures, "absent": absent, "records": [asdict(record) for record in records]}
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f".{file.name}.tmp")
    made.write_text(json.dumps(document, indent=1) + "\n")
    made.replace(file)


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)
