"""The quality of predictions: AUC and log loss."""

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
