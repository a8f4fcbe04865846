import math

import pytest

from training.optimizers.learning_rate import LearningRateSchedule


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
