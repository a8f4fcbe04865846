"""The optimizers of embeddings. Embedding servers apply them to the rows of a batch, with PyTorch's formulas."""

from dataclasses import dataclass
from typing import Any

from training.arguments import number, pair
from training.tables.rules import AdaGradRule, AdamRule, MomentumSgdRule, RowWiseAdaGradRule, SgdRule, UpdateRule


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A rule, and how it is used.

    Attributes:
        rule: the formula.
        lr: the learning rate.
        weight_decay: this multiple of a row is added to the row's gradient.
    """

    rule: UpdateRule
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        """Make the numbers floats; see ``number``."""
        for name in ("lr", "weight_decay"):
            object.__setattr__(self, name, number(type(self).__name__, name, getattr(self, name), 0))

    def facts(self) -> dict[str, Any]:
        """Return what an embedding server needs."""
        return {
            "rule": self.rule.name,
            "initial_states": list(self.rule.initial_states),
            "parameters": list(self.rule.parameters),
            "learning_rate": self.lr,
            "weight_decay": self.weight_decay,
        }


class SGD(Optimizer):
    """``torch.optim.SGD``, for rows."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        """Choose the numbers.

        Args:
            lr: the learning rate.
            momentum: below 1. A row without a gradient does not move.
            weight_decay: the factor of the L2 penalty.

        Raises:
            TypeError: an argument is no number.
            ValueError: a number is out of range.
        """
        momentum = number("SGD", "momentum", momentum)
        super().__init__(MomentumSgdRule(momentum) if momentum else SgdRule(), lr, weight_decay)


class Adam(Optimizer):
    """``torch.optim.Adam``, for rows. The steps of a server count, whether a row moves or not."""

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        """Choose the numbers.

        Args:
            lr: the learning rate.
            betas: how much of the moments stays in a step.
            weight_decay: the factor of the L2 penalty.
            eps: is added to the root of the second moment.

        Raises:
            TypeError: an argument is no number.
            ValueError: a number is out of range.
        """
        super().__init__(AdamRule(*pair("Adam", "betas", betas), number("Adam", "eps", eps)), lr, weight_decay)


class Adagrad(Optimizer):
    """``torch.optim.Adagrad``, for rows."""

    def __init__(
        self,
        lr: float = 1e-2,
        initial_accumulator_value: float = 1e-2,
        weight_decay: float = 0.0,
        g_square_momentum: float = 1.0,
        eps: float = 1e-10,
        vectorwise_shared: bool = False,
    ) -> None:
        """Choose the numbers.

        Args:
            lr: the learning rate.
            initial_accumulator_value: the first sum of squares.
            weight_decay: the factor of the L2 penalty.
            g_square_momentum: must be 1: sums do not decay.
            eps: is added to the root of the sum.
            vectorwise_shared: a row has one sum, of the means of its squared gradients. Otherwise each float has a sum.

        Raises:
            TypeError: an argument is no number.
            ValueError: a number is out of range.
        """
        if g_square_momentum != 1:
            raise ValueError(f"Adagrad: expected g_square_momentum = 1, got {g_square_momentum}")
        first_sum = number("Adagrad", "initial_accumulator_value", initial_accumulator_value)
        rule = RowWiseAdaGradRule if vectorwise_shared else AdaGradRule
        super().__init__(rule(first_sum, number("Adagrad", "eps", eps)), lr, weight_decay)
