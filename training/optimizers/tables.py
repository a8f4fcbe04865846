"""One step of an optimizer on the rows of tables."""

from collections.abc import Iterable

import torch

from kernels.host import look_up_bags, sum_row_gradients, update_tables
from training.embedding.gradients import RowGradient
from training.embedding.parameter import TableParameter
from training.tables.rules import UpdateRule, UpdateType


def step_tables(
    parameters: Iterable[TableParameter],
    rule: UpdateRule,
    update_type: UpdateType,
    learning_rate: float,
    step: int,
    scaler: float = 1.0,
    weight_decay: float = 0.0,
) -> None:
    """Update the rows of tables with the gradients that their parameters hold. They must have the rule's states.

    Args:
        parameters: those with a gradient change; the others stay. Their gradients stay too.
        rule: the formula.
        update_type: what happens to rows without a gradient.
        learning_rate: of this step.
        step: counted from 1.
        scaler: gradients are divided by it.
        weight_decay: this multiple of a row is added to the row's gradient.

    Raises:
        ValueError: a table with weight decay has ``max_norm``, which scales rows when they are read. Nothing changed.
    """
    parameters = list(parameters)
    for table in (parameter.table for parameter in parameters if weight_decay):
        if table.config.max_norm is not None:
            raise ValueError(f"table {table.name!r}: expected no weight_decay, because the table has max_norm")
    of_rows: list[RowGradient] = []
    for parameter in parameters:
        if parameter.sink:
            of_rows += _with_decay(parameter, weight_decay * scaler) if weight_decay else parameter.sink.gradients()
            torch.autograd.graph.increment_version(parameter)  # a backward pass that needs the old rows raises an error
    if of_rows:
        lookups, floats = zip(*of_rows, strict=True)
        update_tables(lookups, floats, rule.name, update_type, learning_rate, step, rule.parameters, scaler)


def _with_decay(parameter: TableParameter, weight_decay: float) -> list[RowGradient]:
    """Return the gradients of a table, plus a multiple of the rows that have a gradient."""
    parameter.sink.rows()  # one sum of all gradients
    [(lookup, floats)] = parameter.sink.gradients()
    [(keys, sums)] = sum_row_gradients([lookup], [floats])
    [(of_rows, vectors)] = look_up_bags([parameter.table.native], [keys], [None], ["sum"], [None], [1], [False])
    return [(of_rows, sums + weight_decay * vectors)]
