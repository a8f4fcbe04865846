"""How a gradient moves weights: the formulas of HugeCTR's optimizers, on float tensors of PyTorch.

``w`` are weights, ``g`` their gradient, ``lr`` the learning rate and ``t`` the step, counted from 1. The rows of tables
move in ``kernels.host``. So only the methods of tensors are called here, and PyTorch is not imported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch

UpdateType = Literal["Local", "Global", "LazyGlobal"]


@dataclass(frozen=True, slots=True)
class Move:
    """What a rule changes in one step.

    Attributes:
        weights: of any shape; changed in place.
        states: one tensor per state of the rule, see ``UpdateRule.new_states``; changed in place.
        gradient: in the shape of ``weights``.
        learning_rate: of this step.
        step: counted from 1 over the whole training.
    """

    weights: torch.Tensor
    states: Sequence[torch.Tensor]
    gradient: torch.Tensor
    learning_rate: float
    step: int

    def per_row(self, steps: torch.Tensor) -> torch.Tensor:
        """Return int64[U], numbers of steps, in a shape that multiplies weights [U, ...]."""
        return steps.to(self.weights.dtype).reshape(-1, *[1] * (self.weights.dim() - 1))


@dataclass(frozen=True, slots=True)
class UpdateRule(ABC):
    """One formula and its parameters. The weights' owner keeps the states.

    Attributes:
        name: of the rule in ``kernels.host.update_tables``.
        moves_always: whether weights move in a step in which their gradient is zero.
    """

    name: ClassVar[str]
    moves_always: ClassVar[bool] = False

    @property
    @abstractmethod
    def initial_states(self) -> tuple[float, ...]:
        """The value of each state before the first step."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[float, float, float]:
        """The rule's parameters in ``kernels.host.update_tables``; the rest are 0."""

    @abstractmethod
    def update(self, move: Move) -> None:
        """Update weights and states."""

    def new_states(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """Return the states of these weights before the first step, each in the shape of the weights."""
        return [weights.new_full(weights.shape, value) for value in self.initial_states]

    @property
    def of_dense_weights(self) -> UpdateRule:
        """The rule of the dense weights of a model whose tables have this rule."""
        return self

    def update_lazily(self, move: Move, last_steps: torch.Tensor) -> None:
        """Update rows, and make up for the steps that they have skipped.

        Args:
            move: its tensors are [U, ...].
            last_steps: int64[U], the step of each row's last update; 0 before the first.
        """
        self.update(move)

    def _require(self, name: str, least: float, below: float = math.inf) -> None:
        value = getattr(self, name)
        if not least <= value < below:
            upper = "" if below == math.inf else f" and below {below:g}"
            raise ValueError(f"{name} must be at least {least:g}{upper}, got {value}")

    def _require_above_zero(self, name: str) -> None:
        if not 0 < getattr(self, name) < math.inf:
            raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SgdRule(UpdateRule):
    """``w -= lr g``."""

    name: ClassVar[str] = "sgd"

    @property
    def initial_states(self) -> tuple[float, ...]:
        """None."""
        return ()

    @property
    def parameters(self) -> tuple[float, float, float]:
        """See ``UpdateRule.parameters``."""
        return 0.0, 0.0, 0.0

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        move.weights.sub_(move.gradient, alpha=move.learning_rate)


@dataclass(frozen=True, slots=True)
class _MomentumRule(UpdateRule):
    """A rule whose only state is a momentum, which contains the learning rate."""

    momentum_factor: float = 0.9

    moves_always: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not an optimizer."""
        self._require("momentum_factor", 0, 1)

    @property
    def initial_states(self) -> tuple[float, ...]:
        """Of the momentum."""
        return (0.0,)

    def update_lazily(self, move: Move, last_steps: torch.Tensor) -> None:
        """See ``UpdateRule.update_lazily``. The result is that of steps with a zero gradient."""
        (momentum,), factor = move.states, self.momentum_factor
        decay = factor ** move.per_row(move.step - 1 - last_steps)
        move.weights.add_(momentum * (self._first_skipped_move() * (1 - decay) / (1 - factor)))
        momentum.mul_(decay)
        self.update(move)

    @abstractmethod
    def _first_skipped_move(self) -> float:
        """Return the move in the first step without a gradient, as a multiple of the momentum before it."""


@dataclass(frozen=True, slots=True)
class MomentumSgdRule(_MomentumRule):
    """``m = momentum_factor m - lr g; w += m``. The momentum of ``torch.optim.SGD`` does not contain ``lr``."""

    name: ClassVar[str] = "momentum_sgd"

    @property
    def parameters(self) -> tuple[float, float, float]:
        """See ``UpdateRule.parameters``."""
        return self.momentum_factor, 0.0, 0.0

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        (momentum,) = move.states
        momentum.mul_(self.momentum_factor).sub_(move.gradient, alpha=move.learning_rate)
        move.weights.add_(momentum)

    def _first_skipped_move(self) -> float:
        return self.momentum_factor


@dataclass(frozen=True, slots=True)
class NesterovRule(_MomentumRule):
    """``m' = momentum_factor m - lr g; w += (1 + momentum_factor) m' - momentum_factor m``."""

    name: ClassVar[str] = "nesterov"

    @property
    def parameters(self) -> tuple[float, float, float]:
        """See ``UpdateRule.parameters``."""
        return self.momentum_factor, 0.0, 0.0

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        (momentum,), factor = move.states, self.momentum_factor
        move.weights.sub_(momentum, alpha=factor)
        momentum.mul_(factor).sub_(move.gradient, alpha=move.learning_rate)
        move.weights.add_(momentum, alpha=1 + factor)

    def _first_skipped_move(self) -> float:
        return self.momentum_factor**2


@dataclass(frozen=True, slots=True)
class AdamRule(UpdateRule):
    """Adam that adds epsilon to the root of the *uncorrected* second moment, as HugeCTR and TensorFlow do.

    ``torch.optim.Adam`` corrects the second moment before it adds epsilon, which is another rule.
    """

    name: ClassVar[str] = "adam"

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7

    moves_always: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not an optimizer."""
        self._require("beta1", 0, 1)
        self._require("beta2", 0, 1)
        self._require_above_zero("epsilon")

    @property
    def initial_states(self) -> tuple[float, ...]:
        """Of the first and the second moment."""
        return (0.0, 0.0)

    @property
    def parameters(self) -> tuple[float, float, float]:
        """See ``UpdateRule.parameters``."""
        return self.beta1, self.beta2, self.epsilon

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        first, second = move.states
        first.mul_(self.beta1).add_(move.gradient, alpha=1 - self.beta1)
        second.mul_(self.beta2).addcmul_(move.gradient, move.gradient, value=1 - self.beta2)
        rate = self._rate(move.learning_rate, move.step)
        move.weights.addcdiv_(first, second.sqrt().add_(self.epsilon), value=-rate)

    def update_lazily(self, move: Move, last_steps: torch.Tensor) -> None:
        """See ``UpdateRule.update_lazily``.

        As in HugeCTR, a row moves by the moments of its last update, once for each step since then. So the move of this
        step comes with the row's next update, and the first update moves nothing.
        """
        first, second = move.states
        last, elapsed = move.per_row(last_steps), move.per_row(move.step - last_steps)
        corrections = (1 - self.beta2**last).sqrt() / (1 - self.beta1**last)
        rates = move.learning_rate * corrections * (1 - self.beta1**elapsed) / (1 - self.beta1)
        moves = rates * first / (second.sqrt() + self.epsilon)
        move.weights.sub_(moves.where(last > 0, 0.0))
        first.mul_(self.beta1**elapsed).add_(move.gradient, alpha=1 - self.beta1)
        second.mul_(self.beta2**elapsed).addcmul_(move.gradient, move.gradient, value=1 - self.beta2)

    def _rate(self, learning_rate: float, step: int) -> float:
        """The learning rate with the corrections of both moments."""
        return learning_rate * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)


@dataclass(frozen=True, slots=True)
class AdaGradRule(UpdateRule):
    """``n += g^2; w -= lr g / (sqrt(n) + epsilon)``, with ``n`` from ``initial_accumulator``."""

    name: ClassVar[str] = "ada_grad"

    initial_accumulator: float = 0.0
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not an optimizer."""
        self._require("initial_accumulator", 0)
        self._require_above_zero("epsilon")

    @property
    def initial_states(self) -> tuple[float, ...]:
        """Of ``n``."""
        return (self.initial_accumulator,)

    @property
    def parameters(self) -> tuple[float, float, float]:
        """See ``UpdateRule.parameters``."""
        return self.epsilon, 0.0, 0.0

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        (accumulator,) = move.states
        accumulator.addcmul_(move.gradient, move.gradient)
        move.weights.addcdiv_(move.gradient, accumulator.sqrt().add_(self.epsilon), value=-move.learning_rate)


@dataclass(frozen=True, slots=True)
class RowWiseAdaGradRule(AdaGradRule):
    """AdaGrad with one ``n`` per row: ``n += mean(g^2); w -= lr g / (sqrt(n) + epsilon)``.

    It is the row-wise AdaGrad of TorchRec and the ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM. A row is ``weights[i]``. If the
    weights have one dimension, each float is a row.
    """

    name: ClassVar[str] = "row_wise_ada_grad"

    def new_states(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """Return ``n``, of the shape [V, 1, ...] for weights [V, ...]."""
        shape = (*weights.shape[:1], *[1] * (weights.dim() - 1))
        return [weights.new_full(shape, self.initial_accumulator)]

    @property
    def of_dense_weights(self) -> UpdateRule:
        """AdaGrad, because a row of dense weights is not looked up alone. DLRM does the same."""
        return AdaGradRule(self.initial_accumulator, self.epsilon)

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        (accumulator,) = move.states
        squares = move.gradient.square()
        accumulator.add_(squares.flatten(1).mean(1).reshape_as(accumulator) if squares.dim() > 1 else squares)
        move.weights.sub_(move.gradient * (move.learning_rate / (accumulator.sqrt() + self.epsilon)))


@dataclass(frozen=True, slots=True)
class FtrlRule(UpdateRule):
    """FTRL-proximal as HugeCTR writes it, with ``n`` from ``initial_accumulator`` and ``z`` from 0.

    ``n' = n + g^2; z += g + (sqrt(n) - sqrt(n')) w / lr``. Then ``w = (l1 sign(z) - z) / (sqrt(n') / lr + l2)`` where
    ``|z| > l1``, else 0. TensorFlow doubles its ``l2`` in this formula.
    """

    name: ClassVar[str] = "ftrl"

    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not an optimizer."""
        for name in ("l1", "l2"):
            self._require(name, 0)
        self._require_above_zero("initial_accumulator")

    @property
    def initial_states(self) -> tuple[float, ...]:
        """Of ``n`` and ``z``."""
        return (self.initial_accumulator, 0.0)

    @property
    def parameters(self) -> tuple[float, float, float]:
        """See ``UpdateRule.parameters``."""
        return self.l1, self.l2, 0.0

    def update(self, move: Move) -> None:
        """See ``UpdateRule.update``."""
        if move.learning_rate == 0:  # the formula divides by it
            return
        n, z = move.states
        root = n.sqrt()
        n.addcmul_(move.gradient, move.gradient)
        new_root = n.sqrt()
        z.add_(move.gradient).add_((root - new_root) * move.weights / move.learning_rate)
        solved = (self.l1 * z.sign() - z) / (new_root / move.learning_rate + self.l2)
        move.weights.copy_(solved.where(z.abs() > self.l1, 0.0))


def update_rows(
    rule: UpdateRule, update_type: UpdateType, move: Move, rows: torch.Tensor, last_steps: torch.Tensor
) -> None:
    """Update a table in one step; only some rows have a gradient.

    "Local" changes these rows only. "Global" also moves the other rows, as their states say. "LazyGlobal" makes up for
    the skipped steps of a row at its next update. The three are the same for rules that do not move a row without a
    gradient.

    Args:
        rule: the formula.
        update_type: see above.
        move: its weights and states are [V, ...], its gradient is [U, ...].
        rows: int64[U], the distinct rows that have a gradient.
        last_steps: int64[V], the step of each row's last update; is changed.
    """
    if update_type == "Global" and rule.moves_always:
        gradient = move.weights.new_zeros(move.weights.shape).index_copy_(0, rows, move.gradient)
        rule.update(Move(move.weights, move.states, gradient, move.learning_rate, move.step))
        last_steps[: len(gradient)] = move.step
        return
    tables = (move.weights, *move.states)
    weights, *states = (table.index_select(0, rows) for table in tables)
    of_rows = Move(weights, states, move.gradient, move.learning_rate, move.step)
    if update_type == "LazyGlobal":
        rule.update_lazily(of_rows, last_steps[rows])
    else:
        rule.update(of_rows)
    last_steps[rows] = move.step
    for table, changed in zip(tables, (weights, *states), strict=True):
        table.index_copy_(0, rows, changed)
