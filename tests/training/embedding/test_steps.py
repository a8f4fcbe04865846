"""The native steps of training: pooled bags, gradients of rows and weights, updates."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import (
    ArrayRows,
    TrainingTable,
    array_gradients,
    keys_by_owner,
    look_up_bags,
    lookup_threads,
    merge_gradients,
    merge_lookups,
    set_lookup_threads,
    sum_row_gradients,
    update_tables,
    weight_gradients,
)
from tests.training.embedding.oracle import flat, pool
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

ROWS = 9
BAGS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=5), min_size=1, max_size=7)
COMBINERS = st.sampled_from(["sum", "mean", "sqrtn"])
DIMS = st.sampled_from([1, 3, 16, 300])
NORMS = st.sampled_from([None, 1.5, 40.0])
RULES = [
    SgdRule(),
    MomentumSgdRule(0.7),
    NesterovRule(0.7),
    AdamRule(0.8, 0.9, 1e-3),
    AdaGradRule(0.1, 1e-3),
    RowWiseAdaGradRule(0.1, 1e-3),
    FtrlRule(0.5, 0.1),
]


@pytest.fixture
def threads():
    """Set the number of threads for one test."""
    before = lookup_threads()
    yield set_lookup_threads
    set_lookup_threads(before)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def table_of(rows, rule=None, **options):
    """A table whose key k has row k."""
    rule = rule or SgdRule()
    table = TrainingTable("t", rows.shape[1], rule=rule.name, initial_states=rule.initial_states, **options)
    states = np.tile(table.first_states, (len(rows), 1))
    table.write(np.arange(len(rows)), rows, states, np.zeros(len(rows), np.int64), np.zeros(len(rows), np.uint64))
    return table


def look_up(source, bags, combiner="sum", weights=None, trains=True):
    keys, offsets = flat(bags)
    floats = None if weights is None else np.array(flat(weights)[0], np.float32)
    [answer] = look_up_bags(
        [source], [np.array(keys, np.int64)], [np.array(offsets)], [combiner], [floats], [1], [trains]
    )
    return answer


@settings(deadline=None)
@given(
    bags=BAGS,
    combiner=COMBINERS,
    dim=DIMS,
    max_norm=NORMS,
    is_weighted=st.booleans(),
    is_array=st.booleans(),
    zeroed=st.booleans(),
)
def test_bags_and_their_gradients_are_those_of_pytorch(bags, combiner, dim, max_norm, is_weighted, is_array, zeroed):
    rng = np.random.default_rng(len(bags))
    values, gradient = random(ROWS, dim), random(len(bags), dim, seed=1)
    weights = [rng.uniform(0.1, 2, len(bag)) for bag in bags] if is_weighted else None
    if zeroed and is_weighted:
        weights[0][:] = 0  # its divisor is 0, or its sum
    rows = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    tensors = weights and [torch.tensor(weight, requires_grad=True) for weight in weights]
    expected = pool(rows, bags, tensors, combiner, max_norm)
    (expected * torch.tensor(gradient, dtype=torch.float64)).sum().backward()
    source = ArrayRows(values, "t", max_norm) if is_array else table_of(values, max_norm=max_norm)

    lookup, pooled = look_up(source, bags, combiner, weights)
    [(keys, sums)] = sum_row_gradients([lookup], [gradient])

    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # of float32 sums of up to 300 products
    np.testing.assert_allclose(pooled, expected.detach(), **tolerance)
    assert keys.tolist() == sorted({key for bag in bags for key in bag})
    grad = np.zeros(rows.shape) if rows.grad is None else rows.grad.numpy()
    np.testing.assert_allclose(sums, grad[keys], **tolerance)
    if is_weighted:
        [of_weights] = weight_gradients([lookup], [gradient])
        begins = flat(bags)[1]
        for number, tensor in enumerate(tensors):
            found = of_weights[begins[number] : begins[number + 1]]
            if zeroed and number == 0 and combiner != "sum":
                assert (found == 0).all(), "a bag of zeros has no gradient"
            elif len(found):
                np.testing.assert_allclose(found, tensor.grad, rtol=1e-3, atol=1e-3)


def test_the_gradients_of_many_rows_are_in_the_order_of_the_rows():
    rng = np.random.default_rng(0)
    table, keys = TrainingTable("t", 2), rng.permutation(400_000)[:200_000]
    look_up_bags([table], [np.arange(400_000)], [None], ["sum"], [None], [1], [True])  # key k has row k
    for some in (keys[:300], keys):
        lookup, _ = look_up(table, [[key] for key in some])
        gradient = np.stack([some, -some], axis=1).astype(np.float32)

        [(found, sums)] = sum_row_gradients([lookup], [gradient])

        np.testing.assert_array_equal(found, np.sort(some))
        np.testing.assert_array_equal(sums, np.stack([found, -found], axis=1))


@settings(deadline=None, max_examples=12)
@given(bags=BAGS, combiner=COMBINERS)
def test_the_gradients_of_an_array_are_those_of_its_rows(bags, combiner):
    values, gradient = random(ROWS, 3), random(len(bags), 3, seed=1)
    lookup, _ = look_up(ArrayRows(values, "t"), bags, combiner)
    [(keys, sums)] = sum_row_gradients([lookup], [gradient])

    [of_array] = array_gradients([lookup], [gradient], divisor=4)

    expected = np.zeros((ROWS, 3), np.float32)
    expected[keys] = sums / 4
    np.testing.assert_allclose(of_array, expected, rtol=1e-5, atol=1e-6)  # the order of the sums differs


@settings(deadline=None)
@given(
    keys=st.lists(st.one_of(st.integers(-5, 5), st.integers(-(2**63) + 2, 2**63 - 3))),
    processes=st.integers(1, 4),
    distinct=st.booleans(),
    owner=st.integers(-1, 3),
)
def test_keys_are_grouped_by_the_process_that_owns_them(keys, processes, distinct, owner):
    owner = min(owner, processes - 1)
    kept = list(dict.fromkeys(keys)) if distinct else keys
    by_owner = [
        [key for key in kept if (key % processes if owner < 0 else owner) == process] for process in range(processes)
    ]

    grouped, counts, places, firsts = keys_by_owner(np.array(keys, dtype=np.int64), processes, owner, distinct)

    assert grouped.tolist() == [key for of_process in by_owner for key in of_process]
    assert counts.tolist() == [len(of_process) for of_process in by_owner]
    assert [grouped[place] for place in places] == keys
    assert [keys[first] for first in firsts] == grouped.tolist()
    if distinct:
        assert [keys.index(key) for key in grouped] == firsts.tolist()


@settings(deadline=None, max_examples=12)
@given(bags=st.lists(st.lists(st.integers(0, 2 * ROWS), max_size=5), max_size=7), combiner=COMBINERS)
def test_an_absent_key_counts_as_the_default_vector_and_gets_no_gradient(bags, combiner):
    values = np.concatenate([random(ROWS, 3), np.full((ROWS + 1, 3), 0.25, np.float32)])
    table = table_of(values[:ROWS], default_value=0.25)

    lookup, pooled = look_up(table, bags, combiner, trains=False)
    [(keys, _)] = sum_row_gradients([lookup], [random(len(bags), 3)])

    expected = pool(torch.tensor(values, dtype=torch.float64), bags, None, combiner)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    assert (keys < ROWS).all()


@pytest.mark.parametrize("update_type", ["Local", "Global", "LazyGlobal"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@settings(deadline=None, max_examples=12)
@given(steps=st.lists(BAGS, min_size=1, max_size=5), dim=st.sampled_from([1, 16, 17]))
def test_rows_move_as_the_rule_says(rule, update_type, steps, dim):
    values = random(ROWS, dim)
    table = table_of(values, rule)
    weights = torch.tensor(values, dtype=torch.float64)
    states = rule.new_states(weights)
    last_steps = torch.zeros(ROWS, dtype=torch.int64)

    for step, bags in enumerate(steps, 1):
        gradient = random(len(bags), dim, seed=step)
        lookup, _ = look_up(table, bags)
        update_tables([lookup], [gradient * 8], rule.name, update_type, 0.1, step, rule.parameters, scaler=8.0)
        sums = torch.zeros(ROWS, dim, dtype=torch.float64)
        for bag, of_bag in zip(bags, gradient, strict=True):
            for row in bag:
                sums[row] += torch.from_numpy(of_bag)
        rows = torch.tensor(sorted({row for bag in bags for row in bag}), dtype=torch.int64)
        update_rows(rule, update_type, Move(weights, states, sums[rows], 0.1, step), rows, last_steps)

    keys, vectors, floats, steps_of_rows, _ = table.read(table.changed_rows())
    assert keys.tolist() == list(range(ROWS))
    np.testing.assert_allclose(vectors, weights, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(floats, torch.cat([weights[:, :0], *states], dim=1), rtol=1e-3, atol=1e-4)
    assert steps_of_rows.tolist() == last_steps.tolist()
    assert table.step == len(steps)


def test_the_gradients_of_several_lookups_of_a_row_are_added_before_it_moves():
    table, other = table_of(np.zeros((3, 2), np.float32)), table_of(np.ones((3, 2), np.float32))
    lookups, gradients = [], []
    for source, bags in ((table, [[0, 1]]), (other, [[2]]), (table, [[1], [1]])):
        lookups.append(look_up(source, bags)[0])
        gradients.append(np.full((len(bags), 2), 1 + len(gradients), np.float32))

    update_tables(lookups, gradients, "sgd", "Local", 1.0, 1, (0, 0, 0))

    assert table.read(np.arange(3))[1][:, 0].tolist() == [-1, -7, 0]
    assert other.read(np.arange(3))[1][:, 0].tolist() == [1, 1, -1]


@settings(deadline=None)
@given(passes=st.lists(BAGS, min_size=1, max_size=4), combiner=COMBINERS, dim=DIMS, max_norm=NORMS)
def test_merged_gradients_move_the_rows_as_the_gradients_do(passes, combiner, dim, max_norm):
    one, other = (table_of(random(ROWS, dim), max_norm=max_norm) for _ in range(2))
    floats = [random(len(bags), dim, seed=number) for number, bags in enumerate(passes)]
    lookups = [[look_up(table, bags, combiner)[0] for bags in passes] for table in (one, other)]

    update_tables(lookups[0], floats, "sgd", "Local", 0.1, 1, (0, 0, 0))
    first = merge_gradients(lookups[1][:1], floats[:1])
    merged = [first] if len(passes) == 1 else [first, merge_gradients(lookups[1][1:], floats[1:])]
    lookup, sums = merge_gradients(*zip(*merged, strict=True))
    update_tables([lookup], [sums], "sgd", "Local", 0.1, 1, (0, 0, 0))

    assert len(sums) == len({row for bags in passes for bag in bags for row in bag})
    np.testing.assert_allclose(*(table.read(np.arange(ROWS))[1] for table in (one, other)), rtol=1e-4, atol=1e-4)


def test_a_row_that_was_replaced_since_its_lookup_does_not_move():
    table = TrainingTable("t", 1, max_rows=2, initializer=("constant", 5, 0))
    stale, _ = look_up(table, [[1], [2]])
    look_up(table, [[3]])  # replaces key 1

    update_tables([stale], [np.ones((2, 1), np.float32)], "sgd", "Local", 1.0, 1, (0, 0, 0))

    keys, vectors, *_ = table.read(table.changed_rows())
    assert dict(zip(keys.tolist(), vectors[:, 0].tolist(), strict=True)) == {2: 4, 3: 5}


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16"])
def test_narrow_rows_move_in_float32_and_are_rounded(row_dtype):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[row_dtype]
    values = torch.tensor(random(ROWS, 5)).to(dtype)
    table = table_of(values.float().numpy(), AdamRule(), row_dtype=row_dtype)
    weights, states = values.float(), [torch.zeros(ROWS, 5), torch.zeros(ROWS, 5)]

    for step in range(1, 4):
        gradient = random(ROWS, 5, seed=step)
        lookup, pooled = look_up(table, [[row] for row in range(ROWS)])
        np.testing.assert_array_equal(pooled, weights)
        update_tables([lookup], [gradient], "adam", "Local", 0.1, step, AdamRule().parameters)
        AdamRule().update(Move(weights, states, torch.from_numpy(gradient), 0.1, step))
        weights.copy_(weights.to(dtype))

    unit = 2.0 ** (-10 if row_dtype == "fp16" else -7)  # a number between two narrow numbers may go either way
    np.testing.assert_allclose(table.read(np.arange(ROWS))[1], weights, rtol=unit)


def test_the_bits_do_not_depend_on_the_number_of_threads(threads):
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, 5_000, 30_000), rng.integers(0, 50, 30_000)]
    row_ptrs, gradients = [np.arange(0, 30_001, 3)] * 2, [random(10_000, 8, seed=seed) for seed in (1, 2)]

    def step():
        tables = [TrainingTable("t", 8, rule="adam", initial_states=[0.0, 0.0]) for _ in keys]
        answers = look_up_bags(tables, keys, row_ptrs, ["mean", "sum"], [None] * 2, [1, 1], [True] * 2)
        lookups = [lookup for lookup, _ in answers]
        sums = sum_row_gradients(lookups, gradients)
        update_tables(lookups, gradients, "adam", "Global", 0.1, 1, AdamRule().parameters)
        rows = [part for table in tables for part in table.read(table.changed_rows())]
        return [*(pooled for _, pooled in answers), *(part for one in sums for part in one), *rows]

    threads(1)
    alone = step()
    threads(4)

    for one, other in zip(alone, step(), strict=True):
        np.testing.assert_array_equal(one, other)


ARRAY = ArrayRows(np.zeros((4, 2), np.float32), "weights")
KEYS, OFFSETS, NONE = np.array([0, 3]), np.array([0, 2]), np.zeros((1, 2), np.float32)


def call(**changed):
    arguments = {
        "tables": [ARRAY],
        "keys": [KEYS],
        "row_ptrs": [OFFSETS],
        "combiners": ["sum"],
        "weights": [None],
        "slots": [1],
        "trains": [True],
    }
    return look_up_bags(**(arguments | changed))


def mixed(function, *arguments):
    """Call a function with a lookup and a merged lookup of one table."""
    lookup, _ = look_up(TrainingTable("t", 2), [[1]])
    merged, sums = merge_gradients([lookup], [NONE])
    function([lookup, merged], [NONE, sums], *arguments)


def update(lookup=None, gradient=None, rule="sgd", update_type="Local", step=1):
    table = TrainingTable("t", 2)
    lookup = lookup or look_up(table, [[1]])[0]
    gradient = np.zeros((1, 2), np.float32) if gradient is None else gradient
    update_tables([lookup], [gradient], rule, update_type, 0.1, step, (0, 0, 0))


@pytest.mark.parametrize(
    ("error", "use", "message"),
    [
        (
            ValueError,
            lambda: call(keys=[]),
            "expected keys, row_ptrs, combiners, weights, slots and trains of the same",
        ),
        (TypeError, lambda: call(tables=[np.zeros((4, 2))]), "tables: expected a TrainingTable or ArrayRows, got"),
        (IndexError, lambda: call(keys=[KEYS + 1]), "table 'weights': expected keys from 0 to 3, got 4 at position 1"),
        (IndexError, lambda: call(keys=[KEYS - 1]), "got -1 at position 0"),
        (ValueError, lambda: call(row_ptrs=[OFFSETS[:1]]), "row_ptrs: the last offset must be"),
        (ValueError, lambda: call(combiners=["max"]), "combiner: expected 'sum', 'mean' or 'sqrtn', got 'max'"),
        (ValueError, lambda: call(weights=[np.ones(3, np.float32)]), "weights: expected float32[N] of shape [2]"),
        (TypeError, lambda: call(weights=[np.ones(2)]), "weights: expected float32[N], got float64[2]"),
        (ValueError, lambda: call(slots=[0]), "table 'weights': slots: expected 1 to 2147483647, got 0"),
        (ValueError, lambda: call(slots=[KEYS[:1]]), "slots: expected an int or int64[N] of shape [2], got int64[1]"),
        (TypeError, lambda: ArrayRows(np.zeros((4, 2)), "w"), "rows: expected float32[V, D], got float64[4, 2]"),
        (ValueError, lambda: ArrayRows(np.zeros((4, 2), np.float32), "w", -1.0), "max_norm: expected a number above 0"),
        (
            ValueError,
            lambda: sum_row_gradients([call()[0][0]], [np.zeros((2, 2), np.float32)]),
            "gradient: expected float32[R, D] of shape [1, 2], got float32[2, 2]",
        ),
        (ValueError, lambda: sum_row_gradients([call()[0][0]], []), "expected a gradient of each lookup"),
        (
            ValueError,
            lambda: weight_gradients([call()[0][0]], [np.zeros((1, 2), np.float32)]),
            "lookups: expected lookups with weights",
        ),
        (ValueError, lambda: merge_gradients([], []), "lookups: expected at least one lookup"),
        (TypeError, lambda: merge_gradients([call()[0][0]], [NONE]), "lookups: expected lookups of one TrainingTable"),
        (
            TypeError,
            lambda: merge_gradients([look_up(TrainingTable("t", 2), [[1]])[0] for _ in "ab"], [NONE] * 2),
            "lookups: expected lookups of one TrainingTable",
        ),
        (ValueError, lambda: merge_lookups([]), "lookups: expected at least one lookup"),
        (TypeError, lambda: merge_lookups([call()[0][0]]), "lookups: expected lookups of one TrainingTable"),
        (
            ValueError,
            lambda: merge_lookups([look_up(TrainingTable("t", 2), [[1]])[0]]),
            "lookups: expected lookups from merge_gradients",
        ),
        (ValueError, lambda: mixed(merge_gradients), "expected a table's lookups all from merge_gradients, or none"),
        (
            ValueError,
            lambda: mixed(update_tables, "sgd", "Local", 0.1, 1, (0, 0, 0)),
            "expected a table's lookups all from merge_gradients, or none",
        ),
        (TypeError, lambda: array_gradients([look_up(TrainingTable("t", 2), [[1]])[0]], [NONE]), "of ArrayRows"),
        (ValueError, lambda: keys_by_owner(KEYS, 0), "processes: expected 1 to"),
        (ValueError, lambda: keys_by_owner(KEYS, 2, 2), "owner: expected -1 to 1, got 2"),
        (TypeError, lambda: update(lookup=call()[0][0]), "lookups: expected lookups of TrainingTables"),
        (TypeError, lambda: update(gradient=np.zeros((1, 2))), "gradient: expected float32[R, D], got float64[1, 2]"),
        (ValueError, lambda: update(rule="adamw"), "rule: expected one of 'sgd'"),
        (ValueError, lambda: update(update_type="Lazy"), "update_type: expected one of 'Local'"),
        (ValueError, lambda: update(step=0), "step: expected 1 to 2147483647, got 0"),
        (
            ValueError,
            lambda: update(rule="adam"),
            "table 't': expected rows with the states of the rule 'adam', got those of 'sgd'",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(error, use, message):
    with pytest.raises(error, match=re.escape(message)):
        use()
