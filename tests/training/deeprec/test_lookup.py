"""Fused lookups in tensors, against the same steps as plain PyTorch operations."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.deeprec.oracle import join, look_up
from training.deeprec import (
    SparseTensor,
    fused_embedding_lookup_sparse,
    fused_embedding_lookup_sparse_v2,
    fused_safe_embedding_lookup_sparse,
)
from training.optimizers import Adam, Ftrl

ROWS, DIM = 7, 3
COMBINERS = st.sampled_from(["sum", "mean", "sqrtn"])
STRATEGIES = st.sampled_from(["div", "mod"])
NORMS = st.sampled_from([None, 1.5])
VALID = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=4), max_size=6)
SOME_INVALID = st.lists(st.lists(st.integers(-2, ROWS - 1), max_size=4), max_size=6)
#: float32 against float64, of sums of a few products
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def partitions(count, rows=ROWS, dtype=torch.float32):
    """A table's partitions: the first ones have one vector more."""
    table = torch.from_numpy(np.random.default_rng(0).standard_normal((rows, DIM))).to(dtype)
    return [part.clone().requires_grad_() for part in table.tensor_split(count)]


def sparse(bags, order=None):
    """Rows of ids, in any order."""
    rows = torch.tensor([row for row, bag in enumerate(bags) for _ in bag], dtype=torch.int64)
    columns = torch.tensor([column for bag in bags for column, _ in enumerate(bag)], dtype=torch.int64)
    ids = torch.tensor([one for bag in bags for one in bag], dtype=torch.int64)
    order = torch.arange(len(ids)) if order is None else order
    return SparseTensor(torch.stack([rows, columns], dim=1)[order], ids[order], [len(bags), 4])


def weights_of(ids, seed):
    """Weights whose sums are exact, so that a sum of 0 is 0 in float32 and in float64."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-2, 5, len(ids.values)) / 2)


def check(found, expected, given, plain):
    """Compare two results, and the gradients of the tensors that they come from."""
    torch.testing.assert_close(found.double(), expected, **CLOSE)
    gradient = torch.from_numpy(np.random.default_rng(2).standard_normal(found.shape))
    for tensors, result in ((given, found), (plain, expected)):
        result.backward(gradient.to(result.dtype))
        assert all(tensor.grad is not None for tensor in tensors)
    for one, other in zip(given, plain, strict=True):
        torch.testing.assert_close(one.grad.to_dense().double(), other.grad, **CLOSE)


@settings(deadline=None, max_examples=25)
@given(
    bags=SOME_INVALID,
    combiner=COMBINERS,
    count=st.integers(1, ROWS + 2),
    strategy=STRATEGIES,
    max_norm=NORMS,
    default_id=st.sampled_from([None, 0, 4]),
    is_weighted=st.booleans(),
    fill=st.booleans(),
    seed=st.integers(0, 99),
)
def test_numbers_and_gradients_are_those_of_plain_pytorch(
    bags, combiner, count, strategy, max_norm, default_id, is_weighted, fill, seed
):
    given, plain = partitions(count), partitions(count, dtype=torch.float64)
    ids = sparse(bags, torch.from_numpy(np.random.default_rng(seed).permutation(sum(map(len, bags)))))
    weights = plain_weights = None
    if is_weighted:
        plain_weights = weights_of(ids, seed).requires_grad_()
        weights = plain_weights.detach().float().requires_grad_()

    found = fused_embedding_lookup_sparse_v2(
        given,
        ids,
        weights,
        partition_strategy=strategy,
        combiner=combiner,
        max_norm=max_norm,
        default_id=default_id,
        prune=True,
        fill_empty_row=fill,
    )

    expected = look_up(
        join(plain, strategy),
        ids.indices[:, 0],
        ids.values,
        len(bags),
        combiner,
        plain_weights,
        max_norm,
        prune=True,
        default_id=(default_id or 0) if fill else None,
    )
    if is_weighted:
        given, plain = [*given, weights], [*plain, plain_weights]
    check(found, expected, given, plain)


@settings(deadline=None, max_examples=20)
@given(
    bags=VALID,
    combiner=COMBINERS,
    count=st.integers(1, 3),
    strategy=STRATEGIES,
    max_norm=NORMS,
    fill=st.booleans(),
    prune=st.booleans(),
)
def test_both_versions_give_the_same_bits(bags, combiner, count, strategy, max_norm, fill, prune):
    tables, ids = partitions(count), sparse(bags)
    options = {"partition_strategy": strategy, "combiner": combiner, "max_norm": max_norm, "fill_empty_row": fill}

    first = fused_embedding_lookup_sparse(tables, ids, prune_invalid_ids=prune, **options)
    second = fused_embedding_lookup_sparse_v2(tables, ids, prune=prune, **options)

    assert torch.equal(first, second)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_without_pruning_weights_of_any_sign_count(combiner):
    bags = [[0, 1], [2, 3, 4], [5, 6]]
    ids, weights = sparse(bags), torch.tensor([0.5, -2.0, 1.0, 1.0, 0.0, 1.0, -1.0], requires_grad=True)
    given, plain = partitions(2), partitions(2, dtype=torch.float64)
    plain_weights = weights.detach().double().requires_grad_()

    found = fused_embedding_lookup_sparse_v2(given, ids, weights, "mod", combiner=combiner)

    table = join(plain, "mod")
    expected = look_up(table, ids.indices[:, 0], ids.values, 3, combiner, plain_weights)
    check(found, expected, [*given, weights], [*plain, plain_weights])


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("default_id", [None, 0, 3])
def test_the_safe_lookup_fills_only_with_an_explicit_default(version, default_id):
    [table] = partitions(1)

    found = fused_safe_embedding_lookup_sparse(
        table, sparse([[], [1, -1], [-1]]), default_id=default_id, fusion_version=version
    )
    found.sum().backward()

    filled = torch.zeros(DIM) if default_id is None else table[default_id]
    assert torch.equal(found, torch.stack([filled, table[1], filled]))
    used = {1} if default_id is None else {1, default_id}
    assert set(table.grad._indices()[0].tolist()) == used


def test_the_fused_lookup_fills_with_id_0_if_no_default_is_given():
    [table] = partitions(1)

    found = fused_embedding_lookup_sparse(table, sparse([[2], []]))

    assert torch.equal(found, table[[2, 0]])


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_a_row_whose_weights_are_all_pruned_is_filled_with_weight_1(combiner):
    [table] = partitions(1)

    found = fused_embedding_lookup_sparse_v2(
        table, sparse([[2, 3]]), torch.tensor([0.0, -1.0]), combiner=combiner, default_id=5, prune=True
    )

    assert torch.equal(found, table[[5]])


def test_the_first_partitions_have_one_vector_more():
    table = torch.arange(10.0)[:, None] * torch.ones(2)
    ids = sparse([[number] for number in range(10)])
    for strategy, parts in (
        ("div", [table[:4], table[4:7], table[7:]]),
        ("mod", [table[::3], table[1::3], table[2::3]]),
    ):
        assert torch.equal(fused_embedding_lookup_sparse_v2(parts, ids, partition_strategy=strategy), table)


FORMS = {
    "lists": lambda ids: SparseTensor(ids.indices.tolist(), ids.values.tolist(), (3, 4)),
    "a tuple": lambda ids: tuple(ids),
    "int32": lambda ids: SparseTensor(ids.indices.int(), ids.values.int(), torch.Size([3, 4])),
    "a read-only array": lambda ids: ids._replace(values=np.frombuffer(ids.values.numpy().tobytes(), np.int64)),
    "NumPy": lambda ids: SparseTensor(ids.indices.numpy(), ids.values.numpy(), np.array([3, 4])),
    "a tensor of the shape": lambda ids: ids._replace(dense_shape=torch.tensor([3, 4])),
    "a COO tensor": lambda ids: torch.sparse_coo_tensor(ids.indices.t(), ids.values, (3, 4), check_invariants=True),
    "one column for all": lambda ids: ids._replace(indices=ids.indices * torch.tensor([1, 0])),
    "columns beyond the shape": lambda ids: ids._replace(indices=ids.indices + torch.tensor([0, 9])),
    "an equal column in a COO tensor": lambda ids: torch.sparse_coo_tensor(
        (ids.indices * torch.tensor([1, 0])).t(), ids.values, (3, 4), check_invariants=True
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_ids_gives_the_same_vectors(form):
    ids = sparse([[5, 5, 0], [], [6]])
    [table] = partitions(1)

    found = fused_embedding_lookup_sparse_v2(table, FORMS[form](ids))

    assert torch.equal(found, fused_embedding_lookup_sparse_v2(table, ids))


def test_weights_may_be_a_sparse_tensor_with_the_indices_of_the_ids():
    ids, weights = sparse([[5, 1], [6]], torch.tensor([2, 1, 0])), torch.tensor([0.5, 1.0, 2.0])
    [table] = partitions(1)

    found = fused_embedding_lookup_sparse_v2(table, ids, ids._replace(values=weights))

    assert torch.equal(found, fused_embedding_lookup_sparse_v2(table, ids, weights))


@pytest.mark.parametrize(
    ("bags", "rows"),
    [([], 0), ([[-1], [-2, -1]], 2), ([[], []], 2)],
    ids=["an empty batch", "only invalid ids", "only empty rows"],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_without_ids_gives_zeros_and_no_gradient(bags, rows, count):
    tables = partitions(count)
    weights = torch.ones(sum(map(len, bags)), requires_grad=True)

    found = fused_safe_embedding_lookup_sparse(tables, sparse(bags), weights)
    found.sum().backward()

    assert torch.equal(found, torch.zeros(rows, DIM))
    assert not any(table.grad.to_dense().any() for table in tables)
    assert not weights.grad.any()


def test_gradients_are_sparse_with_each_row_once_and_add_up():
    [table] = partitions(1)
    ids = sparse([[4, 4, 2], [2]])

    fused_embedding_lookup_sparse(table, ids, combiner="sum").sum().backward()
    assert table.grad.is_sparse
    assert sorted(table.grad._indices()[0].tolist()) == [2, 4]
    fused_embedding_lookup_sparse(table, ids, combiner="sum").sum().backward()

    assert table.grad.to_dense()[:, 0].tolist() == [0, 0, 4, 0, 4, 0, 0]


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_gradients_have_ascending_rows_and_are_marked_as_coalesced(strategy):
    tables = partitions(2)
    found = fused_embedding_lookup_sparse_v2(tables, sparse([[6, 1, 6], [5, 0, 1, 4]]), partition_strategy=strategy)

    for gradient in torch.autograd.grad(found.sum(), tables):
        assert gradient.is_coalesced()
        rows = gradient.indices()[0]
        assert (rows[1:] > rows[:-1]).all()


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda tensors: torch.optim.SGD(tensors, lr=0.1), id="torch.optim.SGD"),
        pytest.param(lambda tensors: torch.optim.SparseAdam(tensors, lr=0.1), id="torch.optim.SparseAdam"),
        pytest.param(lambda tensors: Adam(tensors, lr=0.1), id="Adam"),
        pytest.param(lambda tensors: Ftrl(tensors, lr=0.1, l1=0.1), id="Ftrl"),
    ],
)
def test_optimizers_move_partitions_as_with_plain_sparse_embeddings(optimizer):
    given, plain = partitions(2), partitions(2)
    steps = [optimizer(given), optimizer(plain)]
    target = torch.tensor([[1.0], [2.0]])

    for bags in ([[0, 5], [5]], [[6], [0, 0]], [[5, 6], [1]]):
        found = fused_embedding_lookup_sparse_v2(given, sparse(bags), partition_strategy="div", combiner="sum")
        firsts = [torch.tensor([one for one in bag if one < 4], dtype=torch.int64) for bag in bags]
        seconds = [torch.tensor([one - 4 for one in bag if one >= 4], dtype=torch.int64) for bag in bags]
        expected = torch.stack(
            [
                sum(
                    torch.nn.functional.embedding(ids, part, sparse=True).sum(dim=0)
                    for ids, part in zip(of_row, plain, strict=True)
                )
                for of_row in zip(firsts, seconds, strict=True)
            ]
        )
        for step, result in zip(steps, (found, expected), strict=True):
            step.zero_grad()
            (result - target).square().sum().backward()
            step.step()

    for one, other in zip(given, plain, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("use", ["no_grad", "inference_mode", "requires_grad"])
def test_without_gradients_the_result_has_none(use):
    [table] = partitions(1)
    ids, expected = sparse([[1], []]), table.detach()[[1, 0]]
    with {"no_grad": torch.no_grad(), "inference_mode": torch.inference_mode()}.get(use, torch.enable_grad()):
        table.requires_grad_(use != "requires_grad")
        found = fused_embedding_lookup_sparse(table, ids)

    assert not found.requires_grad
    assert torch.equal(found, expected)


def test_only_partitions_that_require_a_gradient_get_one():
    tables = partitions(2)
    tables[0].requires_grad_(False)

    fused_embedding_lookup_sparse_v2(tables, sparse([[0, 6]]), partition_strategy="div").sum().backward()

    assert tables[0].grad is None
    assert tables[1].grad is not None


def test_a_table_that_is_not_contiguous_is_read_right():
    table = torch.arange(12.0).reshape(3, 4).t()

    assert torch.equal(fused_embedding_lookup_sparse(table, sparse([[3], [1]])), table[[3, 1]])


def test_a_table_that_changed_before_the_backward_pass_is_noticed():
    [table] = partitions(1)
    found = fused_embedding_lookup_sparse(table, sparse([[1]]), max_norm=1.0)
    with torch.no_grad():
        table.mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


IDS = sparse([[1, 2], [3]])
INDICES, VALUES, SHAPE = IDS
TABLE, WEIGHTS = torch.ones(ROWS, DIM), torch.ones(3)


def call(params=TABLE, ids=IDS, weights=None, **options):
    return fused_embedding_lookup_sparse_v2(params, ids, weights, name="ads", **options)


@pytest.mark.parametrize(
    ("error", "use", "message"),
    [
        (ValueError, lambda: call(blocknums=4), "ads: expected no blocknums: it is for elastic dimensions"),
        (
            ValueError,
            lambda: fused_embedding_lookup_sparse(TABLE, IDS, blocknums=4),
            "fused_embedding_lookup_sparse: expected no blocknums",
        ),
        (
            ValueError,
            lambda: fused_safe_embedding_lookup_sparse(TABLE, IDS, blocknums=4),
            "fused_safe_embedding_lookup_sparse: expected no blocknums",
        ),
        (
            ValueError,
            lambda: fused_embedding_lookup_sparse(TABLE, IDS, WEIGHTS),
            "expected no sparse_weights: version v1 has no weights; use fused_embedding_lookup_sparse_v2",
        ),
        (
            ValueError,
            lambda: fused_safe_embedding_lookup_sparse(TABLE, IDS, WEIGHTS, fusion_version="v1"),
            "fused_safe_embedding_lookup_sparse: expected no sparse_weights: version v1",
        ),
        (
            ValueError,
            lambda: fused_safe_embedding_lookup_sparse(TABLE, IDS, fusion_version="v3"),
            "expected fusion_version as one of 'v1', 'v2', got 'v3'",
        ),
        (
            ValueError,
            lambda: call(combiner="max"),
            "ads: expected combiner as one of 'sum', 'mean', 'sqrtn', got 'max'",
        ),
        (
            ValueError,
            lambda: call(partition_strategy="mod_ev"),
            "ads: expected partition_strategy as one of None, 'div', 'mod', got 'mod_ev'",
        ),
        (
            ValueError,
            lambda: call([TABLE, TABLE]),
            "ads: expected the partition_strategy 'div' or 'mod' of 2 partitions, got None",
        ),
        (
            ValueError,
            lambda: call([TABLE[:2], TABLE[2:]], partition_strategy="mod"),
            "ads: expected partitions of [4, 3] rows, got [2, 5]",
        ),
        (ValueError, lambda: call([]), "ads: expected at least one vector, got none"),
        (ValueError, lambda: call(TABLE[:0]), "ads: expected at least one vector, got none"),
        (TypeError, lambda: call(TABLE.double()), "ads: expected vectors as float32 tensors, got float64[7, 3]"),
        (TypeError, lambda: call([[1.0, 2.0]]), "ads: expected vectors as float32 tensors, got list"),
        (TypeError, lambda: call(None), "ads: expected vectors as float32 tensors, got NoneType"),
        (
            TypeError,
            lambda: call(TABLE.to_sparse()),
            "ads: expected vectors as float32 tensors, got sparse float32[7, 3]",
        ),
        (
            ValueError,
            lambda: call([TABLE, TABLE[:, :2]], partition_strategy="div"),
            "ads: expected vectors [V, D] with one D of at least 1, got [7, 3], [7, 2]",
        ),
        (ValueError, lambda: call(TABLE[0]), "ads: expected vectors [V, D] with one D of at least 1, got [3]"),
        (ValueError, lambda: call(TABLE[:, :0]), "got [7, 0]"),
        (TypeError, lambda: call(max_norm="a"), "ads: expected max_norm as a number, got str"),
        (TypeError, lambda: call(max_norm=[1.0]), "ads: expected max_norm as a number, got list"),
        (
            TypeError,
            lambda: fused_embedding_lookup_sparse(TABLE, IDS, max_norm="a"),
            "fused_embedding_lookup_sparse: expected max_norm as a number, got str",
        ),
        (
            TypeError,
            lambda: fused_safe_embedding_lookup_sparse(TABLE, IDS, max_norm="a"),
            "fused_safe_embedding_lookup_sparse: expected max_norm as a number, got str",
        ),
        (ValueError, lambda: call(max_norm=0.0), "max_norm: expected a number above 0"),
        (IndexError, lambda: call(TABLE[:3]), "ads: expected ids from 0 to 2, got 3 in row 1"),
        (
            IndexError,
            lambda: call([TABLE[:2], TABLE[:1]], partition_strategy="mod"),
            "ads: expected ids from 0 to 2, got 3 in row 1",
        ),
        (IndexError, lambda: call(ids=sparse([[0, 1], [], [-1]])), "ads: expected ids from 0 to 6, got -1 in row 2"),
        (IndexError, lambda: call(ids=sparse([[2**63 - 1]])), "ads: expected ids from 0 to 6, got 9223372036854775807"),
        (IndexError, lambda: call(default_id=7), "ads: expected a default_id from 0 to 6, got 7"),
        (IndexError, lambda: call(default_id=-1), "ads: expected a default_id from 0 to 6, got -1"),
        (TypeError, lambda: call(default_id=1.0), "ads: expected default_id as an int, got 1.0"),
        (
            TypeError,
            lambda: call(ids=torch.ones(2, 3, dtype=torch.int64)),
            "ads: expected ids as a SparseTensor, (indices, values, dense_shape), a sparse COO tensor",
        ),
        (TypeError, lambda: call(ids=(INDICES, VALUES)), "ads: expected ids as a SparseTensor"),
        (
            TypeError,
            lambda: call(torch.nested.nested_tensor_from_jagged(torch.ones(2), torch.tensor([0, 2]))),
            "ads: expected vectors as float32 tensors, got nested float32",
        ),
        (
            TypeError,
            lambda: call(ids=(INDICES.float(), VALUES, SHAPE)),
            "expected indices of int64 or int32, got float",
        ),
        (
            TypeError,
            lambda: call(ids=(INDICES, VALUES.float(), SHAPE)),
            "expected ids of int64 or int32, got float32[3]",
        ),
        (TypeError, lambda: call(ids=(INDICES, VALUES > 0, SHAPE)), "expected ids of int64 or int32, got bool[3]"),
        (TypeError, lambda: call(ids=(INDICES, ["a"] * 3, SHAPE)), "ads: expected ids of int64 or int32, got list: "),
        (ValueError, lambda: call(ids=(INDICES[0], VALUES, SHAPE)), "expected indices with 2 dimensions, got int64[2]"),
        (ValueError, lambda: call(ids=(INDICES, INDICES, SHAPE)), "expected ids with 1 dimensions, got int64[3, 2]"),
        (
            ValueError,
            lambda: call(ids=(INDICES[:2], VALUES, SHAPE)),
            "expected indices [3, 2], one per id, got int64[2",
        ),
        (ValueError, lambda: call(ids=(INDICES, VALUES, [2])), "ads: expected dense_shape [rows, columns], got [2]"),
        (
            ValueError,
            lambda: call(ids=(INDICES, VALUES, [-2, 4])),
            "ads: expected dense_shape [rows, columns], got [-2",
        ),
        (TypeError, lambda: call(ids=(INDICES, VALUES, [2.5, 4])), "expected dense_shape [rows, columns] of integers"),
        (
            ValueError,
            lambda: call(ids=(INDICES, VALUES, [1, 4])),
            "ads: expected rows from 0 to 0, as dense_shape says, got row 1",
        ),
        (
            ValueError,
            lambda: call(ids=(INDICES - 1, VALUES, SHAPE)),
            "expected rows from 0 to 1, as dense_shape says, got",
        ),
        (ValueError, lambda: call(weights=WEIGHTS[:2]), "ads: expected a weight for each of 3 ids, got float32[2]"),
        (
            TypeError,
            lambda: call(weights=VALUES),
            "ads: expected sparse_weights as a SparseTensor or float[N], got int64",
        ),
        (
            TypeError,
            lambda: call(weights=[1.0]),
            "ads: expected sparse_weights as a SparseTensor or float[N], got list",
        ),
        (
            ValueError,
            lambda: call(weights=SparseTensor(INDICES + 1, WEIGHTS, SHAPE)),
            "ads: expected sparse_weights with the indices of the ids, got other indices",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(error, use, message):
    with pytest.raises(error, match=re.escape(message)):
        use()
