"""The results of trainings as a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.model.picture import picture
from training.model.losses import LOSSES

#: The mean prediction and the mean label of each group of samples.
Groups = Sequence[Sequence[float]]

_INCHES = 4.0  # of each part


def draw(file: Path, runs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draw the loss and another figure of every epoch, and the calibration of the last.

    Args:
        file: see ``picture``.
        runs: for each training, by its name, the epochs as ``--metrics`` writes them; may be empty.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    learned = [loss for loss in LOSSES if any(loss.error in epochs[-1] for epochs in runs.values() if epochs)]
    with picture(file, (_INCHES * (1 + 2 * len(learned)), _INCHES)) as figure:
        losses, *others = figure.subplots(1, 1 + 2 * len(learned), squeeze=False)[0]
        losses.set(title=", ".join(loss.measured for loss in learned), xlabel="epoch", ylabel="mean")
        for run, epochs in runs.items():
            numbers, named = [epoch["epoch"] for epoch in epochs], f"{run}, " if run else ""
            losses.plot(numbers, [epoch["loss"] for epoch in epochs], marker="o", label=f"{named}training")
            for label in epochs[-1]["evaluation_loss"] if epochs else ():
                of_label = [epoch["evaluation_loss"].get(label) for epoch in epochs]
                losses.plot(numbers, of_label, marker="o", label=f"{named}evaluation, {label}")
        for loss, figures, calibration in zip(learned, others[::2], others[1::2], strict=True):
            shown, name = loss.shown[0]
            figures.set(title=shown, xlabel="epoch")
            groups = dict[str, Groups]()
            for run, epochs in runs.items():
                numbers, named = [epoch["epoch"] for epoch in epochs], f"{run}, " if run else ""
                for label in epochs[-1].get(loss.error, ()) if epochs else ():
                    values = [epoch[name].get(label) for epoch in epochs]
                    defined = [math.nan if value is None else value for value in values]
                    figures.plot(numbers, defined, marker="o", label=f"{named}{label}")
                    groups[f"{named}{label}"] = epochs[-1]["calibration"][label]
            draw_calibration(calibration, "calibration of the last epoch", groups)
        for axes in (losses, *others):
            axes.grid(visible=True, alpha=0.3)
            if axes.lines:
                axes.legend()
        for axes in (losses, *others[::2]):
            axes.locator_params(axis="x", integer=True)


def draw_calibration(axes: Any, title: str, groups: Mapping[str, Groups]) -> None:
    """Draw mean predictions and mean labels, by the name of their line, next to those of a perfect model."""
    for name, of_name in groups.items():
        axes.plot(*zip(*of_name, strict=True), marker="o", label=name)
    if groups:
        ends = [end(number for of_name in groups.values() for pair in of_name for number in pair) for end in (min, max)]
        axes.plot(ends, ends, color="gray", linestyle=":", label="perfect")
    axes.set(title=title, xlabel="mean prediction", ylabel="mean label")
