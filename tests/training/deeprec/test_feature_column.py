"""DeepRec's feature columns, with the numbers of DeepRec's document."""

import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import training.embedding.lookups
from kernels.errors import ReservedKeyError
from tests.training.deeprec.oracle import look_up
from training.deeprec import (
    FtrlOptimizer,
    SparseTensor,
    categorical_column_with_embedding,
    embedding_column,
    input_from_feature_columns,
    input_layer,
    ones_initializer,
    sparse_column_with_embedding,
)
from training.embedding import Constant, Uniform
from training.optimizers import SGD, Adam

BAGS = st.lists(st.lists(st.integers(-2, 8), max_size=4), min_size=1, max_size=5)


def ids_of(bags):
    rows = [row for row, bag in enumerate(bags) for _ in bag]
    indices = torch.tensor([[row, 0] for row in rows], dtype=torch.int64).reshape(-1, 2)
    return SparseTensor(indices, torch.tensor([one for bag in bags for one in bag], dtype=torch.int64), [len(bags), 4])


def column_of(key, dimension=2, **options):
    return embedding_column(categorical_column_with_embedding(key), dimension, **options)


def vectors_of(column):
    return dict(zip(*(part.tolist() for part in column.table.rows()), strict=True))


@pytest.mark.parametrize("do_fusion", [None, "v1", "v2"])
@pytest.mark.parametrize("interface", ["tf.feature_column", "tf.contrib.layers"])
def test_the_documents_example_has_its_losses(interface, do_fusion):
    if interface == "tf.feature_column":
        column = categorical_column_with_embedding("col_emb", dtype=torch.int64)
        W = embedding_column(  # noqa: N806  the document's name
            categorical_column=column, dimension=3, initializer=ones_initializer(torch.float32), do_fusion=do_fusion
        )
    else:
        columns = sparse_column_with_embedding(column_name="col_emb", dtype=torch.int64)
        W = embedding_column(  # noqa: N806
            sparse_id_column=columns, dimension=3, initializer=ones_initializer(torch.float32), do_fusion=do_fusion
        )
    assert W.do_fusion == do_fusion
    ids = {}
    ids["col_emb"] = SparseTensor(
        indices=[[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]], values=torch.tensor([1, 2, 3, 4, 5]), dense_shape=[5, 4]
    )
    opt = FtrlOptimizer(W.parameters(), 0.1, l1_regularization_strength=2.0, l2_regularization_strength=0.00001)

    losses = []
    for _ in range(4):
        if interface == "tf.feature_column":
            emb = input_layer(ids, [W])
        else:
            emb = input_from_feature_columns(columns_to_tensors=ids, feature_columns=[W])
        loss = (emb * 2.0).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    # TensorFlow's formula in float64
    np.testing.assert_allclose(losses, [30, 19.3883904, 17.2802067, 15.5553291], rtol=3e-7)


def test_ftrl_moves_weights_as_tensorflow_does():
    rng = np.random.default_rng(0)
    weights = torch.tensor(rng.standard_normal(50), requires_grad=True)
    rate, start, l1, l2 = 0.3, 0.2, 0.5, 0.7
    optimizer = FtrlOptimizer(
        [weights],
        rate,
        initial_accumulator_value=start,
        l1_regularization_strength=l1,
        l2_regularization_strength=l2,
    )
    expected, n, z = weights.detach().numpy().copy(), np.full(50, start), np.zeros(50)

    for _ in range(5):
        gradient = rng.standard_normal(50)
        weights.grad = torch.tensor(gradient)
        optimizer.step()
        # TensorFlow's ApplyFtrl with learning_rate_power -0.5
        new_n = n + gradient**2
        z += gradient - (np.sqrt(new_n) - np.sqrt(n)) / rate * expected
        n = new_n
        expected = np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / (np.sqrt(n) / rate + 2 * l2), 0)

    np.testing.assert_allclose(weights.detach(), expected, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    bags=BAGS,
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    max_norm=st.sampled_from([None, 0.8]),
)
def test_vectors_and_updates_are_those_of_plain_pytorch(bags, combiner, max_norm):
    names = ["b", "a", "c"]
    columns = [column_of(name, 2 + place, combiner=combiner, max_norm=max_norm) for place, name in enumerate(names)]
    features = {name: ids_of(bags[place:] + bags[:place]) for place, name in enumerate(names)}
    optimizer = SGD([column.parameter for column in columns], lr=1.0)

    found = input_layer(features, columns)

    known = {column.key: vectors_of(column) for column in columns}
    tables, expected = {}, []
    for column in sorted(columns, key=lambda column: column.name):
        ids = features[column.key]
        of_ids = known[column.key]
        assert set(of_ids) == {one for one in ids.values.tolist() if one >= 0}
        table = torch.zeros(9, column.table.config.dim, dtype=torch.float64)
        for one, vector in of_ids.items():
            table[one] = torch.tensor(vector)
        tables[column.key] = table.requires_grad_()
        args = (table, ids.indices[:, 0], ids.values, len(bags), combiner)
        expected.append(look_up(*args, max_norm=max_norm, prune=True))
    expected = torch.cat(expected, dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)  # float32 of a few products

    factors = torch.arange(found.shape[1]) - 3.0
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    optimizer.step()
    for column in columns:
        moved = (tables[column.key] - tables[column.key].grad).detach()
        for one, vector in vectors_of(column).items():
            np.testing.assert_allclose(vector, moved[one], rtol=1e-3, atol=1e-4)


def test_one_native_call_looks_up_all_columns(monkeypatch):
    calls = []

    def look_up_bags(tables, *arguments):
        calls.append(len(tables))
        return original(tables, *arguments)

    original = training.embedding.lookups.look_up_bags
    monkeypatch.setattr(training.embedding.lookups, "look_up_bags", look_up_bags)
    names = [f"C{number}" for number in range(26)]

    pooled = input_layer(dict.fromkeys(names, ids_of([[1], [2, 3]])), [column_of(name, 16) for name in names])

    assert calls == [26]
    assert pooled.shape == (2, 26 * 16)


def test_vectors_are_joined_in_the_order_of_the_columns_names():
    columns = [column_of(name, 1, initializer=Constant(value)) for name, value in (("b", 2), ("c", 3), ("a", 1))]

    pooled = input_layer(dict.fromkeys("abc", ids_of([[7]])), columns)

    assert pooled.tolist() == [[1, 2, 3]]


def test_first_weights_depend_on_the_id_the_name_and_pytorchs_seed():
    def first(name, seed):
        torch.manual_seed(seed)
        return input_layer({name: ids_of([[1], [2]])}, [column_of(name, 8)])

    one = first("a", 1)

    assert torch.equal(one, first("a", 1))
    assert not torch.equal(one, first("a", 2))
    assert not torch.equal(one, first("b", 1))
    assert not torch.equal(one[0], one[1])


def test_the_default_initializer_has_the_spread_of_tensorflows():
    pooled = input_layer({"a": ids_of([[number] for number in range(4000)])}, [column_of("a", 16)])

    assert pooled.mean().abs() < 0.01
    assert 0.24 < pooled.std() < 0.26


@pytest.mark.parametrize("use", ["eval", "no_grad"])
def test_evaluation_makes_no_rows_and_unknown_ids_are_zeros(use):
    column = column_of("a", combiner="mean")
    input_layer({"a": ids_of([[1]])}, [column])
    known = vectors_of(column)
    column.train(use != "eval")

    with torch.set_grad_enabled(use == "eval"):
        pooled = input_layer({"a": ids_of([[8], [1, 8], [], [-1]])}, [column])

    assert pooled.requires_grad == (use == "eval")
    assert vectors_of(column) == known
    np.testing.assert_allclose(pooled.detach(), [[0, 0], np.array(known[1]) / 2, [0, 0], [0, 0]], rtol=1e-6)


def test_gradients_that_zero_grad_has_dropped_move_nothing():
    column = column_of("a", 1, initializer=Constant(5.0))
    optimizer = SGD(column.parameters(), lr=1.0)

    def backward(key):
        optimizer.zero_grad()
        input_layer({"a": ids_of([[key]])}, [column]).sum().backward()

    backward(1)
    optimizer.step()
    backward(1)
    backward(2)
    optimizer.step()

    assert vectors_of(column) == {1: [4.0], 2: [4.0]}


def test_an_optimizer_that_cannot_move_the_rows_of_a_column_is_refused():
    column = column_of("a")
    optimizer = torch.optim.SGD(column.parameters(), lr=1.0)
    vectors = input_layer({"a": ids_of([[1]])}, [column])
    optimizer.zero_grad()
    vectors.sum().backward()

    with pytest.raises(RuntimeError, match=r"table 'a_embedding': .* expected an optimizer of training\.optimizers"):
        optimizer.step()


def test_training_resumes_from_a_saved_state(tmp_path):
    def train(column, optimizer, seed):
        rng = np.random.default_rng(seed)
        for _ in range(4):
            bags = [rng.integers(0, 20, 3).tolist() for _ in range(5)]
            optimizer.zero_grad()
            (input_layer({"a": ids_of(bags)}, [column]) - 1).square().sum().backward()
            optimizer.step()

    def make():
        column = column_of("a", initializer=Uniform(-1, 1))
        return column, Adam(column.parameters(), lr=0.1)

    column, optimizer = make()
    train(column, optimizer, 0)
    torch.save((column.state_dict(), optimizer.state_dict()), tmp_path / "saved")
    copied = copy.deepcopy(column)
    train(column, optimizer, 1)

    resumed, again = make()
    rows, state = torch.load(tmp_path / "saved", weights_only=True)
    resumed.load_state_dict(rows)
    again.load_state_dict(state)
    assert vectors_of(resumed) == vectors_of(copied)
    train(resumed, again, 1)

    assert vectors_of(resumed) == vectors_of(column)


CATEGORICAL = categorical_column_with_embedding("a")
COLUMN = embedding_column(CATEGORICAL, 2)
IDS = ids_of([[1], [2]])


@pytest.mark.parametrize(
    ("error", "use", "message"),
    [
        (
            ValueError,
            lambda: categorical_column_with_embedding("a", dtype="string"),
            "feature 'a': expected the dtype torch.int64 or torch.int32, got 'string'",
        ),
        (ValueError, lambda: ones_initializer(torch.float64), "expected the dtype torch.float32, got torch.float64"),
        (TypeError, lambda: embedding_column(dimension=2), "expected either categorical_column or sparse_id_column"),
        (TypeError, lambda: embedding_column(CATEGORICAL, 2, sparse_id_column=CATEGORICAL), "expected either"),
        (TypeError, lambda: embedding_column("a", 2), "expected either categorical_column or sparse_id_column"),
        (TypeError, lambda: embedding_column(CATEGORICAL), "expected dimension as an int, got None"),
        (
            ValueError,
            lambda: embedding_column(CATEGORICAL, 0),
            "feature 'a': expected dimension of at least 1, got 0",
        ),
        (TypeError, lambda: embedding_column(CATEGORICAL, "2"), "expected dimension as an int, got '2'"),
        (
            TypeError,
            lambda: embedding_column(CATEGORICAL, 2, initializer=torch.nn.init.ones_),
            "feature 'a': expected an initializer of training.embedding, got function",
        ),
        (
            ValueError,
            lambda: embedding_column(CATEGORICAL, 2, combiner="max"),
            "feature 'a': expected combiner as one of 'sum', 'mean', 'sqrtn', got 'max'",
        ),
        (
            ValueError,
            lambda: embedding_column(CATEGORICAL, 2, do_fusion="v3"),
            "feature 'a': expected do_fusion as one of None, 'v1', 'v2', got 'v3'",
        ),
        (
            TypeError,
            lambda: embedding_column(CATEGORICAL, 2, max_norm="a"),
            "feature 'a': expected max_norm as a number, got str",
        ),
        (ValueError, lambda: embedding_column(CATEGORICAL, 2, max_norm=0.0), "max_norm: expected a number above 0"),
        (ValueError, lambda: input_layer({}, []), "feature_columns: expected at least one column, got none"),
        (
            TypeError,
            lambda: input_layer({"a": IDS}, [CATEGORICAL]),
            "feature_columns: expected columns of embedding_column, got CategoricalColumn",
        ),
        (KeyError, lambda: input_layer({"b": IDS}, [COLUMN]), "no ids for the feature 'a'; got ids for b"),
        (KeyError, lambda: input_layer({}, [COLUMN]), "no ids for the feature 'a'; got ids for none"),
        (
            ValueError,
            lambda: input_layer({"a": IDS}, [COLUMN, column_of("a")]),
            "feature_columns: expected columns of different names, got two called 'a_embedding'",
        ),
        (
            ValueError,
            lambda: input_layer({"a": IDS, "b": IDS}, [COLUMN, column_of("b").eval()]),
            "expected columns in the same mode, got a_embedding in training mode, b_embedding in eval mode",
        ),
        (
            ValueError,
            lambda: input_layer({"a": IDS, "b": ids_of([[1]])}, [COLUMN, column_of("b")]),
            "features: expected the same number of rows in each, got {'a': 2, 'b': 1}",
        ),
        (TypeError, lambda: input_layer({"a": IDS.values}, [COLUMN]), "feature 'a': expected ids as a SparseTensor"),
        (ReservedKeyError, lambda: input_layer({"a": ids_of([[2**63 - 1]])}, [COLUMN]), "reserved"),
        (ValueError, lambda: FtrlOptimizer(COLUMN.parameters(), -1.0), "lr must be at least 0, got -1.0"),
        (
            ValueError,
            lambda: FtrlOptimizer(COLUMN.parameters(), 0.1, l2_regularization_strength=-1.0),
            "l2_regularization_strength must be at least 0, got -1.0",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(error, use, message):
    with pytest.raises(error, match=re.escape(message)):
        use()
