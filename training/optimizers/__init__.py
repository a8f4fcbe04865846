"""HugeCTR's optimizers for PyTorch: ``torch.optim.Optimizer`` with dense and sparse gradients, on CPU or CUDA.

They also update the tables of an ``EmbeddingBagCollection``, whose parameters they get like any others, and keep their
states in the rows of the tables.

A sparse gradient, such as that of ``torch.nn.Embedding(sparse=True)``, has rows, as a table has. What happens to the
rows without a gradient is the update type; see ``training.tables.rules.update_rows``. With a dense gradient every
row has one.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from itertools import chain, count
from numbers import Real
from typing import Any, ClassVar, get_args

import torch

from training.embedding.eager import eager
from training.embedding.parameter import TableParameter, send_gradients
from training.optimizers.tables import step_tables
from training.tables.rules import (
    AdaGradRule,
    AdamRule,
    FtrlRule,
    MomentumSgdRule,
    Move,
    NesterovRule,
    RowWiseAdaGradRule,
    SgdRule,
    UpdateRule,
    UpdateType,
    update_rows,
)

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

#: PyTorch's names of the rules' parameters.
_USUAL_NAMES = {
    "betas": ("beta1", "beta2"),
    "eps": ("epsilon",),
    "momentum": ("momentum_factor",),
    "initial_accumulator_value": ("initial_accumulator",),
}
#: Options in the states of some optimizers, ours or PyTorch's.
_OPTIONS = {
    "foreach",
    *(field.name for rule in (AdaGradRule, AdamRule, FtrlRule) for field in fields(rule)),
    "momentum_factor",
}
_numbers = count()
_OF_PYTORCH = ("params", "param_names", "initial_lr")  # keys of PyTorch in a parameter group


class RuleOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer that applies one rule.

    Attributes:
        rule_type: the rule. Its parameters and ``lr`` are options of each parameter group.
    """

    rule_type: ClassVar[type[UpdateRule]]
    _number = 0  # of an optimizer that an earlier version pickled

    def __init__(
        self,
        params: Params,
        lr: float = 0.001,
        *parameters: float,
        update_type: UpdateType = "Local",
        scaler: float = 1.0,
        weight_decay: float = 0.0,
        **named: Any,
    ) -> None:
        """Optimize ``params``.

        Args:
            params: tensors, or parameter groups as in ``torch.optim``.
            lr: the learning rate, at least 0.
            parameters: the parameters of ``rule_type``, in its order.
            update_type: what happens to rows without a gradient.
            scaler: the loss was multiplied by this number, so gradients are divided by it.
            weight_decay: this multiple of the weights is added to their gradient, at least 0. A row without a gradient
                does not decay.
            named: the parameters of ``rule_type``, by its names or PyTorch's: ``betas``, ``eps``, ``momentum`` and
                ``initial_accumulator_value``.

        Raises:
            TypeError: there is no such option, or an option is of another type.
            ValueError: a number is out of range, or the update type is unknown.
        """
        if not 0 < scaler < math.inf:
            raise ValueError(f"scaler must be above 0, got {scaler}")
        if update_type not in get_args(UpdateType):
            raise ValueError(f"update_type must be one of {', '.join(get_args(UpdateType))}, got {update_type!r}")
        options = self._options({"lr": lr, "weight_decay": weight_decay, **named})
        lr, weight_decay = options.pop("lr"), options.pop("weight_decay")
        defaults = asdict(self.rule_type(*parameters, **options))
        self._update_type = update_type
        self._scaler = scaler
        self._number = next(_numbers)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. The rows of tables get the rule's states; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            TypeError: there is no such option, or an option is of another type.
            ValueError: a number is out of range.
        """
        of_pytorch = {name: param_group[name] for name in _OF_PYTORCH if name in param_group}
        options = self._options({name: value for name, value in param_group.items() if name not in of_pytorch})
        super().add_param_group({**of_pytorch, **options})
        self._give_states(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; see ``torch.optim.Optimizer.load_state_dict``. The rows of tables are not in it.

        Raises:
            ValueError: the state is that of another optimizer, or a table has loaded rows that began with other states.
        """
        own = {"lr", *(field.name for field in fields(self.rule_type))}
        for group in state_dict["param_groups"]:
            others = _OPTIONS & group.keys() - own
            if not own <= group.keys() or others:
                came = ", ".join(sorted(group.keys() - {"params", "param_names"}))
                raise ValueError(f"{type(self).__name__}: expected a state with {', '.join(sorted(own))}, got {came}")
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._give_states(group)

    @eager
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` computes the loss again, which is returned.

        Raises:
            RuntimeError: another optimizer with states was made for a table since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_last_made()
        send_gradients(parameter for parameter in self._parameters() if isinstance(parameter, TableParameter))
        for group in self.param_groups:
            rule = self._rule(group)
            tables: dict[int, list[TableParameter]] = defaultdict(list)  # by step
            for weights in group["params"]:
                if isinstance(weights, TableParameter):
                    if weights.sink:
                        tables[self._count_step(weights)].append(weights)
                elif weights.grad is not None:
                    self._update(rule, weights, group)
            for step, parameters in tables.items():
                decay = group.get("weight_decay", 0.0)  # a state of an earlier version has none
                step_tables(parameters, rule, self._update_type, group["lr"], step, self._scaler, decay)
        return loss

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; see ``torch.optim.Optimizer.zero_grad``."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for parameter in self._parameters():  # without reading the gradient, which may be in several processes
            parameter.grad = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what ``copy.deepcopy`` and ``pickle`` need."""
        own = {name: getattr(self, name) for name in ("_update_type", "_scaler", "_number")}
        return {**super().__getstate__(), **own}

    def _give_states(self, group: dict[str, Any]) -> None:
        """Give the rows of a group's tables the states of the group's rule."""
        rule = self._rule(group)
        for parameter in group["params"]:
            if isinstance(parameter, TableParameter):
                parameter.table.use_states(rule.name, rule.initial_states)
                parameter.optimizer = self._number

    def _require_last_made(self) -> None:
        """Refuse to step a table whose rows have the states of another optimizer."""
        for group in self.param_groups:
            has_states = bool(self._rule(group).initial_states)
            for parameter in group["params"]:
                if not isinstance(parameter, TableParameter) or parameter.optimizer in (None, self._number):
                    continue
                if has_states or parameter.table.native.initial_states:
                    expected = "a step of the optimizer that was made last, because rows have the states of one"
                    raise RuntimeError(
                        f"table {parameter.table.name!r}: expected {expected}, got a step of an earlier one"
                    )

    def _parameters(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options under the names of the rule. Raise an error if an option would be ignored."""
        known = ["lr", "weight_decay", *(field.name for field in fields(self.rule_type))]
        renamed: dict[str, Any] = {}
        for name, value in options.items():
            own = _USUAL_NAMES.get(name, (name,))
            if not set(own) <= set(known):
                raise TypeError(f"{type(self).__name__}: expected one of the options {', '.join(known)}, got {name!r}")
            values = value if len(own) > 1 else [value]
            if not isinstance(values, tuple | list) or len(values) != len(own):
                raise TypeError(f"{type(self).__name__}: expected {name} as {len(own)} numbers, got {value!r}")
            renamed.update(zip(own, values, strict=True))
        for name, value in renamed.items():
            if isinstance(value, bool) or not isinstance(value, Real | torch.Tensor):
                raise TypeError(f"{type(self).__name__}: expected {name} as a number, got {value!r}")
            if name in ("lr", "weight_decay") and not 0 <= float(value) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {value}")
        return renamed

    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        return self.rule_type(**{field.name: group[field.name] for field in fields(self.rule_type)})

    def _count_step(self, parameter: TableParameter) -> int:
        """Return the number of this step, which begins after the last step that changed the table."""
        state = self.state[parameter]
        state["step"] = 1 + max(state.get("step", 0), parameter.table.step)
        return int(state["step"])

    def _update(self, rule: UpdateRule, weights: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = weights.grad, self.state[weights]
        learning_rate, decay = group["lr"], group.get("weight_decay", 0.0)
        assert gradient is not None
        if not state:
            state["step"] = 0
            state["states"] = rule.new_states(weights)
        state["step"] += 1
        if not gradient.is_sparse:
            gradient = gradient / self._scaler + (decay * weights if decay else 0)
            rule.update(Move(weights, state["states"], gradient, learning_rate, state["step"]))
            return
        if "last_steps" not in state:  # of the weights' dtype, because torch loads every state in this dtype
            state["last_steps"] = weights.new_zeros(len(weights))
        gradient = gradient.coalesce()
        [rows], values = gradient.indices(), gradient.values() / self._scaler
        if decay:
            values = values + decay * weights[rows]
        move = Move(weights, state["states"], values, learning_rate, state["step"])
        update_rows(rule, self._update_type, move, rows, state["last_steps"])


class SGD(RuleOptimizer):
    """See ``SgdRule``."""

    rule_type = SgdRule


class MomentumSGD(RuleOptimizer):
    """See ``MomentumSgdRule``."""

    rule_type = MomentumSgdRule


class Nesterov(RuleOptimizer):
    """See ``NesterovRule``."""

    rule_type = NesterovRule


class Adam(RuleOptimizer):
    """See ``AdamRule``."""

    rule_type = AdamRule


class AdaGrad(RuleOptimizer):
    """See ``AdaGradRule``."""

    rule_type = AdaGradRule


class RowWiseAdaGrad(RuleOptimizer):
    """See ``RowWiseAdaGradRule``."""

    rule_type = RowWiseAdaGradRule


class Ftrl(RuleOptimizer):
    """See ``FtrlRule``."""

    rule_type = FtrlRule
