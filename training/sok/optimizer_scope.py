"""Check that an optimizer may step a variable."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from training.errors import SessionError
from training.sok.dynamic_variable import DynamicVariable
from training.sok.embedding_variable import EmbeddingVariable
from training.sok.variable import Variable


class OptimizerScope:
    """Inside it, an optimizer may step the variables of legacy layers.

    An optimizer of PyTorch only moves the rows of its own process, and sends no gradients: a backward pass has added up
    those of all processes already. Outside of a scope, its ``step`` raises ``SessionError``. Inside a scope too,
    ``DynamicVariable`` needs an optimizer of ``training.optimizers``.
    """

    def __init__(self, trainable_variables: Iterable[Any]) -> None:
        """Take the variables. Those that need no scope have no effect.

        Raises:
            TypeError: one variable came instead of a list.
        """
        variables = _listed("OptimizerScope", trainable_variables)
        self._variables = [one for one in variables if isinstance(one, EmbeddingVariable)]

    def __enter__(self) -> "OptimizerScope":
        """Open the scope."""
        for variable in self._variables:
            variable.scopes += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the scope."""
        for variable in self._variables:
            variable.scopes -= 1


def split_embedding_variable_from_others(
    trainable_variables: Iterable[Any],
) -> tuple[list[Variable | DynamicVariable], list[torch.Tensor]]:
    """Return the variables of this package, and the other parameters, both in order.

    Raises:
        TypeError: one variable came instead of a list.
    """
    variables = _listed("split_embedding_variable_from_others", trainable_variables)
    is_embedding = [isinstance(one, Variable | DynamicVariable) for one in variables]
    embeddings = [one for one, is_one in zip(variables, is_embedding, strict=True) if is_one]
    return embeddings, [one for one, is_one in zip(variables, is_embedding, strict=True) if not is_one]


def _listed(call: str, variables: Iterable[Any]) -> list[Any]:
    if isinstance(variables, torch.Tensor):  # its items are rows
        raise TypeError(f"{call}: expected a list of variables, got {type(variables).__name__}")
    return list(variables)


def _check_step(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    """Refuse a step that would be wrong."""
    for variable in (one for group in optimizer.param_groups for one in group["params"]):
        if isinstance(variable, EmbeddingVariable) and not variable.scopes:
            advice = "step it inside sok.OptimizerScope, or use sok.optimizers.Adam"
            raise SessionError(f"{type(optimizer).__name__}: the variable of a layer has no open scope; {advice}")


register_optimizer_step_pre_hook(_check_step)
