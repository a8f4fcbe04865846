"""The learning rate of a step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """HugeCTR's schedule (v3.0 get_learning_rate_scheduler): linear warm-up, constant, polynomial decay.

    Attributes:
        base: the learning rate after warm-up.
        warmup_steps: the steps in which the rate rises from 0 to ``base``, at least 1.
        decay_start: the last step before the decay. 0 means no decay.
        decay_steps: the steps in which the rate falls to ``end``, at least 1.
        decay_power: the exponent of the decay, at least 1.
        end: the learning rate after the decay.
    """

    base: float
    warmup_steps: int = 1
    decay_start: int = 0
    decay_steps: int = 1
    decay_power: float = 2.0
    end: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not a schedule."""
        least = {"base": 0, "warmup_steps": 1, "decay_start": 0, "decay_steps": 1, "decay_power": 1, "end": 0}
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least {lowest}, got {getattr(self, name)}")

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup_steps:
            return self.base * step / self.warmup_steps
        if self.decay_start == 0 or step <= self.decay_start:
            return self.base
        left = self.decay_start + self.decay_steps - step
        if left < 0:
            return self.end
        return max(self.end, self.base * float((left / self.decay_steps) ** self.decay_power))
