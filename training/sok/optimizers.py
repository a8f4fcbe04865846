"""``sok.optimizers``: SOK's own Adam."""

from collections.abc import Iterable

import torch

from training import optimizers
from training.sok.optimizer_scope import OptimizerScope
from training.sok.variable import Variable


class Adam:
    """Adam for ``sok.Variable`` and the variables of layers. It needs no scope. Rows without a gradient do not move.

    Epsilon is added to the root of the uncorrected second moment, as in HugeCTR and TensorFlow.
    """

    def __init__(
        self, learning_rate: float = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7
    ) -> None:
        """Take the numbers of Adam.

        Raises:
            ValueError: a number is out of range.
        """
        # an optimizer of PyTorch must have a parameter from the start; this one never gets a gradient
        self._optimizer = optimizers.Adam([torch.zeros(0)], learning_rate, beta_1, beta_2, epsilon)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[torch.Tensor | None, Variable]],
        experimental_aggregate_gradients: bool = True,
    ) -> None:
        """Move variables by their gradients.

        Args:
            grads_and_vars: pairs of a gradient and a variable. Without a gradient, a variable does not move.
            experimental_aggregate_gradients: has no effect. A backward pass has added up the gradients of all processes
                already.

        Raises:
            TypeError: a variable is of another type.
            ValueError: a variable comes twice.
        """
        pairs = list(grads_and_vars)
        for _, variable in pairs:
            if not isinstance(variable, Variable):
                expected = "sok.Variable or the variable of a layer"
                raise TypeError(f"apply_gradients: expected {expected}, got {type(variable).__name__}")
        gradients = {id(variable): gradient for gradient, variable in pairs}
        if len(gradients) < len(pairs):
            raise ValueError("apply_gradients: expected each variable once, got one of them twice")
        known = self._parameters()
        for _, variable in pairs:
            if not any(variable is parameter for parameter in known):
                self._optimizer.add_param_group({"params": [variable]})
        known = self._parameters()
        kept = [parameter.grad for parameter in known]
        try:
            for one in known:
                one.grad = gradients.get(id(one))
            with OptimizerScope(known):
                self._optimizer.step()
        finally:
            for one, gradient in zip(known, kept, strict=True):
                one.grad = gradient

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
