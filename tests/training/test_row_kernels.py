"""Training on rows: pooling, sums of gradients and moves, against NumPy in float64 and against the rules in PyTorch."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import gather_pooled, lookup_threads, move_rows, set_lookup_threads, sum_gradients
from training.update_rules import AdaGradRule, AdamRule, FtrlRule, MomentumSgdRule, Move, NesterovRule, SgdRule

CAPACITY = 12
RULES = [
    SgdRule(),
    MomentumSgdRule(0.7),
    NesterovRule(0.7),
    AdamRule(0.8, 0.9, 1e-3),
    AdaGradRule(0.1, 1e-3),
    FtrlRule(0.5, 0.1),
]
BAGS = st.lists(st.lists(st.integers(0, CAPACITY - 1), max_size=5), max_size=8)
COMBINERS = st.sampled_from(["sum", "mean", "sqrtn"])
DIMS = st.sampled_from([1, 3, 16, 17])


@pytest.fixture
def threads():
    """Set the number of threads for one test."""
    before = lookup_threads()
    yield set_lookup_threads
    set_lookup_threads(before)


def flat(bags):
    rows = np.array([row for bag in bags for row in bag], dtype=np.int64)
    return rows, np.cumsum([0, *map(len, bags)], dtype=np.int64)


def divisor(bag, combiner):
    count = max(len(bag), 1)
    return {"sum": 1, "mean": count, "sqrtn": count**0.5}[combiner]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(deadline=None)
@given(bags=st.lists(st.lists(st.integers(-1, CAPACITY - 1), max_size=5), max_size=8), combiner=COMBINERS, dim=DIMS)
def test_pooled_rows_are_those_of_numpy(bags, combiner, dim):
    table = random(CAPACITY, 3, dim)
    out = np.full((len(bags), dim), np.nan, np.float32)

    gather_pooled(table, *flat(bags), combiner, 0.25, out)

    for bag, pooled in zip(bags, out, strict=True):
        rows = [table[row, 0] if row >= 0 else np.full(dim, 0.25) for row in bag]
        expected = sum(rows, np.zeros(dim)) / divisor(bag, combiner)
        np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(bags=BAGS, combiner=COMBINERS, dim=DIMS)
def test_the_gradient_of_a_row_is_the_sum_over_its_places(bags, combiner, dim):
    gradient, heads = random(len(bags), dim), np.full(CAPACITY, -1, np.int32)
    expected = {}
    for bag, of_bag in zip(bags, gradient.astype(np.float64), strict=True):
        for row in bag:
            expected[row] = expected.get(row, 0) + of_bag / divisor(bag, combiner)

    rows, sums = sum_gradients(*flat(bags), combiner, gradient, heads)

    assert rows.tolist() == list(expected)
    assert (heads == -1).all()
    for row, summed in zip(rows.tolist(), sums, strict=True):
        np.testing.assert_allclose(summed, expected[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(deadline=None, max_examples=30)
@given(touched=st.lists(st.sets(st.integers(0, CAPACITY - 1)), min_size=1, max_size=6), dim=DIMS)
def test_rows_move_as_the_rule_says_and_others_stay(rule, touched, dim):
    table = random(CAPACITY, 1 + len(rule.initial_states), dim)
    table[:, 1:] = np.array(rule.initial_states, np.float32)[:, None]
    expected = torch.from_numpy(table.astype(np.float64))

    for step, chosen in enumerate(touched, 1):
        rows, gradient = np.array(sorted(chosen), dtype=np.int64), random(len(chosen), dim, seed=step)
        move_rows(table, *rule.factors(0.1, step), rows, gradient)
        weights, *states = expected[rows].unbind(dim=1)
        rule.update(Move(weights, states, torch.from_numpy(gradient.astype(np.float64)), 0.1, step))
        expected[rows] = torch.stack([weights, *states], dim=1)

    np.testing.assert_allclose(table, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_bits_do_not_depend_on_the_number_of_threads(threads):
    rng = np.random.default_rng(0)
    rows, row_ptrs = rng.integers(0, 5_000, 30_000), np.arange(0, 30_001, 3)
    gradient = random(10_000, 8)

    def step():
        table, heads = random(5_000, 3, 8, seed=1), np.full(5_000, -1, np.int32)
        np.abs(table, out=table)
        pooled = np.empty((10_000, 8), np.float32)
        gather_pooled(table, rows, row_ptrs, "mean", 0.0, pooled)
        distinct, sums = sum_gradients(rows, row_ptrs, "mean", gradient, heads)
        move_rows(table, *AdamRule().factors(0.1, 1), distinct, sums)
        return pooled, distinct, sums, table

    threads(1)
    alone = step()
    threads(4)

    for one, other in zip(alone, step(), strict=True):
        np.testing.assert_array_equal(one, other)


def table(parts=3):
    return np.zeros((4, parts, 2), np.float32)


ROWS, OFFSETS, GRADIENT, HEADS = (
    np.array([0, 3]),
    np.array([0, 2]),
    np.zeros((1, 2), np.float32),
    np.full(4, -1, np.int32),
)
ADAM = ("adam", (0.1, 0.9, 0.999, 1e-7))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather_pooled(table()[0], ROWS, OFFSETS, "sum", 0.0, GRADIENT), "table: expected float32[C, P, D]"),
        (lambda: gather_pooled(table(0), ROWS, OFFSETS, "sum", 0.0, GRADIENT), "table: expected at least one part"),
        (
            lambda: gather_pooled(table(), ROWS - 2, OFFSETS, "sum", 0.0, GRADIENT),
            "rows: expected numbers from -1 to 3, got -2",
        ),
        (lambda: gather_pooled(table(), ROWS + 1, OFFSETS, "sum", 0.0, GRADIENT), "to 3, got 4 at position 1"),
        (lambda: gather_pooled(table(), ROWS, OFFSETS[:1], "sum", 0.0, GRADIENT), "row_ptrs: the last offset must be"),
        (
            lambda: gather_pooled(table(), ROWS, OFFSETS, "max", 0.0, GRADIENT),
            "combiner: expected 'sum', 'mean' or 'sqrtn'",
        ),
        (lambda: gather_pooled(table(), ROWS, OFFSETS, "sum", 0.0, GRADIENT[:, :1]), "out: "),
        (
            lambda: sum_gradients(ROWS - 1, OFFSETS, "sum", GRADIENT, HEADS),
            "rows: expected numbers from 0 to 3, got -1",
        ),
        (lambda: sum_gradients(ROWS, OFFSETS, "sum", GRADIENT, HEADS[:3]), "rows: expected numbers from 0 to 2, got 3"),
        (
            lambda: sum_gradients(ROWS, OFFSETS, "sum", GRADIENT[:0], HEADS),
            "gradient: expected float32[R, D] of shape [1",
        ),
        (
            lambda: move_rows(table(), "adamw", ADAM[1], ROWS, np.zeros((2, 2), np.float32)),
            "rule: expected one of 'sgd'",
        ),
        (
            lambda: move_rows(table(2), *ADAM, ROWS, np.zeros((2, 2), np.float32)),
            "expected 3 parts for the rule 'adam', got 2",
        ),
        (
            lambda: move_rows(table(), "adam", ADAM[1][:3], ROWS, np.zeros((2, 2), np.float32)),
            "factors: expected four numbers",
        ),
        (lambda: move_rows(table(), *ADAM, ROWS, GRADIENT), "gradient: expected float32[U, D] of shape [2, 2]"),
        (
            lambda: move_rows(table(), *ADAM, ROWS + 1, np.zeros((2, 2), np.float32)),
            "rows: expected numbers from 0 to 3, got 4",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_wrong_dtype_is_refused_by_name():
    with pytest.raises(TypeError, match=re.escape("gradient: expected float32[U, D], got float64[2, 2]")):
        move_rows(table(), *ADAM, ROWS, np.zeros((2, 2)))
    with pytest.raises(TypeError, match=re.escape("heads: expected int32[C], got int64[4]")):
        sum_gradients(ROWS, OFFSETS, "sum", GRADIENT, HEADS.astype(np.int64))
