"""The optimizers on real modules of PyTorch, against the rules and against ``torch.optim``."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from training import EmbeddingBagCollection, EmbeddingBagConfig, optimizers
from training.embedding import Constant
from training.optimizers import SGD, AdaGrad, Adam, Ftrl, MomentumSGD, Nesterov, RowWiseAdaGrad

EVERY = [SGD, MomentumSGD, Nesterov, Adam, AdaGrad, RowWiseAdaGrad, Ftrl]
UPDATE_TYPES = ["Local", "Global", "LazyGlobal"]


def module(sparse=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse), nn.Linear(4, 1))


def train(net, optimizer, steps=10, seed=1):
    """Return the losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        keys = torch.randint(0, 10, (8, 3), generator=generator)  # rows from 10 on are never read
        loss = (net(keys) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("update_type", UPDATE_TYPES)
def test_training_lowers_the_loss_and_leaves_rows_that_nobody_reads(optimizer, update_type):
    net = module()
    before = net[0].weight.detach().clone()

    losses = train(net, optimizer(net.parameters(), lr=0.02, update_type=update_type), steps=60)

    assert losses[-1] < losses[0] / 2
    torch.testing.assert_close(net[0].weight[10:].detach(), before[10:], rtol=0, atol=0)
    assert (net[0].weight[:10] != before[:10]).any(dim=1).all()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (lambda p: AdaGrad(p, lr=0.1, epsilon=1e-5), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-5)),
    ],
)
def test_sparse_gradients_give_the_weights_of_torch(ours, theirs):
    one, other = module(), module()

    train(one, ours(one.parameters()))
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns unless someone decides
        train(other, theirs(other.parameters()))

    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))


@pytest.mark.parametrize("optimizer", [MomentumSGD, Nesterov, Adam])
def test_a_global_update_of_a_sparse_gradient_is_that_of_a_dense_gradient(optimizer):
    one, other = module(), module(sparse=False)

    train(one, optimizer(one.parameters(), lr=0.05, update_type="Global"))
    train(other, optimizer(other.parameters(), lr=0.05))

    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))


def test_the_scaler_divides_the_gradients_of_a_scaled_loss():
    one, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    plain, scaled = Adam([one], lr=0.1), Adam([other], lr=0.1, scaler=1024)

    for _ in range(5):
        one.grad, other.grad = torch.full((4,), 0.5), torch.full((4,), 512.0)
        plain.step()
        scaled.step()

    torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", EVERY)
@pytest.mark.parametrize("update_type", UPDATE_TYPES)
def test_training_resumes_from_a_saved_state_as_if_it_had_never_stopped(optimizer, update_type, tmp_path):
    net = module()
    whole = optimizer(net.parameters(), lr=0.05, update_type=update_type)
    train(net, whole, steps=5)
    torch.save((net.state_dict(), whole.state_dict()), tmp_path / "saved")
    train(net, whole, steps=5, seed=2)

    resumed = module()
    again = optimizer(resumed.parameters(), lr=1.0, update_type=update_type)
    weights, state = torch.load(tmp_path / "saved", weights_only=True)
    resumed.load_state_dict(weights)
    again.load_state_dict(copy.deepcopy(state))
    train(resumed, again, steps=5, seed=2)

    torch.testing.assert_close(list(net.parameters()), list(resumed.parameters()), rtol=0, atol=0)


def test_parameter_groups_and_schedulers_of_torch_set_the_options():
    slow, fast = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Ftrl([{"params": [slow], "lr": 0.01}, {"params": [fast], "l1": 1e9}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    slow.grad = fast.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()

    assert not fast.detach().any()  # its l1 is larger than its gradients
    assert slow.detach().all()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.05]


def test_a_step_returns_the_loss_of_its_closure_and_leaves_weights_without_a_gradient():
    weights = nn.Parameter(torch.ones(2))

    assert SGD([weights]).step(lambda: 7.5) == 7.5
    assert weights.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"scaler": 0.0}, "scaler must be above 0, got 0.0"),
        ({"update_type": "Lazy"}, "update_type must be one of Local, Global, LazyGlobal, got 'Lazy'"),
    ],
)
@pytest.mark.parametrize("optimizer", EVERY)
def test_an_impossible_option_is_refused(optimizer, options, message):
    with pytest.raises(ValueError, match=message):
        optimizer([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (Adam, {"beta": 0.9}, "expected one of the options lr, weight_decay, beta1, beta2, epsilon, got 'beta'"),
        (SGD, {"momentum": 0.9}, "SGD: expected one of the options lr, weight_decay, got 'momentum'"),
        (Adam, {"betas": 0.9}, "Adam: expected betas as 2 numbers, got 0.9"),
        (Adam, {"betas": (0.9,)}, r"Adam: expected betas as 2 numbers, got \(0.9,\)"),
        (Adam, {"eps": "small"}, "Adam: expected epsilon as a number, got 'small'"),
        (SGD, {"lr": True}, "SGD: expected lr as a number, got True"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_also_in_a_group(optimizer, options, message):
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match=message):
        optimizer([weight], **options)
    with pytest.raises(TypeError, match=message):
        optimizer([{"params": [weight], **options}])


@pytest.mark.parametrize(
    ("optimizer", "usual", "own"),
    [
        (Adam, {"betas": (0.5, 0.6), "eps": 1e-3}, {"beta1": 0.5, "beta2": 0.6, "epsilon": 1e-3}),
        (Nesterov, {"momentum": 0.5}, {"momentum_factor": 0.5}),
        (AdaGrad, {"initial_accumulator_value": 0.5}, {"initial_accumulator": 0.5}),
    ],
)
def test_options_have_pytorchs_names_too(optimizer, usual, own):
    weight = nn.Parameter(torch.ones(1))
    expected = optimizer([weight], 0.1, **own).param_groups

    assert optimizer([weight], 0.1, **usual).param_groups == expected
    assert optimizer([{"params": [weight], **usual}], 0.1).param_groups == expected


@pytest.mark.parametrize(
    ("optimizer", "peer"),
    [
        (SGD, lambda weights: torch.optim.SGD(weights, 0.1, weight_decay=0.5)),
        (
            lambda weights, *options, **named: AdaGrad(weights, *options, epsilon=1e-10, **named),
            lambda weights: torch.optim.Adagrad(weights, 0.1, weight_decay=0.5),
        ),
    ],
)
def test_weight_decay_is_that_of_pytorch_for_weights_sparse_weights_and_tables(optimizer, peer):
    """The gradients are scaled, two backward passes are one step, and a row is read twice."""
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2, initializer=Constant(1.0))})
    sparse, dense, other = (
        nn.Embedding.from_pretrained(torch.ones(3, 2), False, sparse=one) for one in (True, False, False)
    )
    ours = optimizer([*tables.parameters(), *sparse.parameters(), *dense.parameters()], 0.1, weight_decay=0.5, scaler=4)
    theirs = peer(other.parameters())
    for _ in range(3):
        for keys in (torch.tensor([0, 1, 1]), torch.tensor([2])):
            scaled = tables({"t": keys})["t"].square().sum() + sparse(keys).square().sum() + dense(keys).square().sum()
            (4 * scaled).backward()
            other(keys).square().sum().backward()
        for one in (ours, theirs):
            one.step()
            one.zero_grad()

    for weights in (torch.from_numpy(tables.tables["t"].rows()[1]), sparse.weight, dense.weight):
        torch.testing.assert_close(weights, other.weight, check_device=False)


def test_weight_decay_of_rows_that_are_scaled_when_they_are_read_is_refused():
    tables = EmbeddingBagCollection({"plain": EmbeddingBagConfig(2), "t": EmbeddingBagConfig(2, max_norm=1.0)})
    optimizer = SGD(tables.parameters(), 0.1, weight_decay=0.5)
    sum(vectors.sum() for vectors in tables({"plain": torch.arange(2), "t": torch.arange(2)}).values()).backward()

    with pytest.raises(ValueError, match="table 't': expected no weight_decay, because the table has max_norm"):
        optimizer.step()

    assert all(parameter.grad is not None for parameter in tables.parameters())


def test_an_option_of_a_group_is_checked_too():
    with pytest.raises(ValueError, match="beta1 must be at least 0 and below 1"):
        optimizers.Adam([{"params": [nn.Parameter(torch.ones(1))], "beta1": 2.0}])


def test_the_code_on_the_documents_page_runs():
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "torch.nn.EmbeddingBag" in code]
    names = {}

    exec(compile(code, "training.md", "exec"), names)

    assert names["net"].weight[3].any()


@pytest.mark.parametrize(
    "other", [lambda params: optimizers.SGD(params, lr=0.1), lambda params: torch.optim.Adam(params, lr=0.1)]
)
def test_the_state_of_another_optimizer_is_refused(other):
    params = [torch.nn.Parameter(torch.zeros(2))]

    with pytest.raises(ValueError, match=r"Adam: expected a state with beta1, beta2, epsilon, lr, got .*lr"):
        optimizers.Adam(params).load_state_dict(other(params).state_dict())
    with pytest.raises(ValueError, match=r"SGD: expected a state with lr, got .*beta"):
        optimizers.SGD(params).load_state_dict(optimizers.Adam(params).state_dict())


def test_new_rows_have_the_first_states_of_a_loaded_optimizer():
    first, loaded = (EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}, seed=0) for _ in range(2))
    one = optimizers.AdaGrad(first.parameters(), lr=0.1, initial_accumulator=0.5)
    other = optimizers.AdaGrad(loaded.parameters(), lr=0.2)

    other.load_state_dict(one.state_dict())
    for tables, optimizer in ((first, one), (loaded, other)):
        tables({"t": torch.tensor([1, 2])})["t"].sum().backward()
        optimizer.step()

    assert loaded.tables["t"].rows()[1].tolist() == first.tables["t"].rows()[1].tolist()
