"""Say which optimizers may step a variable."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from training.sok.dynamic_variable import DynamicVariable
from training.sok.embedding_variable import EmbeddingVariable
from training.sok.variable import Variable


class OptimizerScope:
    """Inside it, an optimizer may step the variables of legacy layers.

    An optimizer of PyTorch only moves the rows of its own process, and sends no gradients: a backward pass has added up
    those of all processes already. Outside of a scope, a ``step`` that would move a variable raises ``SessionError``.
    Inside a scope too, ``DynamicVariable`` needs an optimizer of ``training.optimizers``.
    """

    def __init__(self, trainable_variables: Iterable[Any]) -> None:
        """Take the variables. Those that need no scope have no effect.

        Raises:
            TypeError: one variable came instead of a list.
        """
        variables = _listed("OptimizerScope", trainable_variables)
        self._variables = [variable for variable in variables if isinstance(variable, EmbeddingVariable)]

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
    is_embedding = [isinstance(variable, Variable | DynamicVariable) for variable in variables]
    embeddings = [one for one, is_one in zip(variables, is_embedding, strict=True) if is_one]
    return embeddings, [one for one, is_one in zip(variables, is_embedding, strict=True) if not is_one]


def _listed(call: str, variables: Iterable[Any]) -> list[Any]:
    if isinstance(variables, torch.Tensor):  # its items are rows
        raise TypeError(f"{call}: expected a list of variables, got {type(variables).__name__}")
    return list(variables)
