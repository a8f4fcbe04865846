"""Hit curves as a picture: letters in the terminal, or a file drawn by matplotlib."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from serving.model.picture import picture
from serving.planner.plan import TablePlan

_LINES, _COLUMNS = 10, 64


def chart(plan: TablePlan) -> Iterator[str]:
    """Yield the hit curves as lines of text, with one letter per policy and a logarithmic scale of rows."""
    rows = np.geomspace(1, plan.rows, _COLUMNS).round().astype(np.int64)
    lines = [[" "] * _COLUMNS for _ in range(_LINES + 1)]
    for name, curve in reversed(plan.curves.items()):
        for column, height in enumerate((curve.hit_rate(rows) * _LINES).round().astype(int).tolist()):
            lines[height][column] = name[0]
    for height in range(_LINES, -1, -1):
        yield f"  {height / _LINES:>4.1f} |{''.join(lines[height]).rstrip()}"
    yield f"       +{'-' * _COLUMNS}"
    key = ", ".join(f"{name[0]} {name}" for name in plan.curves)
    yield f"        {1:<10}{key:^{_COLUMNS - 24}}{f'{plan.rows:,} rows':>14}"


def draw(plans: Sequence[TablePlan], file: Path) -> None:
    """Draw the hit curves of all tables into one picture. The file's suffix says its format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    with picture(file, (8, 3 * len(plans))) as figure:
        for plan, axes in zip(plans, np.atleast_1d(figure.subplots(len(plans))), strict=True):
            sizes = plan.curve_rows()
            for name, curve in plan.curves.items():
                axes.plot(sizes, curve.hit_rate(sizes), label=name)
            axes.set(title=plan.name, xlabel="rows", ylabel="hit rate", xscale="log", ylim=(0, 1))
            axes.grid(visible=True, alpha=0.3)
            axes.legend()
