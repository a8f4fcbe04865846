"""``DynamicVariable``, against dense tables of PyTorch."""

import copy
import re

import numpy as np
import pytest
import torch

from kernels.errors import ReservedKeyError
from tests.training.publishing import following
from tests.training.sok.ids import sparse
from training import sok
from training.embedding import Normal, Uniform
from training.optimizers import SGD, Adam
from training.publishing import Publisher


def rows_of(variable):
    parts = [(keys, vectors.copy()) for keys, vectors in variable.own_rows()]
    return {key: vector.tolist() for keys, vectors in parts for key, vector in zip(keys.tolist(), vectors, strict=True)}


def test_new_ids_get_rows_with_the_initial_value():
    one = sok.DynamicVariable(dimension=3, initializer="13")
    assert one.size == (0, 3)

    vectors = sok.lookup_sparse(one, sparse([[0, 1], [2**40], [-5, 0]]), combiners="sum")

    assert vectors.tolist() == [[26] * 3, [13] * 3, [26] * 3]
    assert one.size == (4, 3)
    assert rows_of(one) == {key: [13, 13, 13] for key in (0, 1, 2**40, -5)}


@pytest.mark.parametrize(
    ("initializer", "value"), [("ones", 1), ("zeros", 0), ("13", 13), (0.5, 0.5), ("-1e-3", np.float32(-1e-3))]
)
def test_an_initializer_may_be_a_number(initializer, value):
    assert sok.lookup_sparse(sok.DynamicVariable(2, initializer), sparse([[7]])).tolist() == [[value, value]]


@pytest.mark.parametrize("initializer", [None, "random", "", Uniform(-0.05, 0.05)])
def test_random_weights_depend_on_the_id_and_the_seed(initializer):
    def draw(seed):
        torch.manual_seed(seed)
        sok.init()
        one, other = sok.DynamicVariable(8, initializer), sok.DynamicVariable(8, initializer)
        return sok.lookup_sparse([one, other], [sparse([[3], [4]]), sparse([[4], [3]])])

    one, other = draw(1)
    assert one.abs().max() <= 0.05
    assert len({*one.flatten().tolist(), *other.flatten().tolist()}) == 32
    assert torch.equal(one, draw(1)[0])
    assert not torch.equal(one, draw(2)[0])


def test_an_initializer_of_the_engine_is_taken():
    vectors = sok.lookup_sparse(sok.DynamicVariable(4, Normal(5.0, 0.1)), sparse([[key] for key in range(500)]))

    assert abs(vectors.mean() - 5) < 0.02
    assert abs(vectors.std() - 0.1) < 0.02


@pytest.mark.parametrize("is_frozen", [False, True])
def test_without_gradients_an_unknown_id_is_a_vector_of_zeros(is_frozen):
    one = sok.DynamicVariable(2, "13", trainable=not is_frozen)

    with torch.set_grad_enabled(is_frozen):
        assert sok.lookup_sparse(one, sparse([[7]])).tolist() == [[0, 0]]
    assert one.size == (0, 2)


def test_a_frozen_variable_gets_no_rows_next_to_a_trainable_one():
    frozen, other, one = (sok.DynamicVariable(2, "13", trainable=not_frozen) for not_frozen in (False, True, True))
    frozen.set_rows(np.array([7]), np.full((1, 2), 5, np.float32))
    weights = torch.tensor([2.0, 1.0], requires_grad=True)
    ids = [sparse([[7, 8]]), sparse([[8]]), sparse([[9]])]

    vectors = sok.lookup_sparse([frozen, other, one], ids, [weights, None, None], combiners=["sum"] * 3)
    sum(vector.sum() for vector in vectors).backward()
    SGD([other, one], lr=1.0).step()

    assert [vector.tolist() for vector in vectors] == [[[10, 10]], [[13, 13]], [[13, 13]]]
    assert [rows_of(each) for each in (frozen, other, one)] == [{7: [5, 5]}, {8: [12, 12]}, {9: [12, 12]}]
    assert weights.grad.tolist() == [10, 0]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_rows_learn_what_a_variable_learns(optimizer, combiner):
    rng = np.random.default_rng(0)
    table = np.full((50, 3), 0.5)
    ours, theirs = sok.DynamicVariable(3, "0.5"), sok.Variable(table)
    stepping = [optimizer([one], lr=0.1) for one in (ours, theirs)]

    for _ in range(6):
        bags = [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(20)]
        weights = torch.tensor(rng.uniform(0.1, 1, sum(map(len, bags))), dtype=torch.float32)
        for one, step in zip((ours, theirs), stepping, strict=True):
            step.zero_grad()
            vectors = sok.lookup_sparse([one], [sparse(bags)], [weights], combiners=[combiner])[0]
            (vectors - 1).square().sum().backward()
            step.step()

    for key, vector in rows_of(ours).items():
        np.testing.assert_allclose(vector, theirs[key].detach(), rtol=1e-4, atol=1e-5)


def test_weights_of_ids_have_a_gradient():
    weights = torch.tensor([0.5, 2.0], requires_grad=True)

    sok.lookup_sparse(sok.DynamicVariable(3, "2"), sparse([[4, 5]]), weights, combiners="sum").sum().backward()

    assert weights.grad.tolist() == [6, 6]


def test_a_variable_may_be_looked_up_twice_in_one_call():
    one = sok.DynamicVariable(1, "1")

    vectors = sok.lookup_sparse([one, one], [sparse([[3]]), sparse([[3, 4]])], combiners=["sum", "sum"])
    (vectors[0].sum() + 10 * vectors[1].sum()).backward()
    SGD([one], lr=1.0).step()

    assert rows_of(one) == {3: [-10], 4: [-9]}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_of_pytorch_is_refused(optimizer):
    one = sok.DynamicVariable(1, "1")
    sok.lookup_sparse(one, sparse([[3]])).sum().backward()
    step = optimizer([one], lr=1.0)

    with pytest.raises(RuntimeError, match=r"expected an optimizer of training\.optimizers"):
        step.step()
    assert rows_of(one) == {3: [1]}


def test_gradients_that_zero_grad_drops_are_forgotten():
    one = sok.DynamicVariable(1, "1")
    optimizer = SGD([one], lr=1.0)

    for ids in ([[3]], [[4]]):
        optimizer.zero_grad()
        sok.lookup_sparse(one, sparse(ids)).sum().backward()
    optimizer.step()

    assert rows_of(one) == {3: [1], 4: [0]}


def test_a_copy_has_the_rows_and_the_states():
    one = sok.DynamicVariable(2, "1", name="ids")
    sok.lookup_sparse(one, sparse([[3]])).sum().backward()
    Adam([one], lr=0.1).step()
    one.grad = None

    copied = copy.deepcopy(one)
    for each in (one, copied):
        sok.lookup_sparse(each, sparse([[3]])).sum().backward()
        Adam([each], lr=0.1).step()

    assert rows_of(copied) == rows_of(one)
    assert copied.name == "ids"
    assert copied.table.native is not one.table.native


def test_a_variable_shows_its_size_and_is_a_parameter_of_a_module():
    module = torch.nn.Module()
    module.ids = sok.DynamicVariable(2, name="ids")

    assert repr(module.ids) == "DynamicVariable(name='ids', size=[0, 2])"
    assert next(module.parameters()) is module.ids
    assert module.float().ids is module.ids


def test_a_reserved_id_is_refused():
    with pytest.raises(ReservedKeyError):
        sok.lookup_sparse(sok.DynamicVariable(2), sparse([[2**63 - 1]]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dimension": 0}, ValueError, "expected dimension of at least 1, got 0"),
        ({"dimension": "3"}, TypeError, "expected dimension as an int, got '3'"),
        ({"initializer": "normal"}, ValueError, "expected the initializer 'random', 'ones', 'zeros', a number"),
        ({"initializer": [1]}, ValueError, "a number or one of training.embedding, got [1]"),
        ({"initializer": "inf"}, ValueError, "a number or one of training.embedding, got 'inf'"),
        ({"var_type": "cpu"}, ValueError, "expected var_type as one of None, 'hbm', 'hybrid', got 'cpu'"),
        ({"key_type": torch.float32}, TypeError, "expected the key_type torch.int64 or torch.int32"),
        ({"dtype": torch.float64}, TypeError, "the dtype torch.float32, got torch.int64 and torch.float64"),
        ({"mode": "localized:4"}, ValueError, "with # below 1, the number of processes, got 'localized:4'"),
        ({"name": ""}, ValueError, "expected a name of letters, digits, '_', '.' and '-', got ''"),
    ],
)
def test_a_wrong_variable_is_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        sok.DynamicVariable(**{"dimension": 2, **arguments})


def test_a_publisher_sends_what_changed(tmp_path):
    tags, users = sok.DynamicVariable(2, name="tags"), sok.DynamicVariable(3, name="users")
    optimizer = SGD([tags, users], lr=1.0)
    variables = {"tags": tags, "users": users}
    with Publisher(str(tmp_path / "log"), "ctr", variables, tmp_path / "outbox") as publisher:
        counts = []
        for keys in ([1, 2, 3], [2, 4]):
            vectors = sok.lookup_sparse([tags, users], [sparse([keys]), sparse([keys])], combiners=["sum", "sum"])
            sum(vector.sum() for vector in vectors).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(publisher.publish())
        tags.set_rows(np.array([9]), np.ones((1, 2), np.float32))
        counts.append(publisher.publish())

    assert counts == [{"tags": 3, "users": 3}, {"tags": 2, "users": 2}, {"tags": 1, "users": 0}]
    tables = following.Follower().follow(tmp_path / "log").tables
    assert tables == {name: following.rows_of(variable.table) for name, variable in variables.items()}
