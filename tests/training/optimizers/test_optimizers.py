"""The optimizers on real modules of PyTorch, against the rules and against ``torch.optim``."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from training import optimizers
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
        ({"scaler": 0.0}, "scaler must be above 0, got 0.0"),
        ({"update_type": "Lazy"}, "update_type must be one of Local, Global, LazyGlobal, got 'Lazy'"),
    ],
)
@pytest.mark.parametrize("optimizer", EVERY)
def test_an_impossible_option_is_refused(optimizer, options, message):
    with pytest.raises(ValueError, match=message):
        optimizer([nn.Parameter(torch.ones(1))], **options)


def test_an_option_of_a_group_is_checked_too():
    with pytest.raises(ValueError, match="beta1 must be at least 0 and below 1"):
        optimizers.Adam([{"params": [nn.Parameter(torch.ones(1))], "beta1": 2.0}])


def test_the_code_on_the_documents_page_runs():
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "torch.nn.EmbeddingBag" in code]
    names = {}

    exec(compile(code, "training.md", "exec"), names)

    assert names["net"].weight[3].any()
