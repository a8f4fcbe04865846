"""Targets of the GPU cache and their verdicts. A missed target does not change the exit status."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Args:
        what: the text.
        name: the name of the records.
        where: other fields or details of the records.
        least_batch: the smallest batch of these records; the worst record counts.
        value: the figure.
        floor: the least, or the most if less is better.
        goal: the desired figure.
    """

    what: str
    name: str
    value: str
    floor: float
    goal: float
    where: dict = field(default_factory=dict)
    least_batch: int = 0

    @property
    def less_is_better(self):
        return self.value == "median_us"

    def measured(self, records):
        """Return the worst figure of the matching records, or None."""
        figures = [_figure(record, self.value) for record in records if self._is_about(record)]
        figures = [figure for figure in figures if figure is not None]
        return (max if self.less_is_better else min)(figures) if figures else None

    def verdict(self, figure):
        """Return "goal", "pass" or "FAIL"; "-" for no figure."""
        if figure is None:
            return "-"
        sign = -1 if self.less_is_better else 1
        return "goal" if sign * figure >= sign * self.goal else "pass" if sign * figure >= sign * self.floor else "FAIL"

    def _is_about(self, record):
        wanted = {"name": self.name, **self.where}
        return record.batch >= self.least_batch and all(_figure(record, key) == wanted[key] for key in wanted)


def _query(dim, dtype, value, floor, goal, line_keys=15):
    where = {"dim": dim, "dtype": dtype, "distribution": "uniform", "hit_rate": 1.0, "line_keys": line_keys}
    limit = "the byte limit" if value == "byte_limit_ratio" else f"the gather's share, {line_keys}-key lines"
    return Target(f"query, dim {dim} {dtype}, of {limit}", "query", value, floor, goal, where, least_batch=1 << 19)


def _graph(name, batch, floor_us, goal_us):
    where = {"batch": batch, "dim": 32, "distribution": "uniform"}
    return Target(f"{name} of {batch} keys in a graph, us", f"{name}_graph", "median_us", floor_us, goal_us, where)


# A lookup reads lines that a gather of known slots does not read. So its target is a share of the speed that the bytes
# of its layout allow.
TARGETS = (
    _query(32, "fp32", "byte_limit_ratio", 0.65, 0.80),
    _query(64, "fp32", "byte_limit_ratio", 0.70, 0.85),
    _query(128, "fp32", "byte_limit_ratio", 0.80, 0.90),
    _query(32, "fp16", "byte_limit_ratio", 0.50, 0.70),
    *(
        _query(dim, "fp32", "gather_share", 0.90, 0.95, line_keys)
        for dim in (32, 128)
        for line_keys in (15, 7)
    ),
    Target(
        "pooled, bags of 20, dim 64 fp32, of the byte limit", "pool", "byte_limit_ratio", 0.65, 0.80,
        {"dim": 64, "dtype": "fp32", "hit_rate": 1.0, "bag": 20, "tables": 26, "distribution": "uniform"},
        least_batch=1 << 14,
    ),
    *(
        _graph(name, batch, floor_us, goal_us)
        for name in ("pool", "lookup")  # what serving launches
        for batch, floor_us, goal_us in ((1 << 10, 10.0, 6.0), (1 << 13, 10.0, 8.0), (1 << 16, 20.0, 20.0))
    ),
    Target("predict, 1,024 samples, us", "predict", "median_us", 60.0, 60.0, {"batch": 1024}),
)  # fmt: skip


def print_table(records):
    """Print each target next to the measured figure."""
    print(f"{'target':<52} {'floor':>8} {'goal':>8} {'measured':>9}")
    for target in TARGETS:
        figure = target.measured(records)
        shown = "-" if figure is None else f"{figure:.2f}"
        print(f"{target.what:<52} {target.floor:>8} {target.goal:>8} {shown:>9}  {target.verdict(figure)}")


def _figure(record, key):
    return record.details.get(key) if key in record.details else getattr(record, key, None)
