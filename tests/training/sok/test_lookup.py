"""``lookup_sparse`` in variables of one process, against plain PyTorch in float64 and ``torch.nn.EmbeddingBag``."""

import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.embedding.oracle import pool
from tests.training.sok.ids import sparse
from training import sok
from training.optimizers import Adam

COMBINERS = ("sum", "mean", "sqrtn")
NESTED = torch.nested.nested_tensor_from_jagged  # its first call takes a second
IDS = sok.SparseTensor([[0, 0], [0, 1], [1, 0]], [4, 2, 3], [3, 2])


def variable(rows=6, dim=2, **named):
    return sok.Variable(np.arange(rows * dim).reshape(rows, dim), **named)


def test_the_documents_example():
    v1 = sok.Variable(np.arange(17 * 3).reshape(17, 3), dtype=torch.float32)
    v2 = sok.Variable(np.arange(7 * 5).reshape(7, 5), dtype=torch.float32)
    indices1 = sok.SparseTensor(
        indices=[[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]], values=[1, 1, 3, 4, 5], dense_shape=[2, 3]
    )
    indices2 = sok.SparseTensor(indices=[[0, 0], [1, 0], [1, 1]], values=[1, 2, 3], dense_shape=[2, 2])

    embeddings = sok.lookup_sparse([v1, v2], [indices1, indices2], hotness=[3, 2], combiners=["sum", "sum"])
    loss = sum(embedding.sum() for embedding in embeddings)
    grads = torch.autograd.grad(loss, [v1, v2], retain_graph=True)
    loss.backward()
    torch.optim.SGD([v1, v2], lr=1.0).step()

    assert [embedding.tolist() for embedding in embeddings] == [
        [[6, 8, 10], [36, 39, 42]],
        [[5, 6, 7, 8, 9], [25, 27, 29, 31, 33]],
    ]
    assert loss == 321
    for found in (grads, (v1.grad, v2.grad)):
        assert [list(grad.values().shape) for grad in found] == [[4, 3], [3, 5]]
        assert [grad.indices().tolist() for grad in found] == [[[1, 3, 4, 5]], [[1, 2, 3]]]
        assert found[0].values()[:, 0].tolist() == [2, 1, 1, 1]
    assert v1[[1, 3, 4, 5]].tolist() == [[1, 2, 3], [8, 9, 10], [11, 12, 13], [14, 15, 16]]
    assert v2[:4, 0].tolist() == [0, 4, 9, 14]
    assert v1[6:].tolist() == np.arange(18, 51).reshape(11, 3).tolist()


BAGS = st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=6)


@settings(deadline=None, max_examples=20)
@given(
    lookups=st.lists(st.tuples(BAGS, st.sampled_from(COMBINERS), st.integers(1, 3)), min_size=1, max_size=4),
    mode=st.sampled_from(["distributed", "localized:0"]),
    is_weighted=st.booleans(),
    seed=st.integers(0, 9),
)
def test_vectors_and_gradients_are_those_of_plain_pytorch(lookups, mode, is_weighted, seed):
    rng = np.random.default_rng(seed)
    variables = [sok.Variable(rng.normal(size=(7, dim)), mode=mode) for _, _, dim in lookups]
    tables = [one.detach().double().requires_grad_() for one in variables]
    leaves = [
        torch.tensor(rng.uniform(0.1, 1, sum(map(len, bags))), dtype=torch.float32, requires_grad=True)
        for bags, *_ in lookups
    ]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]

    vectors = sok.lookup_sparse(
        variables,
        [sparse(bags) for bags, *_ in lookups],
        leaves if is_weighted else None,
        hotness=[4] * len(lookups),
        combiners=[combiner for _, combiner, _ in lookups],
    )
    expected = [
        pool(table, bags, weights.split([len(bag) for bag in bags]) if is_weighted else None, combiner)
        + 0 * (table.sum() + weights.sum())  # so that each has a gradient
        for table, (bags, combiner, _), weights in zip(tables, lookups, doubles, strict=True)
    ]
    for one in (vectors, expected):
        sum(((vector - 1) ** 2).sum() for vector in one).backward()

    for ours, theirs in zip(vectors, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs, (bags, *_) in zip(variables, tables, lookups, strict=True):
        assert ours.grad.is_coalesced()
        assert ours.grad.indices()[0].tolist() == sorted({key for bag in bags for key in bag})
        torch.testing.assert_close(ours.grad.to_dense().double(), theirs.grad, rtol=1e-4, atol=1e-5)
    if is_weighted:
        for ours, theirs in zip(leaves, doubles, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
        lambda params: torch.optim.SparseAdam(params, lr=0.1),
        lambda params: Adam(params, lr=0.1),
    ],
    ids=["SGD", "Adagrad", "SparseAdam", "training.optimizers.Adam"],
)
def test_variables_learn_what_embedding_bags_learn(optimizer, combiner):
    rng = np.random.default_rng(0)
    ours = [sok.Variable(rng.normal(size=(200, 4))) for _ in range(2)]
    theirs = [
        torch.nn.EmbeddingBag.from_pretrained(
            our.detach().clone(), freeze=False, mode=combiner, sparse=True, include_last_offset=True
        )
        for our in ours
    ]
    stepping = [optimizer(ours), optimizer([their.weight for their in theirs])]

    for _ in range(8):
        bags = [[rng.integers(0, 200, rng.integers(0, 4)).tolist() for _ in range(50)] for _ in ours]
        ids = [sparse(bag) for bag in bags]
        pooled = [
            sok.lookup_sparse(ours, ids, combiners=[combiner] * 2),
            [
                module(one.values, torch.tensor([0, *np.cumsum([len(bag) for bag in of])]))
                for module, one, of in zip(theirs, ids, bags, strict=True)
            ],
        ]
        for vectors, step in zip(pooled, stepping, strict=True):
            step.zero_grad()
            sum((vector - 1).square().sum() for vector in vectors).backward()
            with torch.sparse.check_sparse_tensor_invariants():
                step.step()

    for one, module in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), module.weight.detach(), rtol=1e-3, atol=1e-4)


def test_a_gradient_of_many_rows_is_sorted():
    keys = np.random.default_rng(0).permutation(200_000)  # more than 16 bits
    one = sok.Variable(np.zeros((200_000, 1)))
    rows = np.arange(200_000)

    vectors = sok.lookup_sparse(one, (np.stack([rows, rows], axis=1), keys, [200_000, 1]), combiners="sum")
    (vectors[:, 0] * torch.arange(200_000)).sum().backward()

    assert torch.equal(one.grad.indices()[0], torch.arange(200_000))
    assert torch.equal(one.grad.values()[torch.from_numpy(keys), 0].long(), torch.arange(200_000))


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(tuple(IDS), id="indices, values and dense_shape"),
        pytest.param(
            torch.sparse_coo_tensor([[0, 0, 1], [0, 1, 0]], [4, 2, 3], (3, 2), check_invariants=True), id="a COO tensor"
        ),
        pytest.param((torch.tensor(IDS.indices), torch.tensor(IDS.values).int(), (3, 2)), id="int32"),
        pytest.param((np.array(IDS.indices), np.array(IDS.values), torch.Size([3, 2])), id="arrays"),
        pytest.param(([[1, 0], [0, 0], [0, 1]], [3, 4, 2], [3, 2]), id="in another order"),
        pytest.param(
            lambda: NESTED(torch.tensor([9, 4, 2, 9, 3, 9]), torch.tensor([1, 4, 6, 6]), torch.tensor([2, 1, 0])),
            id="a jagged tensor with holes",
        ),
        pytest.param(lambda: NESTED(torch.tensor([4, 2, 3]), torch.tensor([0, 2, 3, 3])), id="a jagged tensor"),
        pytest.param(
            lambda: torch.nested.nested_tensor(
                [torch.tensor(ids).long() for ids in ([4, 2], [3], [])], layout=torch.jagged
            ),
            id="a nested tensor",
        ),
    ],
)
def test_ids_come_in_several_forms(ids):
    ids = ids() if callable(ids) else ids

    assert sok.lookup_sparse([variable()], [ids], combiners=["sum"])[0].tolist() == [[12, 14], [6, 7], [0, 0]]


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(torch.tensor([0.5, 2.0, 1.0]), id="one per id"),
        pytest.param(sok.SparseTensor(IDS.indices, torch.tensor([0.5, 2.0, 1.0]), IDS.dense_shape), id="SparseTensor"),
        pytest.param(
            torch.sparse_coo_tensor([[0, 0, 1], [0, 1, 0]], [0.5, 2.0, 1.0], (3, 2), check_invariants=True),
            id="a COO tensor",
        ),
        pytest.param(
            lambda: NESTED(torch.tensor([0.5, 2, 9, 1]), torch.tensor([0, 3, 4, 4]), torch.tensor([2, 1, 0])),
            id="a jagged tensor with holes",
        ),
    ],
)
def test_weights_come_in_several_forms(weights):
    weights = weights() if callable(weights) else weights

    assert sok.lookup_sparse([variable()], [IDS], [weights], combiners=["sum"])[0].tolist() == [
        [12, 14.5],
        [6, 7],
        [0, 0],
    ]


def test_one_variable_gives_one_tensor_and_the_default_combiner_is_mean():
    answer = sok.lookup_sparse(variable(), IDS)

    assert answer.tolist() == [[6, 7], [6, 7], [0, 0]]
    assert answer.tolist() == sok.lookup_sparse(variable(), [IDS], hotness=[2], combiners=["mean"]).tolist()


def test_a_variable_may_be_looked_up_twice_in_one_call():
    one = variable()
    other = sparse([[3, 0], [5]])

    vectors = sok.lookup_sparse([one, one], [IDS, other], combiners=["sum", "mean"])
    sum(vector.sum() for vector in vectors).backward()

    assert vectors[1].tolist() == [[3, 4], [10, 11]]
    assert one.grad.to_dense()[:, 0].tolist() == [0.5, 0, 1, 1.5, 1, 1]
    assert one.grad.is_coalesced()


def test_gradients_of_several_backward_passes_are_added_up():
    one = variable()

    for ids in (IDS, sparse([[3]])):
        sok.lookup_sparse(one, ids, combiners="sum").sum().backward()

    assert one.grad.is_coalesced()
    assert one.grad.indices().tolist() == [[2, 3, 4]]
    assert one.grad.values()[:, 0].tolist() == [1, 2, 1]


def test_a_gradient_of_another_lookup_is_not_marked_as_coalesced():
    one = variable()

    torch.nn.functional.embedding(torch.tensor([3, 3, 1]), one, sparse=True).sum().backward()

    assert not one.grad.is_coalesced()
    assert one.grad.coalesce().values()[:, 0].tolist() == [1, 2]


def test_an_empty_batch_has_an_empty_gradient():
    one = variable()

    vectors = sok.lookup_sparse(one, sparse([]), combiners="sum")
    (vectors.sum() + 1).backward()

    assert vectors.shape == (0, 2)
    assert one.grad.values().shape == (0, 2)
    torch.optim.SparseAdam([one]).step()
    assert torch.equal(one.detach(), variable().detach())


def test_without_gradients_nothing_is_kept():
    one = variable()

    with torch.no_grad():
        assert not sok.lookup_sparse(one, IDS).requires_grad
    one.requires_grad_(False)
    assert not sok.lookup_sparse(one, IDS).requires_grad


def test_weights_learn_with_a_frozen_variable():
    weights = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    one = variable().requires_grad_(False)

    sok.lookup_sparse(one, IDS, weights, combiners="sum").sum().backward()

    assert one.grad is None
    assert weights.grad.tolist() == [17, 9, 13]


def test_the_gradient_of_weights_needs_the_rows_that_were_read():
    one, weights = variable(), torch.ones(3, requires_grad=True)
    vectors = sok.lookup_sparse(one, IDS, weights, combiners="sum")
    with torch.no_grad():
        one.zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vectors.sum().backward()


@pytest.mark.parametrize(
    "table",
    [
        pytest.param([[0, 1], [2, 3]], id="lists"),
        pytest.param(torch.arange(4).reshape(2, 2), id="a tensor of integers"),
        pytest.param(np.arange(4, dtype=np.float64).reshape(2, 2), id="float64"),
        pytest.param(np.arange(4, dtype=np.float32).reshape(2, 2, order="F").T.reshape(2, 2), id="another order"),
    ],
)
def test_a_variable_is_made_of_any_table_of_numbers(table):
    one = sok.Variable(table)

    assert one.dtype == torch.float32
    assert one.global_shape == (2, 2)
    assert one.tolist() == np.asarray(table).tolist()


def test_a_variable_does_not_share_memory_with_its_table():
    table = np.ones((2, 2), np.float32)
    one = sok.Variable(table)

    table[:] = 7

    assert one.tolist() == [[1, 1], [1, 1]]


def test_a_variable_can_be_copied_and_is_part_of_the_state_of_a_module():
    module = torch.nn.Module()
    module.rows = variable(name="rows")

    copied = copy.deepcopy(module)
    sok.lookup_sparse(copied.rows, IDS).sum().backward()
    state = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    module.load_state_dict(state)

    assert isinstance(copied.rows, sok.Variable)
    assert (copied.rows.name, copied.rows.global_shape) == ("rows", (6, 2))
    assert copied.rows.grad.is_coalesced()
    assert module.rows.grad is None
    assert torch.equal(module.rows.detach(), copied.rows.detach() + 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sok.Variable(np.zeros(3)), ValueError, "expected a table [V, D] with V and D of at least 1, got [3]"),
        (
            lambda: sok.Variable(np.zeros((0, 3))),
            ValueError,
            "expected a table [V, D] with V and D of at least 1, got [0, 3]",
        ),
        (lambda: sok.Variable([[1, 2], [3]]), ValueError, "expected a table [V, D], got list: "),
        (
            lambda: sok.Variable(NESTED(torch.ones(2), torch.tensor([0, 2]))),
            TypeError,
            "expected a table [V, D], got nested",
        ),
        (lambda: sok.Variable([["a"]]), TypeError, "expected a table of numbers, got <U1"),
        (lambda: variable(dtype=torch.float16), TypeError, "expected the dtype torch.float32, got torch.float16"),
        (
            lambda: variable(mode="localized:1"),
            ValueError,
            "expected the mode 'distributed' or 'localized:#' with # below 1, the number of processes",
        ),
        (lambda: variable(mode="localized"), ValueError, "expected the mode 'distributed' or 'localized:#'"),
        (lambda: variable(mode=0), ValueError, "expected the mode 'distributed' or 'localized:#'"),
        (lambda: variable(name="a/b"), ValueError, "expected a name of letters, digits, '_', '.' and '-', got 'a/b'"),
    ],
)
def test_a_wrong_variable_is_refused(make, error, message):
    with pytest.raises(error, match=re.escape(f"Variable: {message}")):
        make()


def call(params=None, ids=None, **named):
    return sok.lookup_sparse([variable()] if params is None else params, [IDS] if ids is None else ids, **named)


@pytest.mark.parametrize(
    ("look_up", "error", "message"),
    [
        (lambda: call(ids=[sparse([[0], [6]])]), IndexError, "sp_ids[0]: expected ids from 0 to 5, got 6 in row 1"),
        (lambda: call(ids=[sparse([[-1]])]), IndexError, "sp_ids[0]: expected ids from 0 to 5, got -1 in row 0"),
        (lambda: call(ids=[([[3, 0]], [1], [3, 2])]), ValueError, "expected rows from 0 to 2, as dense_shape says"),
        (lambda: call(ids=[([[0, 0]], [1.5], [3, 2])]), TypeError, "expected ids of int64 or int32, got float32[1]"),
        (lambda: call(ids=[torch.zeros(3, 2)]), TypeError, "sp_ids[0]: expected ids as a SparseTensor"),
        (
            lambda: call(ids=[NESTED(torch.ones(2), torch.tensor([0, 2]))]),
            TypeError,
            "sp_ids[0]: expected ids of int64 or int32, got float32[2]",
        ),
        (
            lambda: call(ids=[NESTED(torch.ones(2, 2).long(), torch.tensor([0, 2]))]),
            ValueError,
            "sp_ids[0]: expected ids with 1 dimensions, got int64[2, 2]",
        ),
        (
            lambda: call(ids=[([[0, 0]], NESTED(torch.ones(2).long(), torch.tensor([0, 2])), [3, 2])]),
            ValueError,
            "sp_ids[0]: expected ids with 1 dimensions, got nested int64",
        ),
        (lambda: call(ids=[IDS, IDS]), ValueError, "expected sp_ids as a list of 1, one per variable, got 2"),
        (lambda: call(ids=torch.zeros(1)), ValueError, "expected sp_ids as a list of 1, one per variable, got Tensor"),
        (lambda: call(hotness=[1]), ValueError, "sp_ids[0]: expected at most hotness = 1 ids in a row, got 2 in row 0"),
        (lambda: call(hotness=[0]), ValueError, "expected hotness of at least 1, got 0"),
        (lambda: call(hotness=["3"]), TypeError, "expected hotness as an int, got '3'"),
        (lambda: call(hotness=3), ValueError, "expected hotness as a list of 1, one per variable, got int"),
        (
            lambda: call(combiners=["max"]),
            ValueError,
            "as one of None, 'sum', 'mean', 'sqrtn', got 'max'",
        ),
        (lambda: call(combiners="sum"), ValueError, "expected combiners as a list of 1, one per variable, got str"),
        (lambda: call(sp_weights=[3]), TypeError, "expected sparse_weights as a SparseTensor or float[N], got int"),
        (lambda: call(sp_weights=[torch.ones(2)]), ValueError, "expected a weight for each of 3 ids, got float32[2]"),
        (lambda: call([], []), ValueError, "expected at least one variable, got none"),
        (
            lambda: call([torch.zeros(2, 2)]),
            TypeError,
            "expected sok.Variable or sok.DynamicVariable, got Tensor",
        ),
        (
            lambda: call([variable(), sok.DynamicVariable(2)], [IDS, IDS]),
            ValueError,
            "expected variables of one kind, got distributed, dynamic",
        ),
        (
            lambda: call([variable(), variable(mode="localized:0")], [IDS, IDS]),
            ValueError,
            "expected variables of one kind, got distributed, localized",
        ),
        (
            lambda: call([sok.All2AllDenseEmbedding(8, 2, 1, 1).embedding_variable]),
            TypeError,
            "expected sok.Variable or sok.DynamicVariable, got EmbeddingVariable",
        ),
    ],
)
def test_a_wrong_lookup_is_refused(look_up, error, message):
    with pytest.raises(error, match=re.escape(f"lookup_sparse: {message}") + "|" + re.escape(message)):
        look_up()


def test_a_variable_that_was_converted_is_refused():
    module = torch.nn.Module()
    module.rows = variable(name="rows")

    module.double()

    with pytest.raises(
        ValueError, match=r"variable 'rows': expected rows in RAM, float32 .*, got float64\[6, 2\] on cpu"
    ):
        sok.lookup_sparse(module.rows, IDS)
