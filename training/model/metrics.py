"""The quality of predictions: AUC, log loss and calibration."""

import math

import numpy as np
from numpy.typing import NDArray


def area_under_curve(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """Compute the exact area under the ROC curve in O(B log B).

    It is the share of (positive, negative) pairs that the scores order correctly. A tie counts one half.

    Args:
        labels: [B], each 0 or 1.
        scores: [B], any increasing function of the predicted probability.

    Returns:
        The area, or NaN if all labels are equal.
    """
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    positives = np.bincount(inverse, weights=labels, minlength=values.size)
    negatives = counts - positives
    if positives.sum() == 0 or negatives.sum() == 0:
        return math.nan
    negatives_below = np.cumsum(negatives) - negatives
    ordered = (positives * (negatives_below + negatives / 2)).sum()
    return float(ordered / (positives.sum() * negatives.sum()))


def log_loss(labels: NDArray[np.floating], logits: NDArray[np.floating]) -> float:
    """Compute the mean binary cross-entropy of logits [B] and labels [B], without overflow."""
    z = logits.astype(np.float64)
    return float(np.mean(np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z)))))


def calibration(
    labels: NDArray[np.floating], logits: NDArray[np.floating], groups: int = 10
) -> tuple[tuple[float, float], ...]:
    """Compare predictions with what happened, in groups of samples of about the same size.

    Args:
        labels: [B], each 0 or 1.
        logits: [B], at least one.
        groups: the number of groups, in the order of the predictions.

    Returns:
        for each group the mean predicted probability and the share of ones. A good model's are equal.
    """
    order = np.argsort(logits, kind="stable")
    parts = [part for part in np.array_split(order, groups) if part.size]
    probabilities = np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
    return tuple((float(probabilities[part].mean()), float(labels[part].mean())) for part in parts)
