"""One step of an optimizer on the rows of tables."""

from collections.abc import Iterable

import torch

from kernels.host import update_tables
from training.embedding.gradients import RowGradient
from training.embedding.parameter import TableParameter
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
        parameters: those with a gradient change; the others stay. Their gradients are taken away.
        rule: the formula.
        update_type: what happens to rows without a gradient.
        learning_rate: of this step.
        step: counted from 1.
        scaler: gradients are divided by it.
    """
    taken: list[RowGradient] = []
    for parameter in parameters:
        if parameter.sink:
            taken += parameter.sink.take()
            torch.autograd.graph.increment_version(parameter)  # a backward pass that needs the old rows raises an error
    if taken:
        lookups, floats = zip(*taken, strict=True)
        update_tables(lookups, floats, rule.name, update_type, learning_rate, step, rule.parameters, scaler)
