"""The losses. Each loss knows which labels it takes, how good predictions are, and which notes help the user.

The loss layers of a training graph, ``--loss`` of ``hotrow train`` and the kinds of a version's outputs choose one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from serving.dense.primitives import sigmoid
from serving.model.records import Graph, OutputKind
from training.errors import TrainingError
from training.model.metrics import (
    area_under_curve,
    base_log_loss,
    calibration,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    r_squared,
    variance,
)

Floats = NDArray[np.floating]
#: What is known of predictions, by names of JSON.
Figures = Mapping[str, Any]

_FEW = 30  # with fewer rows of a class, the standard error of an AUC is about 0.05 or more
_NO_ORDER = 0.05  # an AUC so close to 0.5 is mostly chance
_TOO_GOOD = 0.99  # an AUC or R2 that clicks and ratings do not reach
_NEAR_ONE = 1 - 1e-9
_SMALL, _LARGE = 0.001, 1000  # numbers in between are shown with four decimals
_LONG = 1e16  # numbers of this size are shown with an exponent
_LEAST_STEPS = 30  # of float32 in a standard deviation; the rounding is then at most 1 % of the differences
_EXACT_INTEGERS = 2**24  # all integers up to this one are numbers of float32
#: What to do about a row whose label is null or NaN.
NO_LABEL = "leave out rows without a label"


class Loss(ABC):
    """The loss of one column of the labels.

    Attributes:
        option: its name for ``--loss``.
        layer_type: its layer in training graphs.
        kind: of the output.
        meaning: what the model predicts, for people.
        expected: which labels it takes, for people.
        advice: what to do about another label.
        measured: what the loss is, for people.
        shown: the figures for people, with their names; the most important figure is first.
        members: of its layer, which ``statistics`` makes.
        error, base: the names of the figure that is small for good predictions, and of the same figure of a constant.
        quality: the name of the figure that is at most 1.
    """

    option: ClassVar[str]
    layer_type: ClassVar[str]
    kind: ClassVar[OutputKind]
    meaning: ClassVar[str]
    expected: ClassVar[str]
    advice: ClassVar[str] = ""
    members: ClassVar[tuple[str, ...]] = ()
    measured: ClassVar[str]
    shown: ClassVar[tuple[tuple[str, str], ...]]
    error: ClassVar[str]
    base: ClassVar[str]
    quality: ClassVar[str]

    def statistics(self, labels: Sequence[Floats], weights: Floats | None) -> dict[str, list[float]]:
        """Return members of a graph's loss layer from its columns of labels, [B] each, and the weights [B]."""
        return {}

    @abstractmethod
    def is_wrong(self, labels: Floats) -> NDArray[np.bool_]:
        """Return which labels it does not take."""

    def fault(self, label: float) -> str:
        """Say what is wrong with a label that it does not take, and what to do."""
        text = np.format_float_positional(label, trim="-") if abs(label) < _LONG else f"{label:g}"
        advice = f"; {NO_LABEL}" if math.isnan(label) else self.advice if math.isfinite(label) else ""
        return f"expected {self.expected}, found {text}{advice}"

    def unlearnable(self, labels: Floats) -> str:
        """Say why nothing can be learned from labels [B] of the training; empty if something can."""
        return ""

    @abstractmethod
    def of_samples(self, logits: Any, labels: Any) -> Any:
        """Return the loss of each sample: tensors of the same shape."""

    @abstractmethod
    def answers(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what a server answers."""

    @abstractmethod
    def logits(self, answers: Floats) -> Floats:
        """Undo ``answers``, in float64."""

    @abstractmethod
    def mean(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
        """Return the mean loss of labels [B] and logits [B], each of which counts as its weight says."""

    @abstractmethod
    def figures(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> dict[str, Any]:
        """Return what is known of at least one prediction. A figure that is not defined is NaN."""

    @abstractmethod
    def few(self, name: str, figures: Figures, rows: int) -> str:
        """Say that there are too few rows for the figures; empty if there are enough. ``name`` is the label's."""

    @abstractmethod
    def is_worthless(self, figures: Figures) -> bool:
        """Return whether training has diverged."""

    def chance(self, figures: Figures) -> str:
        """Return what else speaks against a model that is worse than a constant."""
        return ""

    def verdict(self, name: str, figures: Figures) -> Iterator[str]:
        """Yield notes on a label's figures that are likely mistakes.

        Raises:
            TrainingError: the model is so wrong that it is not written.
        """
        names = {figure: shown for shown, figure in self.shown}
        quality, error, base = (figures.get(figure) for figure in (self.quality, self.error, self.base))
        if error is None or base is None:  # absent in checkpoints of earlier versions
            return
        if quality is not None and quality > _TOO_GOOD:
            yield (
                f"note: an {names[self.quality]} of {quality:.4f} for {name} is rare: a column may say what happened "
                "after the request, which a server does not know yet"
            )
        error_of = f"the {names[self.error]} of {name} is"
        constant = f"a constant prediction has {figure_text(base)}"
        if self.is_worthless(figures):
            raise TrainingError(
                f"training has diverged, so no model is written: {error_of} {error:,.0f}, and {constant}. "
                "Dense columns of large numbers or a high --learning-rate can cause this"
            )
        if error > base > 0:  # 0: the evaluation rows all have the same label
            yield (
                f"note: {error_of} {figure_text(error)}, and {constant}{self.chance(figures)}. "
                "The model is worse than a constant. More --epochs or other columns may help"
            )


class LogLoss(Loss):
    """Binary cross-entropy of a label that is 0 or 1."""

    option = "log"
    layer_type = "BinaryCrossEntropyLoss"
    kind = "probability"
    meaning = "the probability of 1"
    expected = "0 or 1"
    advice = (
        ". To predict an amount or a rating, train a regression: --loss mse, or a graph with MeanSquaredErrorLoss. To "
        "predict a probability, turn the label into 0 and 1, such as rating >= 4"
    )
    measured = "log loss"
    shown = (("AUC", "auc"), ("log loss", "log_loss"))
    error, base, quality = "log_loss", "base_log_loss", "auc"

    def is_wrong(self, labels: Floats) -> NDArray[np.bool_]:
        """See ``Loss``."""
        is_wrong: NDArray[np.bool_] = (labels != 0) & (labels != 1)
        return is_wrong

    def of_samples(self, logits: Any, labels: Any) -> Any:
        """See ``Loss``."""
        from torch.nn.functional import binary_cross_entropy_with_logits  # figures need no PyTorch

        return binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def answers(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """See ``Loss``."""
        return np.asarray(sigmoid(logits), np.float32)

    def logits(self, answers: Floats) -> Floats:
        """See ``Loss``."""
        clipped = np.clip(answers.astype(np.float64), 1 - _NEAR_ONE, _NEAR_ONE)
        return np.log(clipped) - np.log1p(-clipped)

    def mean(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
        """See ``Loss``."""
        return log_loss(labels, logits, weights)

    def figures(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> dict[str, Any]:
        """See ``Loss``."""
        probabilities = np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
        return {
            "auc": area_under_curve(labels, logits, weights),
            "log_loss": log_loss(labels, logits, weights),
            "base_log_loss": base_log_loss(labels, weights),
            "ones": float(labels.mean(dtype=np.float64)),
            "calibration": calibration(labels, probabilities, weights),
        }

    def few(self, name: str, figures: Figures, rows: int) -> str:
        """See ``Loss``."""
        ones = round(figures["ones"] * rows)
        if min(ones, rows - ones) >= _FEW:
            return ""
        return f"note: {ones} evaluation rows have {name} 1 and {rows - ones} have 0: too few for a reliable AUC"

    def is_worthless(self, figures: Figures) -> bool:
        """See ``Loss``. At 10, the model gives what happens a probability of 0.00005."""
        return bool(figures["log_loss"] > 10)

    def chance(self, figures: Figures) -> str:
        """See ``Loss``."""
        auc = figures["auc"]
        return "" if auc is None or abs(auc - 0.5) > _NO_ORDER else f", and an AUC of {auc:.4f} is chance"


@dataclass(frozen=True, slots=True)
class SquaredError(Loss):
    """The squared error of a label that is any number, as a multiple of the variance of the training labels.

    The network learns the label's distance to the mean in standard deviations, because it learns such sizes best.

    Attributes:
        label_mean: of the training labels.
        label_std: of the training labels.
    """

    label_mean: float = 0.0
    label_std: float = 1.0

    option = "mse"
    layer_type = "MeanSquaredErrorLoss"
    kind = "score"
    meaning = "a regression (mean squared error)"
    expected = "a finite number"
    measured = "squared error / variance"
    shown = (("RMSE", "rmse"), ("MAE", "mae"), ("R2", "r2"))
    members = ("mean", "std")
    error, base, quality = "rmse", "base_rmse", "r2"

    def statistics(self, labels: Sequence[Floats], weights: Floats | None) -> dict[str, list[float]]:
        """See ``Loss``. The numbers are those that float32 has. Equal labels have the standard deviation 1."""
        means = [np.average(column.astype(np.float64), weights=weights) for column in labels]
        stds = [math.sqrt(variance(column, weights)) for column in labels]
        as_float32 = [[float(np.float32(number)) for number in numbers] for numbers in (means, stds)]
        return {"mean": as_float32[0], "std": [std or 1.0 for std in as_float32[1]]}

    def is_wrong(self, labels: Floats) -> NDArray[np.bool_]:
        """See ``Loss``."""
        is_wrong: NDArray[np.bool_] = ~np.isfinite(labels)
        return is_wrong

    def unlearnable(self, labels: Floats) -> str:
        """See ``Loss``. Answers are float32, too, so other labels would not help."""
        largest, spread = labels[np.argmax(np.abs(labels))], math.sqrt(variance(labels))
        if are_apart(largest, spread) or (spread == 0 and abs(largest) <= _EXACT_INTEGERS):
            return ""
        step = abs(np.spacing(np.float32(largest)))
        return (
            f"expected labels that float32 can tell apart, found numbers of about {largest:,.10g}, where float32 has a "
            f"number every {step:g}; subtract a constant from the labels, and add it to the answers"
        )

    def of_samples(self, logits: Any, labels: Any) -> Any:
        """See ``Loss``."""
        return (logits - (labels - self.label_mean) / self.label_std).square()

    def answers(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """See ``Loss``."""
        return logits * np.float32(self.label_std) + np.float32(self.label_mean)

    def logits(self, answers: Floats) -> Floats:
        """See ``Loss``."""
        return (answers.astype(np.float64) - self.label_mean) / self.label_std

    def mean(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
        """See ``Loss``."""
        return mean_squared_error(self.logits(labels), logits, weights)

    def figures(self, labels: Floats, logits: Floats, weights: Floats | None = None) -> dict[str, Any]:
        """See ``Loss``."""
        predictions = logits.astype(np.float64) * self.label_std + self.label_mean
        return {
            "rmse": math.sqrt(mean_squared_error(labels, predictions, weights)),
            "base_rmse": math.sqrt(variance(labels, weights)),
            "mae": mean_absolute_error(labels, predictions, weights),
            "r2": r_squared(labels, predictions, weights),
            "calibration": calibration(labels, predictions, weights),
        }

    def few(self, name: str, figures: Figures, rows: int) -> str:
        """See ``Loss``."""
        return "" if rows >= _FEW else f"note: {rows} evaluation rows are too few for a reliable RMSE of {name}"

    def is_worthless(self, figures: Figures) -> bool:
        """See ``Loss``."""
        return bool(figures["rmse"] > 10 * figures["base_rmse"] > 0)


#: All losses, as graphs without statistics have them.
LOSSES: Sequence[Loss] = (LogLoss(), SquaredError())
LOSS_OF_OPTION: Mapping[str, Loss] = {loss.option: loss for loss in LOSSES}
LOSS_OF_LAYER: Mapping[str, Loss] = {loss.layer_type: loss for loss in LOSSES}
LOSS_OF_KIND: Mapping[OutputKind, Loss] = {loss.kind: loss for loss in LOSSES}


def losses_of(graph: Graph) -> tuple[Loss, ...]:
    """Return the loss of each column of a graph's labels."""
    return tuple(SquaredError(head.mean, head.std) if head.kind == "score" else LogLoss() for head in graph.heads)


def are_apart(largest: float, std: float) -> bool:
    """Return whether float32 tells numbers apart: their standard deviation is many steps of float32 at the largest."""
    return std >= _LEAST_STEPS * abs(float(np.spacing(np.float32(largest))))


def figure_text(value: float | None) -> str:
    """Return a figure for people."""
    if value is None:
        return ""
    if value and abs(value) < _SMALL:  # such as an RMSE of small labels
        return f"{value:.3g}"
    return f"{value:,.4f}" if abs(value) < _LARGE else f"{value:,.1f}"
