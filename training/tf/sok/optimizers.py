"""Optimizers that update the rows of ``DynamicVariable``: SOK's Adam, and a wrapper of Keras's optimizers."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from training.arguments import shown
from training.tables.rules import AdamRule, FtrlRule, MomentumSgdRule, NesterovRule, SgdRule, UpdateRule
from training.tf.engine import move_rows
from training.tf.sok.variables import DynamicVariable

Pairs = Iterable[tuple[Any, Any]]


class OptimizerWrapper:
    """An optimizer of Keras that also moves the rows of each ``DynamicVariable``.

    A row moves only if it has a gradient. Its states are next to the row. Everything else moves as the optimizer says.

    Attributes:
        optimizer: of Keras.
    """

    def __init__(self, optimizer: Any) -> None:
        """Take SGD, Adam or Ftrl of Keras.

        Raises:
            TypeError: it is another optimizer.
            ValueError: it has an option that the rows would ignore.
        """
        self.optimizer = optimizer
        self._rule = _rule_of(optimizer)

    def apply_gradients(self, grads_and_vars: Pairs, experimental_aggregate_gradients: bool = True) -> Any:
        """Move variables by their gradients.

        Args:
            grads_and_vars: pairs of a gradient and a variable. Without a gradient, a variable does not move.
            experimental_aggregate_gradients: has no effect, because there is one replica.

        Returns:
            the number of steps before this one.

        Raises:
            TypeError: the gradient of a ``DynamicVariable`` is not one of ``lookup_sparse``.
            ValueError: a ``DynamicVariable`` comes twice.
        """
        pairs = list(grads_and_vars)
        done = _move(pairs, self._rule, self.optimizer.learning_rate)
        others = [(gradient, one) for gradient, one in pairs if not isinstance(one, DynamicVariable)]
        with tf.control_dependencies(done):
            if others:
                return self.optimizer.apply_gradients(others)
            self.optimizer.iterations.assign_add(1)
        return self.optimizer.iterations

    def __getattr__(self, name: str) -> Any:
        """Return what the optimizer has, such as ``learning_rate``."""
        return getattr(self.optimizer, name)


class Adam:
    """Adam that moves only the rows that have a gradient, of every variable of sok and of layers.

    Epsilon is added to the root of the uncorrected second moment, as in HugeCTR and TensorFlow.
    """

    def __init__(
        self, learning_rate: float = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7
    ) -> None:
        """Take the numbers of Adam.

        Raises:
            ValueError: a number is out of range.
        """
        self._rule = AdamRule(beta_1, beta_2, epsilon)
        if not 0 <= learning_rate < float("inf"):
            raise ValueError(f"Adam: expected a learning_rate of at least 0, got {learning_rate}")
        self.learning_rate = learning_rate
        self._states: dict[int, tuple[Any, ...]] = {}

    def apply_gradients(self, grads_and_vars: Pairs, experimental_aggregate_gradients: bool = True) -> None:
        """See ``OptimizerWrapper.apply_gradients``."""
        pairs = list(grads_and_vars)
        _move(pairs, self._rule, self.learning_rate)
        for gradient, variable in pairs:
            if gradient is not None and not isinstance(variable, DynamicVariable):
                if not isinstance(gradient, tf.IndexedSlices):
                    raise TypeError(f"{variable.name}: expected a gradient of a lookup, got {shown(gradient)}")
                self._move_array(gradient, variable)

    def _move_array(self, gradient: tf.IndexedSlices, variable: Any) -> None:
        """Move the rows of an array. The rows of a lookup's gradient are distinct."""
        states = self._states.get(id(variable))
        if states is None:
            with tf.init_scope():
                zeros = [tf.Variable(tf.zeros(variable.shape), trainable=False) for _ in range(2)]
                states = self._states[id(variable)] = (
                    tf.Variable(0, dtype=tf.int64, trainable=False),
                    *zeros,
                    variable,
                )
        step, first, second, _ = states
        rule, rows, floats = self._rule, *_distinct(gradient)
        number = tf.cast(step.assign_add(1), tf.float64)
        rate = self.learning_rate * tf.sqrt(1 - rule.beta2**number) / (1 - rule.beta1**number)
        m = rule.beta1 * tf.gather(first, rows) + (1 - rule.beta1) * floats
        v = rule.beta2 * tf.gather(second, rows) + (1 - rule.beta2) * tf.square(floats)
        first.scatter_update(tf.IndexedSlices(m, rows))
        second.scatter_update(tf.IndexedSlices(v, rows))
        moves = tf.cast(rate, tf.float32) * m / (tf.sqrt(v) + rule.epsilon)
        variable.value.scatter_sub(tf.IndexedSlices(moves, rows))


def _distinct(gradient: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """Return each row once. A variable with several lookups has the gradients of all of them."""
    rows, places = tf.unique(gradient.indices)
    return rows, tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])


def _move(pairs: list[tuple[Any, Any]], rule: UpdateRule, learning_rate: Any) -> list[Any]:
    """Move the rows of each ``DynamicVariable``."""
    dynamic = [(gradient, one) for gradient, one in pairs if isinstance(one, DynamicVariable) and gradient is not None]
    if not dynamic:
        return []
    for gradient, variable in dynamic:
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(f"{variable!r}: expected a gradient of lookup_sparse, got {shown(gradient)}")
        variable.table.use_states(rule.name, rule.initial_states)
    if len({id(variable) for _, variable in dynamic}) < len(dynamic):
        raise ValueError("apply_gradients: expected each variable once, got one of them twice")
    return [move_rows([variable.table for _, variable in dynamic], [one for one, _ in dynamic], rule, learning_rate)]


def _sgd(optimizer: Any) -> UpdateRule:
    if not optimizer.momentum:
        return SgdRule()
    return (NesterovRule if optimizer.nesterov else MomentumSgdRule)(optimizer.momentum)


def _adam(optimizer: Any) -> UpdateRule:
    _require(optimizer, amsgrad=False)
    return AdamRule(optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)


def _ftrl(optimizer: Any) -> UpdateRule:
    _require(optimizer, learning_rate_power=-0.5, l2_shrinkage_regularization_strength=0.0, beta=0.0)
    return FtrlRule(
        optimizer.l1_regularization_strength,
        2 * optimizer.l2_regularization_strength,
        optimizer.initial_accumulator_value,
    )


_RULES: dict[type, Callable[[Any], UpdateRule]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.Ftrl: _ftrl,
}


def _rule_of(optimizer: Any) -> UpdateRule:
    make = _RULES.get(type(optimizer))
    if make is None:
        raise TypeError(f"OptimizerWrapper: expected SGD, Adam or Ftrl of Keras, got {type(optimizer).__name__}")
    nothing = dict.fromkeys(("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"))
    _require(optimizer, use_ema=False, gradient_accumulation_steps=None, **nothing)
    return make(optimizer)


def _require(optimizer: Any, **values: Any) -> None:
    """Refuse options that have no effect on the rows of a table."""
    for name, value in values.items():
        if getattr(optimizer, name) != value:
            came = f"{name}={getattr(optimizer, name)!r}"
            raise ValueError(f"OptimizerWrapper: expected {type(optimizer).__name__} with {name}={value!r}, got {came}")
