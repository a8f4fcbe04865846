"""Make the optimizer and the first rows for ``create_embedding``."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from training.arguments import as_array, items, one_of, shown
from training.calls.plugin.embedding import Optimizer
from training.row_file import TableRows
from training.tables.rules import (
    AdamRule,
    MomentumSgdRule,
    NesterovRule,
    RowWiseAdaGradRule,
    SgdRule,
    UpdateRule,
    UpdateType,
)
from training.tables.table import EmbeddingTable

OptimizerType = Literal["Adam", "MomentumSGD", "Nesterov", "SGD", "RowWiseAdaGrad"]
_SCALERS = (1.0, 128.0, 256.0, 512.0, 1024.0)
_RULES: dict[str, tuple[type[UpdateRule], tuple[str, ...]]] = {
    "Adam": (AdamRule, ("learning_rate", "beta1", "beta2", "epsilon")),
    "MomentumSGD": (MomentumSgdRule, ("learning_rate", "momentum_factor")),
    "Nesterov": (NesterovRule, ("learning_rate", "momentum_factor")),
    "SGD": (SgdRule, ("learning_rate",)),
    "RowWiseAdaGrad": (RowWiseAdaGradRule, ("learning_rate", "initial_accumulator", "epsilon")),
}


def optimizer_of(
    place: str, name: str, parameters: Sequence[float], update_type: UpdateType, scaler: float
) -> Optimizer:
    """Return the optimizer of this name. ``parameters`` are ``opt_hparams``.

    Raises:
        TypeError: ``parameters`` are not a list of numbers.
        ValueError: an argument is out of range.
    """
    one_of(place, "optimizer_type", name, _RULES)
    one_of(place, "update_type", update_type, get_args(UpdateType))
    one_of(place, "scaler", scaler, _SCALERS)
    rule_type, names = _RULES[name]
    parameters = items(place, "opt_hparams", parameters)
    expected = f"opt_hparams of {name} as [{', '.join(names)}]"
    if len(parameters) != len(names):
        raise ValueError(f"{place}: expected {expected}, got {parameters}")
    try:
        learning_rate, *rest = map(float, parameters)
    except (TypeError, ValueError):
        raise TypeError(f"{place}: expected {expected}, all numbers, got {parameters}") from None
    if not 0 <= learning_rate < float("inf"):
        raise ValueError(f"{place}: expected a learning rate of at least 0, got {learning_rate}")
    return Optimizer(rule_type(*rest), learning_rate, update_type, float(scaler))


def first_rows(place: str, init_value: Any, table: EmbeddingTable, slots: int, vocabulary: int) -> TableRows:
    """Return the rows of ``init_value`` with their first states.

    Raises:
        TypeError: it is not a float32 matrix.
        ValueError: it has another shape.
    """
    dim = table.config.dim
    array = as_array(init_value)
    if array is None or array.dtype != np.float32:
        raise TypeError(f"{place}: expected init_value as a bool or a float32 matrix, got {shown(init_value)}")
    if array.ndim != 2 or array.shape[1] != dim or len(array) > vocabulary:
        expected = f"init_value [V, {dim}] with V of at most {vocabulary:,}, the vocabulary of all GPUs"
        raise ValueError(f"{place}: expected {expected}, got {list(array.shape)}")
    keys = np.arange(len(array))
    return table.new_rows(keys, array, (keys % slots).astype(np.uint64))
