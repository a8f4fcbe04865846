"""The rules against ``torch.optim`` where the formula is the same, and against loops in float64 where it is not."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.tables.rules import (
    AdaGradRule,
    AdamRule,
    FtrlRule,
    MomentumSgdRule,
    Move,
    NesterovRule,
    RowWiseAdaGradRule,
    SgdRule,
    update_rows,
)

ROWS, DIM = 5, 3
RULES = [
    SgdRule(),
    MomentumSgdRule(0.8),
    NesterovRule(0.8),
    AdamRule(0.8, 0.9, 1e-3),
    AdaGradRule(0.1),
    RowWiseAdaGradRule(0.1),
    FtrlRule(0.01, 0.1),
]
STEPS = st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=8)


class Table:
    """Weights and states that a rule updates."""

    def __init__(self, rule, update_type, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
        self.states = rule.new_states(self.weights)
        self.last_steps = torch.zeros(ROWS, dtype=torch.int64)
        self._rule, self._update_type, self._step = rule, update_type, 0

    def update(self, rows, gradient, learning_rate=0.1):
        self._step += 1
        move = Move(self.weights, self.states, gradient[rows], learning_rate, self._step)
        update_rows(self._rule, self._update_type, move, torch.tensor(rows, dtype=torch.int64), self.last_steps)


def gradients(seed=7):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (SgdRule(), lambda params: torch.optim.SGD(params, lr=0.1)),
        (MomentumSgdRule(0.8), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.8)),
        (NesterovRule(0.8), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.8, nesterov=True)),
        (
            AdaGradRule(0.5, 1e-3),
            lambda params: torch.optim.Adagrad(params, 0.1, initial_accumulator_value=0.5, eps=1e-3),
        ),
        (AdamRule(0.8, 0.9, 1e-30), lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.8, 0.9), eps=0.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_the_formulas_are_the_same_the_weights_are_those_of_torch(rule, theirs):
    table = Table(rule, "Local")
    weights = torch.nn.Parameter(table.weights.clone())
    optimizer = theirs([weights])

    for _, gradient in zip(range(20), gradients(), strict=False):
        table.update(list(range(ROWS)), gradient)
        weights.grad = gradient
        optimizer.step()

    torch.testing.assert_close(table.weights, weights.detach())


def test_adam_adds_epsilon_to_the_root_of_the_uncorrected_second_moment():
    table = Table(AdamRule(0.9, 0.99, 0.25), "Local")
    w, m, v = table.weights.numpy().copy(), 0.0, 0.0

    for step, gradient in zip(range(1, 8), gradients(), strict=False):
        table.update(list(range(ROWS)), gradient)
        g = gradient.numpy()
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g**2
        w = w - 0.1 * math.sqrt(1 - 0.99**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 0.25)

    np.testing.assert_allclose(table.weights.numpy(), w, rtol=1e-12)


def test_ftrl_gives_the_weights_of_tensorflows_example():
    # All weights 1, all gradients 2, lr 0.1, l1 2, l2 1e-5 (which TensorFlow doubles), accumulators from 0.1.
    weights, gradient = torch.ones(5, 3, dtype=torch.float64), torch.full((5, 3), 2.0, dtype=torch.float64)
    rule = FtrlRule(l1=2, l2=2e-5, initial_accumulator=0.1)
    states = [torch.full_like(weights, value) for value in rule.initial_states]

    losses = [float(2 * weights.sum())]
    for step, expected in enumerate([0.64627968, 0.57600689, 0.51851097], 1):
        rule.update(Move(weights, states, gradient, 0.1, step))
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-7)
        losses.append(float(2 * weights.sum()))

    assert losses == pytest.approx([30, 19.38839, 17.28021, 15.55533], abs=1e-5)


def test_row_wise_ada_grad_divides_by_the_root_of_the_sum_of_each_rows_mean_squares():
    table = Table(RowWiseAdaGradRule(0.25, 1e-3), "Local")
    w, n = table.weights.numpy().copy(), np.full((ROWS, 1), 0.25)

    for gradient, rows in zip(gradients(), ([0, 3], [3, 1, 4], [0]), strict=False):
        table.update(rows, gradient)
        g = gradient.numpy()[rows]
        n[rows] += (g**2).sum(axis=1, keepdims=True) / DIM
        w[rows] -= 0.1 / (np.sqrt(n[rows]) + 1e-3) * g

    np.testing.assert_allclose(table.weights.numpy(), w, rtol=1e-12)
    np.testing.assert_allclose(table.states[0].numpy(), n, rtol=1e-12)


def test_ftrl_sets_weights_to_zero_where_their_gradients_stay_within_l1():
    table = Table(FtrlRule(l1=1e3), "Local")

    table.update([0, 1], next(gradients()))

    assert not table.weights[:2].any()
    assert table.weights[2:].all()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(deadline=None, max_examples=12)
@given(touched=STEPS)
def test_a_local_step_changes_only_rows_with_a_gradient_each_like_a_table_of_its_own(rule, touched):
    table = Table(rule, "Local")
    alone = [Table(rule, "Local") for _ in range(ROWS)]

    for step, (rows, gradient) in enumerate(zip(touched, gradients(), strict=False), 1):
        before = table.weights.clone()
        table.update(sorted(rows), gradient)
        for row in range(ROWS):
            if row in rows:
                of_row = [part[row : row + 1] for part in (alone[row].weights, *alone[row].states)]
                rule.update(Move(of_row[0], of_row[1:], gradient[row : row + 1], 0.1, step))
            else:
                torch.testing.assert_close(table.weights[row], before[row], rtol=0, atol=0)

    torch.testing.assert_close(table.weights, torch.stack([alone[row].weights[row] for row in range(ROWS)]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(deadline=None, max_examples=12)
@given(touched=STEPS)
def test_a_global_step_gives_rows_without_a_gradient_a_gradient_of_zero(rule, touched):
    sparse, dense = Table(rule, "Global"), Table(rule, "Local")
    if not rule.moves_always:  # a row without a gradient stays, and a zero gradient need not be applied
        dense = Table(rule, "Local")

    for rows, gradient in zip(touched, gradients(), strict=False):
        sparse.update(sorted(rows), gradient)
        if rule.moves_always:
            with_zeros = torch.zeros_like(gradient)
            with_zeros[sorted(rows)] = gradient[sorted(rows)]
            dense.update(list(range(ROWS)), with_zeros)
        else:
            dense.update(sorted(rows), gradient)

    torch.testing.assert_close(sparse.weights, dense.weights)


@pytest.mark.parametrize("rule", [MomentumSgdRule(0.8), NesterovRule(0.8), MomentumSgdRule(0.0)])
@settings(deadline=None, max_examples=12)
@given(touched=STEPS, rates=st.lists(st.floats(0.01, 1), min_size=8, max_size=8))
def test_a_lazy_momentum_has_caught_up_with_the_global_one_when_a_row_has_a_gradient(rule, touched, rates):
    lazy, everywhere = Table(rule, "LazyGlobal"), Table(rule, "Global")

    for rows, gradient, rate in zip(touched, gradients(), rates, strict=False):
        for table in (lazy, everywhere):
            table.update(sorted(rows), gradient, rate)
        torch.testing.assert_close(lazy.weights[sorted(rows)], everywhere.weights[sorted(rows)])


@settings(deadline=None, max_examples=12)
@given(touched=STEPS)
def test_a_lazy_adam_makes_up_one_move_for_each_step_since_the_last_gradient(touched):
    rule = AdamRule(0.8, 0.9, 1e-3)
    table = Table(rule, "LazyGlobal")
    w = table.weights.numpy().copy()
    m, v, last = np.zeros_like(w), np.zeros_like(w), [0] * ROWS

    for step, (rows, gradient) in enumerate(zip(touched, gradients(), strict=False), 1):
        table.update(sorted(rows), gradient)
        for row in rows:
            for skipped in range(step - last[row] if last[row] else 0):
                correction = math.sqrt(1 - 0.9 ** last[row]) / (1 - 0.8 ** last[row])
                w[row] -= 0.1 * correction * 0.8**skipped * m[row] / (np.sqrt(v[row]) + 1e-3)
            for _ in range(step - last[row]):
                m[row] *= 0.8
                v[row] *= 0.9
            m[row] += (1 - 0.8) * gradient[row].numpy()
            v[row] += (1 - 0.9) * gradient[row].numpy() ** 2
            last[row] = step

    np.testing.assert_allclose(table.weights.numpy(), w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamRule(beta1=1.0), "beta1 must be at least 0 and below 1, got 1.0"),
        (lambda: AdamRule(beta2=-0.1), "beta2 must be at least 0 and below 1, got -0.1"),
        (lambda: AdamRule(epsilon=0.0), "epsilon must be above 0, got 0.0"),
        (lambda: AdamRule(epsilon=math.nan), "epsilon must be above 0, got nan"),
        (lambda: MomentumSgdRule(1), "momentum_factor must be at least 0 and below 1, got 1"),
        (lambda: NesterovRule(math.nan), "momentum_factor must be at least 0 and below 1, got nan"),
        (lambda: AdaGradRule(-1), "initial_accumulator must be at least 0, got -1"),
        (lambda: RowWiseAdaGradRule(-1), "initial_accumulator must be at least 0, got -1"),
        (lambda: AdaGradRule(epsilon=math.inf), "epsilon must be above 0, got inf"),
        (lambda: FtrlRule(l1=-1), "l1 must be at least 0, got -1"),
        (lambda: FtrlRule(l2=math.inf), "l2 must be at least 0, got inf"),
        (lambda: FtrlRule(initial_accumulator=0), "initial_accumulator must be above 0, got 0"),
    ],
)
def test_an_impossible_rule_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
