"""The quality of predictions: AUC, log loss, errors of numbers, and calibration."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def area_under_curve(labels: Floats, scores: Floats, weights: Floats | None = None) -> float:
    """Compute the exact area under the ROC curve in O(B log B).

    It is the share of (positive, negative) pairs that the scores order correctly. A tie counts one half.

    Args:
        labels: [B], each 0 or 1.
        scores: [B], any increasing function of the predicted probability.
        weights: [B], how much each sample counts; None: all count the same. A pair counts the product.

    Returns:
        The area, or NaN if all labels are equal.
    """
    values, inverse = np.unique(scores, return_inverse=True)
    counts = np.bincount(inverse, weights=weights, minlength=values.size)
    positives = np.bincount(inverse, weights=labels if weights is None else labels * weights, minlength=values.size)
    negatives = counts - positives
    if positives.sum() == 0 or negatives.sum() == 0:
        return math.nan
    negatives_below = np.cumsum(negatives) - negatives
    ordered = (positives * (negatives_below + negatives / 2)).sum()
    return float(ordered / (positives.sum() * negatives.sum()))


def log_loss(labels: Floats, logits: Floats, weights: Floats | None = None) -> float:
    """Compute the mean binary cross-entropy of logits [B] and labels [B] with weights [B], without overflow."""
    z = logits.astype(np.float64)
    return float(np.average(np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z))), weights=weights))


def base_log_loss(labels: Floats, weights: Floats | None = None) -> float:
    """Compute the log loss of an answer that is always the mean of labels [B]: their entropy."""
    ones = float(np.average(labels.astype(np.float64), weights=weights))
    return sum(-share * math.log(share) for share in (ones, 1 - ones) if 0 < share < 1)


def mean_squared_error(labels: Floats, predictions: Floats, weights: Floats | None = None) -> float:
    """Compute the mean of the squared differences of labels [B] and predictions [B] with weights [B]."""
    return float(np.average(np.square(_differences(labels, predictions)), weights=weights))


def mean_absolute_error(labels: Floats, predictions: Floats, weights: Floats | None = None) -> float:
    """Compute the mean size of the differences of labels [B] and predictions [B] with weights [B]."""
    return float(np.average(np.abs(_differences(labels, predictions)), weights=weights))


def variance(labels: Floats, weights: Floats | None = None) -> float:
    """Compute the mean squared error of an answer that is always the mean of labels [B]; 0 if all labels are equal."""
    values = labels.astype(np.float64) - labels[0]  # else the mean of equal labels may be rounded to another number
    return float(np.average(np.square(values - np.average(values, weights=weights)), weights=weights))


def r_squared(labels: Floats, predictions: Floats, weights: Floats | None = None) -> float:
    """Compute which share of the variance of labels [B] predictions [B] explain; NaN if all labels are equal."""
    of_constant = variance(labels, weights)
    return 1 - mean_squared_error(labels, predictions, weights) / of_constant if of_constant else math.nan


def _differences(labels: Floats, predictions: Floats) -> Floats:
    return labels.astype(np.float64) - predictions


def calibration(
    labels: Floats, predictions: Floats, weights: Floats | None = None, groups: int = 10
) -> tuple[tuple[float, float], ...]:
    """Compare predictions with what happened, in groups of samples of about the same size.

    Args:
        labels: [B], what happened.
        predictions: [B], at least one.
        weights: [B], how much each sample counts in the means of its group; None: all count the same.
        groups: the number of groups, in the order of the predictions.

    Returns:
        for each group the mean prediction and the mean label. In a good model, they are equal.
    """
    order = np.argsort(predictions, kind="stable")
    parts = [part for part in np.array_split(order, groups) if part.size]
    return tuple(
        (float(np.average(predictions[part], weights=of)), float(np.average(labels[part], weights=of)))
        for part in parts
        if (of := None if weights is None else weights[part]) is None or of.sum() > 0
    )
