"""SOK's legacy layers, against plain PyTorch."""

import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError
from tests.training.embedding.oracle import pool
from tests.training.sok.ids import sparse
from training import sok
from training.embedding import Constant, Normal


def dense(vocabulary=64, **named):
    return sok.All2AllDenseEmbedding(vocabulary, 3, slot_num=2, nnz_per_slot=4, **named)


def bags(vocabulary=64, combiner="mean", **named):
    return sok.DistributedEmbedding(combiner, vocabulary, 3, slot_num=2, max_nnz=4, **named)


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_dense_layer_returns_the_vector_of_each_key(use_hashtable, dtype):
    layer = dense(use_hashtable=use_hashtable, key_dtype=dtype)
    keys = torch.tensor(np.random.default_rng(0).integers(0, 64, (5, 2, 4)), dtype=dtype)

    vectors = layer(keys)
    vectors.square().sum().backward()

    assert vectors.shape == (5, 2, 4, 3)
    variable = layer.embedding_variable
    order = variable.keys if use_hashtable else np.arange(64)
    assert set(keys.flatten().tolist()) <= set(order.tolist())
    rows = {key: row for row, key in enumerate(order.tolist())}
    places = torch.tensor([rows[key] for key in keys.flatten().tolist()])
    assert torch.equal(vectors.reshape(-1, 3), variable[places])
    table = variable.detach().double().requires_grad_()
    torch.nn.functional.embedding(places, table).square().sum().backward()
    torch.testing.assert_close(variable.grad.to_dense().double(), table.grad, rtol=1e-4, atol=1e-6)
    assert variable.grad.values().shape == (len(places.unique()), 3)


@settings(deadline=None, max_examples=25)
@given(
    samples=st.lists(st.tuples(*[st.lists(st.integers(-3, 40), max_size=4)] * 2), max_size=4),
    combiner=st.sampled_from(["sum", "mean", "Mean", "Sum"]),
)
def test_a_sparse_layer_combines_the_vectors_of_each_slot(samples, combiner):
    layer = bags(combiner=combiner)
    rows = [slot for sample in samples for slot in sample]

    vectors = layer(sparse(rows))
    (vectors - 1).square().sum().backward()

    variable = layer.embedding_variable
    row_of = {key: row for row, key in enumerate(variable.keys.tolist())}
    table = variable.detach().double().requires_grad_()
    expected = pool(table, [[row_of[key] for key in bag] for bag in rows], None, combiner.lower())
    ((expected - 1).square().sum() + 0 * table.sum()).backward()
    assert vectors.shape == (len(samples), 2, 3)
    torch.testing.assert_close(vectors.reshape(-1, 3).double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(variable.grad.to_dense().double(), table.grad, rtol=1e-4, atol=1e-6)


def test_first_weights_are_uniform_unless_an_initializer_is_given():
    keys = torch.arange(6400).reshape(-1, 2, 4)

    uniform = dense(6400)(keys)
    normal = dense(6400, embedding_initializer=Normal(3.0, 0.1))(keys)
    by_number = dense(6400, use_hashtable=False, embedding_initializer=Constant(2.0)).embedding_variable

    assert -0.05 <= uniform.min() < -0.049
    assert 0.049 < uniform.max() < 0.05
    assert abs(normal.mean() - 3) < 0.01
    assert by_number.unique().tolist() == [2]


@pytest.mark.parametrize("how", ["eval", "training=False", "no_grad"])
def test_evaluation_makes_no_rows(how):
    layer = bags()
    layer(sparse([[7], []]))
    layer.train(how != "eval")

    with torch.set_grad_enabled(how != "no_grad"):
        vectors = layer(sparse([[7, 99], [99]]), training=False if how == "training=False" else None)

    assert not vectors.requires_grad
    assert layer.embedding_variable.keys.tolist() == [7]
    assert torch.equal(vectors[0, 0], layer.embedding_variable[0] / 2)  # an unknown key counts as a vector of zeros
    assert vectors[0, 1].tolist() == [0, 0, 0]


def test_training_may_be_asked_for_in_a_call():
    layer = dense().eval()

    assert layer(torch.zeros(1, 8, dtype=torch.int64), training=True).requires_grad
    assert layer.embedding_variable.keys.tolist() == [0]


def test_more_distinct_keys_than_the_vocabulary_are_an_error():
    layer = dense(8)
    layer(torch.arange(8))

    layer(torch.arange(8))
    message = "expected at most max_vocabulary_size_per_gpu = 8 distinct keys in each process, got 10"
    with pytest.raises(ValueError, match=re.escape(f"All2AllDenseEmbedding: {message}")):
        layer(torch.arange(2, 10))
    assert layer.embedding_variable.keys.tolist() == list(range(8))


def test_an_input_may_have_any_shape_if_it_is_dynamic():
    layer = dense(dynamic_input=True)
    keys = torch.tensor([[[5], [6], [7]]])

    assert layer(keys).shape == (1, 3, 1, 3)
    assert layer(torch.tensor([], dtype=torch.int64)).shape == (0, 3)
    assert dense()(torch.zeros(0, 2, 4, dtype=torch.int64)).shape == (0, 2, 4, 3)


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_the_state_of_a_module_has_keys_and_rows(use_hashtable):
    one, other = (torch.nn.Sequential(bags(use_hashtable=use_hashtable)) for _ in range(2))
    ids = sparse([[9, 3], [60]])
    expected = one(ids)
    other(sparse([[1], [2]]))

    other.load_state_dict(one.state_dict())

    assert torch.equal(other.eval()(ids), expected)
    assert torch.equal(copy.deepcopy(one).eval()(ids), expected)
    assert copy.deepcopy(one)(sparse([[33], []])).shape == (1, 2, 3)  # a copy makes rows of its own
    assert one.eval()(sparse([[33], []])).abs().sum() == (0 if use_hashtable else one(sparse([[33], []])).abs().sum())


@pytest.mark.parametrize(
    ("use_hashtable", "change", "message"),
    [
        (True, {"embedding_variable": torch.ones(4, 3)}, "expected a state with rows float32[8, 3], got float32[4, 3]"),
        (True, {"embedding_variable": None}, "expected a state with rows float32[8, 3], got NoneType"),
        (True, {"_extra_state": None}, "expected a state with keys, because use_hashtable=True"),
        (False, {"_extra_state": torch.tensor([1])}, "expected a state without keys, because use_hashtable=False"),
        (True, {"_extra_state": torch.arange(9)}, "expected a state with int64 keys of at most 8 rows, got int64[9]"),
        (True, {"_extra_state": torch.ones(2)}, "with int64 keys of at most 8 rows, got float32[2]"),
        (True, {"_extra_state": torch.ones(1, 1).long()}, "with int64 keys of at most 8 rows, got int64[1, 1]"),
        (True, {"_extra_state": [1]}, "with int64 keys of at most 8 rows, got list"),
        (True, {"_extra_state": torch.tensor([5, 5])}, "expected a state with distinct keys of this process"),
        (True, {"_extra_state": torch.tensor([2**63 - 1])}, "reserved"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_another_layer_is_refused_and_changes_nothing(use_hashtable, change, message, strict):
    module = torch.nn.Sequential(dense(8, use_hashtable=use_hashtable))
    module(torch.tensor([3, 5] * 4))
    before = {name: copy.deepcopy(value) for name, value in module.state_dict().items()}
    state = {"0.embedding_variable": torch.ones(8, 3), "0._extra_state": before["0._extra_state"]}
    state |= {f"0.{name}": value for name, value in change.items()}

    with pytest.raises(ValueError, match=re.escape(message)):
        module.load_state_dict(state, strict)

    after = module.state_dict()
    assert torch.equal(after["0.embedding_variable"], before["0.embedding_variable"])
    assert module[0].embedding_variable.keys is None or module[0].embedding_variable.keys.tolist() == [3, 5]


@pytest.mark.parametrize("missing", ["embedding_variable", "_extra_state"])
def test_a_state_without_keys_or_without_rows_is_refused(missing):
    layer = dense(8)
    state = layer.state_dict()
    del state[missing]

    with pytest.raises(ValueError, match="All2AllDenseEmbedding: load_state_dict: expected a state with "):
        layer.load_state_dict(state, strict=False)


def test_a_state_may_have_nothing_of_a_layer():
    module = torch.nn.Sequential(dense(8), torch.nn.Linear(1, 1))
    state = module[1].state_dict(prefix="1.")

    assert module.load_state_dict(state, strict=False).missing_keys == ["0.embedding_variable", "0._extra_state"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        module.load_state_dict(state)


def test_a_state_is_not_assigned():
    with pytest.raises(ValueError, match="expected assign=False, because a layer keeps its variable"):
        dense(8).load_state_dict(dense(8).state_dict(), assign=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dense(0), ValueError, "expected max_vocabulary_size_per_gpu of at least 1, got 0"),
        (lambda: dense(1.5), TypeError, "expected max_vocabulary_size_per_gpu as an int, got 1.5"),
        (lambda: sok.All2AllDenseEmbedding(8, 0, 1, 1), ValueError, "expected embedding_vec_size of at least 1"),
        (lambda: sok.All2AllDenseEmbedding(8, 2, 0, 1), ValueError, "expected slot_num of at least 1, got 0"),
        (lambda: sok.All2AllDenseEmbedding(8, 2, 1, 0), ValueError, "expected nnz_per_slot of at least 1"),
        (lambda: dense(key_dtype=torch.float32), TypeError, "expected the key_dtype torch.int64 or torch.int32, got"),
        (
            lambda: dense(embedding_initializer="ones"),
            TypeError,
            "expected embedding_initializer of training.embedding",
        ),
        (lambda: dense(name="a/b"), ValueError, "expected a name of letters, digits, '_', '.' and '-', got 'a/b'"),
        (lambda: bags(combiner="sqrtn"), ValueError, "expected the combiner 'sum' or 'mean', got 'sqrtn'"),
        (lambda: bags(combiner=1), ValueError, "expected the combiner 'sum' or 'mean', got 1"),
        (lambda: sok.DistributedEmbedding("sum", 8, 2, 1, 0), ValueError, "expected max_nnz of at least 1"),
        (lambda: bags(max_feature_num=0), ValueError, "expected max_feature_num of at least 1, got 0"),
    ],
)
def test_a_wrong_layer_is_refused(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("look_up", "error", "message"),
    [
        (lambda: dense()(torch.zeros(3, 2, 4)), TypeError, "expected inputs as keys of int64 or int32, got float32[3"),
        (lambda: dense()([1] * 8), TypeError, "expected inputs as keys of int64 or int32, got list"),
        (
            lambda: dense()(torch.zeros(9, dtype=torch.int64)),
            ValueError,
            "expected 2 slots of 4 keys for each sample, got int64[9]",
        ),
        (
            lambda: dense(8, use_hashtable=False)(torch.full((8,), 8)),
            IndexError,
            "inputs: expected ids from 0 to 7, got 8",
        ),
        (lambda: dense(8, use_hashtable=False)(torch.full((8,), -1)), IndexError, "expected ids from 0 to 7, got -1"),
        (lambda: bags()(torch.zeros(2, 3)), TypeError, "inputs: expected ids as a SparseTensor"),
        (lambda: bags()(sparse([[1]])), ValueError, "inputs: expected 2 rows for each sample, got 1"),
        (
            lambda: bags()(sparse([[1] * 5, []])),
            ValueError,
            "expected at most max_nnz = 4 ids in a row, got 5 in row 0",
        ),
        (
            lambda: bags(max_feature_num=3)(sparse([[1], [2], [3, 4], [5, 6]])),
            ValueError,
            "expected at most max_feature_num = 3 keys in a sample, got 4 in sample 1",
        ),
        (
            lambda: bags(8, use_hashtable=False)(sparse([[1], [8]])),
            IndexError,
            "expected ids from 0 to 7, got 8 in row 1",
        ),
        (lambda: bags()(sparse([[2**63 - 1], []])), ReservedKeyError, "reserved"),
    ],
)
def test_wrong_keys_are_refused(look_up, error, message):
    with pytest.raises(error, match=re.escape(message)):
        look_up()
