"""Runs hypothesis state machines of caches on a device."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test


def run_on(machine, examples, steps=25, **attributes):
    """Run examples of a state machine whose class gets these attributes, such as ``device``."""
    run_state_machine_as_test(
        type(f"{machine.__name__}On", (machine,), attributes),
        settings=settings(
            deadline=None,
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[HealthCheck.too_slow],
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
        ),
    )
