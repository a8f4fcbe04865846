"""Separate the variables of sok from other variables."""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from training.tf.sok.variables import DynamicVariable, LayerVariable, Variable


@contextmanager
def OptimizerScope(trainable_variables: Iterable[Any]) -> Any:  # noqa: N802
    """Do nothing: every optimizer of Keras may move the variables of layers."""
    _listed("OptimizerScope", trainable_variables)
    yield


def split_embedding_variable_from_others(trainable_variables: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the variables of this package, and the other variables, both in order.

    Raises:
        TypeError: one variable came instead of a list.
    """
    variables = _listed("split_embedding_variable_from_others", trainable_variables)
    is_embedding = [isinstance(variable, Variable | DynamicVariable | LayerVariable) for variable in variables]
    embeddings = [one for one, is_one in zip(variables, is_embedding, strict=True) if is_one]
    return embeddings, [one for one, is_one in zip(variables, is_embedding, strict=True) if not is_one]


def _listed(call: str, variables: Iterable[Any]) -> list[Any]:
    if isinstance(variables, tf.Variable | keras.Variable | tf.Tensor):  # its items are rows
        raise TypeError(f"{call}: expected a list of variables, got {type(variables).__name__}")
    return list(variables)
