"""One step of an optimizer on the rows of tables."""

from collections import defaultdict
from collections.abc import Iterable

from kernels.host import BagLookup, update_tables
from training.embedding.gradients import TableParameter
from training.embedding.lookups import Floats
from training.optimizers.rules import UpdateRule, UpdateType


def step_tables(
    parameters: Iterable[TableParameter],
    rule: UpdateRule,
    update_type: UpdateType,
    learning_rate: float,
    step: int,
    scaler: float = 1.0,
) -> None:
    """Update the rows of tables with the gradients that their parameters hold. They must have the rule's states.

    Args:
        parameters: those with a gradient change; the others stay.
        rule: the formula.
        update_type: what happens to rows without a gradient.
        learning_rate: of this step.
        step: counted from 1.
        scaler: gradients are divided by it.
    """
    by_scale: dict[float, list[tuple[BagLookup, Floats]]] = defaultdict(list)
    for parameter in parameters:
        gradients, scale = parameter.take()
        by_scale[scale] += gradients
    for scale, taken in by_scale.items():
        if taken and scale:
            lookups, floats = zip(*taken, strict=True)
            update_tables(lookups, floats, rule.name, update_type, learning_rate, step, rule.parameters, scaler / scale)
