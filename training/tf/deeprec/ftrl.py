"""TensorFlow's FTRL optimizer, also for the tables of columns."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from training.tables.rules import FtrlRule
from training.tf.engine import move_rows


class FtrlOptimizer(tf.compat.v1.train.FtrlOptimizer):  # type: ignore[misc]
    """``tf.train.FtrlOptimizer``. It moves the rows of columns too, and only those that have a gradient."""

    def __init__(
        self,
        learning_rate: float,
        *,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        name: str = "Ftrl",
    ) -> None:
        """Take the numbers of FTRL.

        Args:
            learning_rate: at least 0.
            initial_accumulator_value: above 0.
            l1_regularization_strength: at least 0.
            l2_regularization_strength: at least 0.
            name: of the operations.

        Raises:
            ValueError: a number is out of range.
        """
        self._rule = FtrlRule(l1_regularization_strength, 2 * l2_regularization_strength, initial_accumulator_value)
        self._rate = learning_rate
        super().__init__(
            learning_rate,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            name=name,
        )

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Move variables and rows by their gradients; see ``tf.compat.v1.train.Optimizer.apply_gradients``."""
        pairs = list(grads_and_vars)
        others = [(gradient, one) for gradient, one in pairs if not hasattr(one, "hotrow_table")]
        of_tables = [pair for pair in pairs if hasattr(pair[1], "hotrow_table") and pair[0] is not None]
        done = []
        if of_tables:
            tables = [variable.hotrow_table for _, variable in of_tables]
            for table in tables:
                table.use_states(self._rule.name, self._rule.initial_states)
            done.append(move_rows(tables, [gradient for gradient, _ in of_tables], self._rule, self._rate))
        if any(gradient is not None for gradient, _ in others):
            with tf.control_dependencies(done):
                return super().apply_gradients(others, global_step, name)
        if global_step is not None:
            done.append(global_step.assign_add(1))
        return tf.group(*done)
