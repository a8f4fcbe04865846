import math

import numpy as np
import pytest
import torch

from training.optimizer import Adam, LearningRateSchedule


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.003), (4000, 12), (8000, 24), (48001, 23.99800004), (60000, 6), (72000, 0), (72001, 0)]
)
def test_the_schedule_of_hugectrs_dlrm_sample_has_its_golden_values(step, rate):
    schedule = LearningRateSchedule(24, warmup_steps=8000, decay_start=48000, decay_steps=24000)

    assert schedule.at(step) == pytest.approx(rate, rel=1e-9)


def test_warm_up_plateau_decay_and_end_follow_each_other():
    schedule = LearningRateSchedule(1.0, warmup_steps=4, decay_start=6, decay_steps=4, decay_power=2, end=0.05)

    rates = [schedule.at(step) for step in range(1, 12)]

    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.5625, 0.25, 0.0625, 0.05, 0.05])


def test_without_a_decay_start_the_rate_never_decays():
    assert LearningRateSchedule(0.1, decay_steps=5).at(10**6) == 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base", -1.0),
        ("base", math.nan),
        ("warmup_steps", 0),
        ("decay_start", -1),
        ("decay_steps", 0),
        ("decay_power", 0.5),
        ("end", -0.1),
    ],
)
def test_an_impossible_schedule_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number of at least"):
        LearningRateSchedule(**{"base": 0.1, name: value})


@pytest.mark.parametrize(("name", "value"), [("beta1", 1.0), ("beta2", -0.1), ("epsilon", 0.0), ("epsilon", math.nan)])
def test_an_impossible_adam_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        Adam(**{name: value})


def test_adam_adds_epsilon_to_the_root_of_the_uncorrected_second_moment():
    adam = Adam(beta1=0.9, beta2=0.99, epsilon=0.25)
    rng = np.random.default_rng(0)
    weights, first, second = torch.ones(5), torch.zeros(5), torch.zeros(5)
    w, m, v = np.ones(5), np.zeros(5), np.zeros(5)

    for step in range(1, 8):
        gradient = rng.normal(size=5)
        adam.update(weights, first, second, torch.tensor(gradient, dtype=torch.float32), adam.step_size(0.1, step))
        m = 0.9 * m + 0.1 * gradient
        v = 0.99 * v + 0.01 * gradient**2
        w = w - 0.1 * math.sqrt(1 - 0.99**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 0.25)

    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-5)  # float32 against float64


def test_adam_with_a_vanishing_epsilon_is_torchs_adam():
    adam = Adam(epsilon=1e-30)
    weights, first, second = torch.ones(5), torch.zeros(5), torch.zeros(5)
    theirs = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([theirs], lr=0.01, eps=0.0)

    for step in range(1, 20):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(step))
        adam.update(weights, first, second, gradient, adam.step_size(0.01, step))
        theirs.grad = gradient
        optimizer.step()

    torch.testing.assert_close(weights, theirs.detach())
