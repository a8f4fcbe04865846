"""The results of trainings as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.model.picture import picture

_INCHES = (12.0, 4.0)


def draw(file: Path, runs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draw loss and AUC of every epoch, and the calibration of the last.

    Args:
        file: see ``picture``.
        runs: for each training, by its name, the epochs as ``--metrics`` writes them; may be empty.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    with picture(file, _INCHES) as figure:
        losses, areas, calibration = figure.subplots(1, 3)
        calibration.plot([0, 1], [0, 1], color="gray", linestyle=":", label="perfect")
        for run, epochs in runs.items():
            numbers, named = [epoch["epoch"] for epoch in epochs], f"{run}, " if run else ""
            losses.plot(numbers, [epoch["loss"] for epoch in epochs], marker="o", label=f"{named}training")
            for label, groups in epochs[-1]["calibration"].items() if epochs else ():
                of_label = [epoch["log_loss"].get(label) for epoch in epochs]
                losses.plot(numbers, of_label, marker="o", label=f"{named}evaluation, {label}")
                of_label = [epoch["auc"].get(label) or 0.5 for epoch in epochs]
                areas.plot(numbers, of_label, marker="o", label=f"{named}{label}")
                calibration.plot(*zip(*groups, strict=True), marker="o", label=f"{named}{label}")
        for axes, title, x, y in (
            (losses, "log loss", "epoch", "mean"),
            (areas, "AUC", "epoch", "area"),
            (calibration, "calibration of the last epoch", "mean prediction", "share of ones"),
        ):
            axes.set(title=title, xlabel=x, ylabel=y)
            axes.grid(visible=True, alpha=0.3)
            if axes.lines:
                axes.legend()
        for axes in (losses, areas):
            axes.locator_params(axis="x", integer=True)
