"""The results of trainings as a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.model.picture import picture
from training.model.losses import LOSSES, Loss

#: The mean prediction and the mean label of each group of samples.
Groups = Sequence[Sequence[float]]

_INCHES = 4.0  # of each part
_MOST_TIMES = 10.0  # errors that differ more have axes of their own


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
    scales = _scales(runs)
    parts = len(learned) + 2 * len(scales) or 1
    with picture(file, (_INCHES * parts, _INCHES)) as figure:
        axes = iter(figure.subplots(1, parts, squeeze=False)[0])
        of_epochs = []
        for loss in learned:
            losses = next(axes)
            of_epochs.append(losses)
            losses.set(title=loss.measured, xlabel="epoch", ylabel="mean")
            for run, epochs in runs.items():
                numbers, named = [epoch["epoch"] for epoch in epochs], f"{run}, " if run else ""
                labels = epochs[-1].get(loss.error, ()) if epochs else ()
                if labels and loss is _first_loss(epochs):  # the training loss is that of all labels
                    losses.plot(numbers, [epoch["loss"] for epoch in epochs], marker="o", label=f"{named}training")
                for label in labels:
                    of_label = [epoch["evaluation_loss"].get(label) for epoch in epochs]
                    losses.plot(numbers, of_label, marker="o", label=f"{named}evaluation, {label}")
        for scale in scales:
            figures, calibration = next(axes), next(axes)
            of_epochs.append(figures)
            shown, name = scale.loss.shown[0]
            figures.set(title=shown, xlabel="epoch")
            groups = dict[str, Groups]()
            for run, label in scale.lines:
                epochs, line = runs[run], f"{run}, {label}" if run else label
                values = [epoch[name].get(label) for epoch in epochs]
                defined = [math.nan if value is None else value for value in values]
                figures.plot([epoch["epoch"] for epoch in epochs], defined, marker="o", label=line)
                groups[line] = epochs[-1]["calibration"][label]
            draw_calibration(calibration, "calibration of the last epoch", groups)
        for one in figure.axes:
            one.grid(visible=True, alpha=0.3)
            if one.lines:
                one.legend()
        for one in of_epochs:
            one.locator_params(axis="x", integer=True)


@dataclass
class _Scale:
    """Labels whose figures one axis can show: of one loss, with errors of similar size.

    Attributes:
        loss: of the labels.
        error: of a constant prediction of the first label.
        lines: for each label its run and its name.
    """

    loss: Loss
    error: float
    lines: list[tuple[str, str]]


def _scales(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[_Scale]:
    found = list[_Scale]()
    for loss in LOSSES:
        for run, epochs in runs.items():
            for label in epochs[-1].get(loss.error, ()) if epochs else ():
                error = epochs[-1].get(loss.base, {}).get(label) or 0.0
                is_near = loss.kind == "probability"  # whose figures have no unit
                near = (other for other in found if other.loss is loss and (is_near or _are_near(other.error, error)))
                scale = next(near, None)
                if scale is None:
                    found.append(scale := _Scale(loss, error, []))
                scale.lines.append((run, label))
    return found


def _are_near(one: float, other: float) -> bool:
    return one <= _MOST_TIMES * other and other <= _MOST_TIMES * one


def _first_loss(epochs: Sequence[dict[str, Any]]) -> Loss | None:
    return next((loss for loss in LOSSES if loss.error in epochs[-1]), None)


def draw_calibration(axes: Any, title: str, groups: Mapping[str, Groups]) -> None:
    """Draw mean predictions and mean labels, by the name of their line, next to those of a perfect model."""
    for name, of_name in groups.items():
        axes.plot(*zip(*of_name, strict=True), marker="o", label=name)
    if groups:
        ends = [end(number for of_name in groups.values() for pair in of_name for number in pair) for end in (min, max)]
        axes.plot(ends, ends, color="gray", linestyle=":", label="perfect")
    axes.set(title=title, xlabel="mean prediction", ylabel="mean label")
