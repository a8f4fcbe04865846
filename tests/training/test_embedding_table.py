import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError
from serving.model.graph import Embedding
from training import optimizers
from training.embedding_table import EmbeddingTable
from training.samples import Bags
from training.update_rules import AdamRule, FtrlRule, MomentumSgdRule


def layer(slots=3, dim=4, combiner="sum", default_value=0.0):
    return Embedding("t", "keys", "emb", slots, dim, combiner, "distributed", default_value)


def bags_of(lists):
    """Bags from one list of keys per (sample, slot)."""
    keys = np.array([key for bag in lists for key in bag], dtype=np.int64)
    return Bags(keys, np.cumsum([0, *map(len, lists)], dtype=np.int64), 1)


def vectors_of(table):
    keys, vectors = table.rows()
    return {key: vector.astype(np.float64) for key, vector in zip(keys.tolist(), vectors, strict=True)}


def test_one_adam_step_moves_rows_as_in_hugectrs_worked_example():
    # HugeCTR's TensorFlow plugin: learning rate 0.1, gradient ones; keys 0 and 1 are read four times, 2 and 6 twice.
    table = EmbeddingTable(layer(), seed=0, rule=AdamRule(beta1=0.9, beta2=0.99, epsilon=1e-3))
    bags = bags_of([[0], [1], [2, 6], [0], [1], [], [0], [1], [6], [0], [1], [2]])

    touched = table.touch(bags)
    before = vectors_of(table)
    touched.pooled.sum().backward()
    table.update(touched, 0.1, 1)

    decrease = {key: before[key] - vector for key, vector in vectors_of(table).items()}
    for key, expected in {0: 0.09975063, 1: 0.09975063, 2: 0.09950249, 6: 0.09950249}.items():
        np.testing.assert_allclose(decrease[key], expected, atol=2e-8)  # float32 of numbers below 0.2


class NaiveTable:
    """Local Adam with dicts of float64 vectors, one bag after another."""

    def __init__(self, weights, combiner):
        self.weights, self.combiner = weights, combiner
        self.first = {key: np.zeros_like(vector) for key, vector in weights.items()}
        self.second = {key: np.zeros_like(vector) for key, vector in weights.items()}

    def divisor(self, bag):
        count = max(len(bag), 1)
        return {"sum": 1, "mean": count, "sqrtn": math.sqrt(count)}[self.combiner]

    def pool(self, bags):
        zero = np.zeros_like(next(iter(self.weights.values())))
        return [sum((self.weights[key] for key in bag), zero) / self.divisor(bag) for bag in bags]

    def update(self, bags, pooled_gradients, adam, learning_rate, step):
        gradients = {}
        for bag, gradient in zip(bags, pooled_gradients, strict=True):
            for key in bag:
                share = gradient / self.divisor(bag)
                gradients[key] = gradients.get(key, 0) + share
        for key, g in gradients.items():
            self.first[key] = adam.beta1 * self.first[key] + (1 - adam.beta1) * g
            self.second[key] = adam.beta2 * self.second[key] + (1 - adam.beta2) * g * g
            rate = learning_rate * math.sqrt(1 - adam.beta2**step) / (1 - adam.beta1**step)
            self.weights[key] = self.weights[key] - rate * self.first[key] / (np.sqrt(self.second[key]) + adam.epsilon)


BAG = st.lists(st.integers(-3, 8), max_size=4)
STEPS = st.lists(st.lists(BAG, min_size=6, max_size=6), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, combiner=st.sampled_from(["sum", "mean", "sqrtn"]))
def test_training_steps_equal_a_naive_table_bag_by_bag(steps, combiner):
    adam = AdamRule(epsilon=1e-3)
    table = EmbeddingTable(layer(combiner=combiner), seed=1, rule=adam, capacity_rows=1)
    table.touch(bags_of([list(range(-3, 9))] + [[]] * 2))
    naive = NaiveTable(vectors_of(table), combiner)
    rng = np.random.default_rng(0)

    for step, bags in enumerate(steps, start=1):
        pooled_gradient = rng.normal(size=(2, 3, 4))
        touched = table.touch(bags_of(bags))
        expected = np.reshape(naive.pool(bags), (2, 3, 4))
        np.testing.assert_allclose(touched.pooled.detach().numpy(), expected, atol=1e-5)
        (touched.pooled * torch.tensor(pooled_gradient, dtype=torch.float32)).sum().backward()
        table.update(touched, 0.01, step)
        naive.update(bags, pooled_gradient.reshape(6, 4), adam, 0.01, step)

    for key, vector in vectors_of(table).items():
        np.testing.assert_allclose(vector, naive.weights[key], atol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("update_type", ["Local", "Global", "LazyGlobal"])
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (MomentumSgdRule(0.8), lambda weights, kind: optimizers.MomentumSGD(weights, 0.1, 0.8, update_type=kind)),
        (AdamRule(), lambda weights, kind: optimizers.Adam(weights, 0.1, update_type=kind)),
        (FtrlRule(0.01), lambda weights, kind: optimizers.Ftrl(weights, 0.1, 0.01, update_type=kind)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_table_learns_what_an_embedding_bag_of_pytorch_learns(combiner, update_type, rule, optimizer):
    table = EmbeddingTable(layer(slots=1, combiner=combiner), seed=0, rule=rule, update_type=update_type)
    table.touch(Bags.one_key_each(np.arange(20)[:, None]))
    theirs = torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(table.rows()[1].copy()), freeze=False, mode=combiner, sparse=True, include_last_offset=True
    )
    stepping, rng = optimizer(theirs.parameters(), update_type), np.random.default_rng(0)

    for step in range(1, 9):
        bags = bags_of([rng.integers(0, 20, rng.integers(0, 4)).tolist() for _ in range(5)])
        touched = table.touch(bags)
        (touched.pooled - 1).square().sum().backward()
        table.update(touched, 0.1, step)
        stepping.zero_grad()
        (theirs(torch.from_numpy(bags.keys), torch.from_numpy(bags.row_ptrs)) - 1).square().sum().backward()
        stepping.step()

    np.testing.assert_allclose(table.rows()[1], theirs.weight.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_step_does_not_change_other_rows():
    table = EmbeddingTable(layer(slots=1), seed=0)
    for step in (1, 2):
        touched = table.touch(bags_of([[1], [2]]))
        touched.pooled.sum().backward()
        table.update(touched, 0.1, step)
    before = vectors_of(table)

    touched = table.touch(bags_of([[2]]))
    touched.pooled.sum().backward()
    table.update(touched, 0.1, 3)

    after = vectors_of(table)
    np.testing.assert_array_equal(after[1], before[1])
    assert (after[2] != before[2]).all()


@pytest.mark.parametrize(("combiner", "expected"), [("sum", 5.0), ("mean", 2.5)])
def test_in_evaluation_an_unseen_key_has_the_default_value_and_gets_no_row(combiner, expected):
    table = EmbeddingTable(layer(slots=2, combiner=combiner, default_value=2.5), seed=0)
    table.touch(bags_of([[1], [2]]))
    known = vectors_of(table)

    pooled = table.pool(bags_of([[98, 99], [], [1, 99], [2]]))

    assert len(table) == 2
    np.testing.assert_array_equal(pooled[0, 0], np.full(4, expected))
    np.testing.assert_array_equal(pooled[0, 1], np.zeros(4))
    divisor = 2 if combiner == "mean" else 1
    np.testing.assert_allclose(pooled[1, 0], (known[1] + 2.5) / divisor, rtol=1e-6)
    np.testing.assert_allclose(pooled[1, 1], known[2], rtol=1e-6)


def test_an_empty_table_and_empty_bags_pool_to_zeros():
    table = EmbeddingTable(layer(slots=1, default_value=1.0), seed=0)

    assert table.pool(bags_of([[], []])).tolist() == [[[0.0] * 4]] * 2
    assert table.pool(bags_of([[7]])).tolist() == [[[1.0] * 4]]
    assert table.touch(bags_of([[], []])).pooled.tolist() == [[[0.0] * 4]] * 2


def test_first_weights_depend_only_on_key_and_seed():
    keys = np.arange(5000, dtype=np.int64)
    one = EmbeddingTable(layer(slots=1), seed=7, capacity_rows=1)
    for part in np.array_split(keys, 13):
        one.touch(Bags.one_key_each(part[:, None]))
    other = EmbeddingTable(layer(slots=1), seed=7)
    other.touch(Bags.one_key_each(keys[::-1, None].copy()))

    first, second = vectors_of(one), vectors_of(other)

    assert all((first[key] == second[key]).all() for key in keys.tolist())
    everything = np.stack(list(first.values()))
    assert -0.05 <= everything.min() < -0.0499
    assert 0.0499 < everything.max() <= 0.05
    assert abs(everything.mean()) < 0.001


@pytest.mark.parametrize(("rule", "update_type"), [(AdamRule(), "Local"), (MomentumSgdRule(), "LazyGlobal")])
def test_a_growing_table_keeps_weights_and_states(rule, update_type):
    options = {"seed": 0, "rule": rule, "update_type": update_type}
    tables = [EmbeddingTable(layer(slots=1), capacity_rows=rows, **options) for rows in (1, 4096)]
    for step in range(1, 5):
        for table in tables:
            touched = table.touch(Bags.one_key_each(np.arange(step * 100)[:, None]))
            (touched.pooled**2).sum().backward()
            table.update(touched, 0.01, step)

    small, large = (table.rows()[1] for table in tables)

    np.testing.assert_array_equal(small, large)


def test_a_reserved_key_is_refused_and_does_not_change_the_table():
    table = EmbeddingTable(layer(slots=1), seed=0)

    with pytest.raises(ReservedKeyError):
        table.touch(bags_of([[1, 2**63 - 1]]))
    assert len(table) == 0
