"""How many users send requests, from the start of a run to its end, and of which kind."""

from collections.abc import Callable
from typing import NamedTuple


class Scenario(NamedTuple):
    """A number of users over time.

    Attributes:
        users: takes the elapsed share of the run, 0 to 1, and the highest number of users; returns the number of users.
        run_time_s: how long a run takes by default.
        samples: the samples of a request by default.
        has_candidates: whether the samples of a request are the candidates of one user.
    """

    users: Callable[[float, int], int]
    run_time_s: int
    samples: int = 64
    has_candidates: bool = False


def steady(elapsed: float, peak: int) -> int:
    """All users from the start."""
    return peak


def ramp(elapsed: float, peak: int) -> int:
    """From one user to all users in the first four fifths of the run; all users in the last fifth."""
    return max(1, round(peak * min(1.0, elapsed / 0.8)))


def spike(elapsed: float, peak: int) -> int:
    """A tenth of the users, and all users in the middle fifth of the run."""
    return peak if 0.4 <= elapsed < 0.6 else max(1, peak // 10)


SCENARIOS = {
    "steady": Scenario(steady, 60),
    "ramp": Scenario(ramp, 120),
    "spike": Scenario(spike, 120),
    "soak": Scenario(steady, 3600),  # long enough to show memory that grows
    "candidates": Scenario(steady, 60, samples=500, has_candidates=True),
}
