import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.model.metrics import area_under_curve, base_log_loss, calibration, log_loss


def auc_over_all_pairs(labels, scores):
    pairs = [
        (positive > negative) + (positive == negative) / 2
        for positive, is_click in zip(scores, labels, strict=True)
        if is_click
        for negative, is_other_click in zip(scores, labels, strict=True)
        if not is_other_click
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


@settings(deadline=None)
@given(samples=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 6)), min_size=1, max_size=40))
def test_auc_equals_the_count_over_all_pairs_with_ties_as_one_half(samples):
    labels, scores = np.array(samples, dtype=np.float64).T

    assert area_under_curve(labels, scores) == pytest.approx(auc_over_all_pairs(labels, scores), nan_ok=True)


def test_auc_of_equal_labels_is_nan():
    assert math.isnan(area_under_curve(np.ones(3), np.arange(3.0)))
    assert math.isnan(area_under_curve(np.zeros(3), np.arange(3.0)))


def test_auc_of_a_million_scores_does_not_overflow():
    labels = np.tile(np.array([0, 1], dtype=np.float32), 500_000)

    assert area_under_curve(labels, labels) == 1.0
    assert area_under_curve(labels, np.zeros_like(labels)) == 0.5


def test_log_loss_equals_torch_and_survives_large_logits():
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(size=98), [300.0, -300.0]])
    labels = (rng.random(100) < 0.5).astype(np.float64)

    expected = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(labels))
    assert log_loss(labels, logits) == pytest.approx(float(expected), rel=1e-9)


@settings(deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.integers(-6, 6), st.integers(0, 3)), min_size=1, max_size=40
    ).filter(lambda samples: any(weight for _, _, weight in samples))
)
def test_a_weight_counts_as_repeats_of_the_sample(samples):
    labels, logits, weights = np.array(samples, dtype=np.float64).T
    repeated = np.repeat(labels, weights.astype(int)), np.repeat(logits, weights.astype(int))

    for measure in (area_under_curve, log_loss):
        assert measure(labels, logits, weights) == pytest.approx(measure(*repeated), nan_ok=True)
    assert base_log_loss(labels, weights) == pytest.approx(base_log_loss(repeated[0]))
    [group] = calibration(labels, logits, weights, groups=1)
    assert group == pytest.approx(calibration(*repeated, groups=1)[0])


def test_the_base_log_loss_is_that_of_a_constant_answer():
    labels = np.array([0.0, 1, 1, 1])
    constant = np.full(4, math.log(0.75 / 0.25))
    assert base_log_loss(labels) == pytest.approx(log_loss(labels, constant))
    assert base_log_loss(np.ones(4)) == 0
