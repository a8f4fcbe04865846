"""Which optimizers may step which variables, and ``sok.optimizers.Adam``."""

import pytest
import torch

from tests.training.sok.ids import sparse
from training import sok
from training.embedding import Constant
from training.errors import SessionError
from training.optimizers import SGD


def layer():
    return sok.All2AllDenseEmbedding(8, 4, 1, 1, embedding_initializer=Constant(1.0))


def layer_with_a_gradient():
    one = layer()
    one(torch.tensor([[3]])).sum().backward()
    return one


def test_outside_of_a_scope_an_optimizer_may_not_step_the_variable_of_a_layer():
    one = layer_with_a_gradient()
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=1.0),
        torch.optim.SGD(one.parameters(), lr=1.0, foreach=True),
        torch.optim.SparseAdam(one.parameters()),
        SGD(one.parameters(), lr=1.0),
    ]

    for optimizer in optimizers:
        with pytest.raises(
            SessionError,
            match=r"^All2AllDenseEmbedding: the variable of a layer has no open scope; step it inside sok\.",
        ):
            optimizer.step()
    assert one.embedding_variable[0].tolist() == [1] * 4


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, SGD])
def test_inside_a_scope_it_may(optimizer):
    one = layer()
    step = optimizer(one.parameters(), lr=1.0)
    one(torch.tensor([[3], [5], [3]])).sum().backward()

    with sok.OptimizerScope(list(one.parameters())):
        step.step()

    assert one.embedding_variable[:2, 0].tolist() == [-1, 0]
    with pytest.raises(SessionError):
        step.step()


def test_an_error_closes_a_scope():
    one = layer_with_a_gradient()

    with pytest.raises(ZeroDivisionError), sok.OptimizerScope(one.parameters()), sok.OptimizerScope(one.parameters()):
        raise ZeroDivisionError

    with pytest.raises(SessionError):
        torch.optim.SGD(one.parameters(), lr=1.0).step()


def test_a_scope_is_for_its_own_variables():
    one, other = layer_with_a_gradient(), layer()

    with sok.OptimizerScope(other.parameters()), pytest.raises(SessionError):
        torch.optim.SGD(one.parameters(), lr=1.0).step()


def test_other_variables_need_no_scope():
    one = sok.Variable(torch.ones(2, 1))
    sok.lookup_sparse(one, sparse([[1]])).sum().backward()

    torch.optim.SGD([one, torch.nn.Parameter(torch.ones(1))], lr=1.0).step()

    assert one.tolist() == [[1], [0]]


def test_variables_are_split_from_other_parameters():
    one, dense = layer(), torch.nn.Linear(1, 1)
    mixed = [dense.weight, *one.parameters(), dense.bias, sok.Variable(torch.ones(2, 1)), sok.DynamicVariable(2)]

    embeddings, others = sok.split_embedding_variable_from_others(iter(mixed))

    assert [id(each) for each in embeddings] == [id(mixed[1]), id(mixed[3]), id(mixed[4])]
    assert [id(each) for each in others] == [id(mixed[0]), id(mixed[2])]


@pytest.mark.parametrize("call", [sok.OptimizerScope, sok.split_embedding_variable_from_others])
def test_one_variable_instead_of_a_list_is_refused(call):
    with pytest.raises(TypeError, match=f"{call.__name__}: expected a list of variables, got EmbeddingVariable"):
        call(layer().embedding_variable)


def test_adam_moves_rows_as_in_hugectrs_worked_example():
    # Learning rate 0.1, gradient ones; keys 0 and 1 are read four times, 2 and 6 twice.
    one = sok.DistributedEmbedding("sum", 8, 4, slot_num=3, max_nnz=2, embedding_initializer=Constant(1.0))
    adam = sok.optimizers.Adam(learning_rate=0.1, beta_1=0.9, beta_2=0.99, epsilon=1e-3)
    ids = sparse([[0], [1], [2, 6], [0], [1], [], [0], [1], [6], [0], [1], [2]])
    (gradient,) = torch.autograd.grad(one(ids).sum(), list(one.parameters()))

    adam.apply_gradients(zip([gradient], one.parameters(), strict=True), experimental_aggregate_gradients=False)

    moved = dict(zip(one.embedding_variable.keys.tolist(), 1 - one.embedding_variable[:, 0].detach(), strict=False))
    for key, expected in {0: 0.09975063, 1: 0.09975063, 2: 0.09950249, 6: 0.09950249}.items():
        assert moved[key].item() == pytest.approx(expected, abs=2e-7)  # float32 of numbers near 1


def test_adam_keeps_its_states_and_moves_only_rows_with_a_gradient():
    one, other = (sok.Variable(torch.ones(3, 1)) for _ in range(2))
    adam = sok.optimizers.Adam(learning_rate=0.1)

    adam.apply_gradients([(gradient([0], [1.0]), one), (None, other)])
    adam.apply_gradients([(gradient([0, 1], [1.0, 1.0]), one), (gradient([2], [1.0]), other)])

    # of a constant gradient, each step moves by the learning rate; row 1 has missed a step of the moments
    correction = (1 - 0.999**2) ** 0.5 / (1 - 0.9**2)
    missed = 0.1 * correction * 0.1 / 0.001**0.5
    assert one.flatten().tolist() == pytest.approx([0.8, 1 - missed, 1], abs=1e-5)
    assert other.flatten().tolist() == pytest.approx([1, 1, 0.9], abs=1e-5)


def gradient(rows, values):
    return torch.sparse_coo_tensor([rows], [[value] for value in values], (3, 1), check_invariants=True)


def test_adam_does_not_touch_gradients():
    one = sok.Variable(torch.ones(3, 1))
    one.grad = kept = gradient([1], [7.0])
    adam = sok.optimizers.Adam(learning_rate=0.1)

    adam.apply_gradients([(gradient([0], [1.0]), one)])

    assert one.grad is kept
    assert one.flatten().tolist() == pytest.approx([0.9, 1, 1])


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        (lambda: [torch.nn.Parameter(torch.ones(3, 1))], TypeError, "expected sok.Variable or .*, got Parameter"),
        (lambda: [sok.DynamicVariable(1)], TypeError, "expected sok.Variable or .*, got DynamicVariable"),
        (
            lambda: [sok.Variable(torch.ones(3, 1))] * 2,
            ValueError,
            "expected each variable once, got one of them twice",
        ),
    ],
)
def test_wrong_variables_of_adam_are_refused(variables, error, message):
    pairs = [(gradient([0], [1.0]), variable) for variable in variables()]

    with pytest.raises(error, match=f"apply_gradients: {message}"):
        sok.optimizers.Adam().apply_gradients(pairs)


@pytest.mark.parametrize("numbers", [{"learning_rate": -1}, {"beta_1": 1}, {"beta_2": -0.1}, {"epsilon": 0}])
def test_wrong_numbers_of_adam_are_refused(numbers):
    with pytest.raises(ValueError, match=r"must be (at least|above) "):
        sok.optimizers.Adam(**numbers)
