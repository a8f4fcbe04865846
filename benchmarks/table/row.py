"""What a line of the table is: the records that it shows, in words, and what they are to reach."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from benchmarks.report import Record


@dataclass(frozen=True)
class Unit:
    """How a figure is shown.

    Attributes:
        name: after the figure.
        of: the unit that the record has; another one is an error.
        convert: from the record's figure to the shown one.
        digits: significant ones, of figures below 100.
    """

    name: str
    of: str
    convert: Callable[[float], float] = lambda value: value
    digits: int = 2


@dataclass(frozen=True)
class Target:
    """What a record is to reach.

    Attributes:
        text: the words for it.
        is_met: whether a record does.
        is_of_ours: it is our figure that does, not the ratio.
    """

    text: str
    is_met: Callable[[Record], bool]
    is_of_ours: bool = False


@dataclass(frozen=True)
class Row:
    """One line: as many records as it has cases, side by side, separated by slashes.

    Attributes:
        what: was measured; ``{name}`` stands for the cases' parameters of that name, which so are as measured.
        name: of the records; their file is called after its first part.
        cases: parameters, of which each tells one record from all others of the name.
        unit: of ours.
        against: the peer or the limit; ``, time`` at the end where less is better.
        target: of each of the records.
        is_main: whether the README shows it.
        file: that has the records, where it is another one.
    """

    what: str
    name: str
    cases: list
    unit: Unit
    against: str
    target: Target | None = None
    is_main: bool = True
    file: str = ""

    @property
    def source(self):
        """The file's name."""
        return self.file or f"{self.name.partition('.')[0]}.json"


@dataclass(frozen=True)
class Grid:
    """Ratios of a benchmark by family and engine, one line each, and by number of samples, a column each.

    Attributes:
        families: by record name, in words.
        engines: by parameter, in words.
        samples: the columns.
        floors: the least ratio, by engine and number of samples.
        held: the families that these are for.
    """

    families: dict
    engines: dict
    samples: tuple
    floors: dict
    held: tuple

    def cells(self):
        """All (family, engine, samples)."""
        return product(self.families, self.engines, self.samples)

    def row(self, name, engine, samples):
        """One cell, as a row of one record."""
        floor = self.floors.get((engine, samples)) if name in self.held else None
        cases = of(engine=engine, samples=samples)
        return Row("", name, cases, CALLS, "", at_least(floor) if floor else None)


CALLS = Unit("calls/s", "call/s")


def of(**params):
    """The cases of these parameters; where some are tuples, each combination, the last one changing fastest."""
    values = [value if isinstance(value, tuple) else (value,) for value in params.values()]
    return [dict(zip(params, combination, strict=True)) for combination in product(*values)]


def at_least(floor):
    """A ratio that is to be no smaller."""
    return Target(f">= {floor:g}", lambda record: record.ratio >= floor)


def at_most(most):
    """A ratio of times that is to be no larger."""
    return Target(f"<= {most:g}", lambda record: record.ratio <= most)


def ours_at_most(most, unit):
    """A figure of ours, in the record's unit, that is to be no larger."""
    return Target(f"<= {most:g} {unit}", lambda record: record.ours <= most, is_of_ours=True)


def passes(text):
    """What the benchmark itself has judged, round by round."""
    return Target(text, lambda record: record.params["passes"])
