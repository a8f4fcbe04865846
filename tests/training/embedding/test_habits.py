"""What PyTorch programs do with parameters: tables follow each habit as parameters do, or refuse the habit by name.

A habit is a function of a model and an optimizer. It runs twice: on a model whose embedding is a table, and on the same
model in float64 whose embedding is an ``nn.EmbeddingBag``. Then all weights are equal, or the table has refused.
"""

import contextlib
import copy
import gc
import io
import pickle
from functools import partial, reduce
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from training import EmbeddingBagCollection, EmbeddingBagConfig, deeprec, optimizers, sok
from training.embedding import Constant

ROWS, DIM = 8, 3
KEYS, OFFSETS = torch.tensor([1, 2, 1, 5]), torch.tensor([0, 2, 3, 4])
OTHER_KEYS = torch.tensor([2, 5, 5, 7])


class Table(nn.Module):
    """The embedding as a table. It has no rows until training makes them."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(DIM, initializer=Constant(0.25))})

    def forward(self, keys, offsets):
        return self.tables({"t": (keys, offsets)})["t"]

    def rows(self):
        return all_rows(self.tables.tables["t"])


class Dynamic(nn.Module):
    """The embedding as a table of SOK."""

    def __init__(self):
        super().__init__()
        self.table = sok.DynamicVariable(DIM, Constant(0.25), name="t")

    def forward(self, keys, offsets):
        rows = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        ids = sok.SparseTensor(torch.stack([rows, torch.arange(len(keys))], 1), keys, [len(offsets) - 1, len(keys)])
        return sok.lookup_sparse(self.table, ids, combiners="sum")

    def rows(self):
        return all_rows(self.table.table)


class Column(nn.Module):
    """The embedding as a column of DeepRec."""

    def __init__(self):
        super().__init__()
        feature = deeprec.categorical_column_with_embedding("t")
        self.column = deeprec.embedding_column(feature, DIM, "sum", Constant(0.25))

    def forward(self, keys, offsets):
        rows = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        ids = (torch.stack([rows, torch.arange(len(keys))], 1), keys, [len(offsets) - 1, len(keys)])
        return deeprec.input_layer({"t": ids}, [self.column])

    def rows(self):
        return all_rows(self.column.table)


def all_rows(table):
    rows = np.full((ROWS, DIM), 0.25)
    keys, vectors = table.rows()
    rows[keys] = vectors
    return torch.from_numpy(rows)


class Plain(nn.Module):
    """The embedding as a parameter of PyTorch."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, dtype=torch.float64)
        nn.init.constant_(self.bag.weight, 0.25)

    def forward(self, keys, offsets):
        return self.bag(keys, offsets)

    def rows(self):
        return self.bag.weight.detach().clone()


class Model(nn.Module):
    """An embedding and a network."""

    def __init__(self, embedding, dtype):
        super().__init__()
        self.embedding, self.net = embedding, nn.Linear(DIM, 1, dtype=dtype)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
            self.net.bias.fill_(0.1)

    def forward(self, keys=KEYS, offsets=OFFSETS):
        return self.net(self.embedding(keys, offsets))


def table_model(embedding=Table):
    return Model(embedding(), torch.float32)


def plain_model():
    return Model(Plain(), torch.float64)


def loss_of(model, factor=1.0, keys=KEYS):
    return (model(keys) - 1).square().sum() * factor


def one_step(model, optimizer, factor=1.0):
    loss_of(model, factor).backward()
    optimizer.step()


def table_of(model):
    """The parameter of the embedding."""
    return next(model.embedding.parameters())


def two_passes(model, optimizer):
    loss_of(model).backward()
    loss_of(model, 10, OTHER_KEYS).backward()
    optimizer.step()


def three_hundred_passes(model, optimizer):
    for _ in range(300):
        loss_of(model, 1e-3).backward()
    optimizer.step()


def without_zero_grad(model, optimizer):
    for _ in range(3):
        one_step(model, optimizer, 0.3)


def two_steps(model, optimizer):
    one_step(model, optimizer)
    optimizer.step()


def a_gradient_after_the_step(model, optimizer):
    one_step(model, optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        model.net.bias.add_(norm)
    optimizer.step()


def frozen_before_the_backward_pass(model, optimizer):
    loss = loss_of(model)
    table_of(model).requires_grad_(False)
    loss.backward()
    table_of(model).requires_grad_(True)
    optimizer.step()


def one_graph_twice(model, optimizer):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def one_table_in_two_lookups(model, optimizer):
    (loss_of(model) + loss_of(model, 3, OTHER_KEYS)).backward()
    optimizer.step()


def zeroed(model, optimizer, zero):
    loss_of(model, 5).backward()
    zero(model, optimizer)
    one_step(model, optimizer)


def clipped(model, optimizer, clip):
    loss_of(model, 100).backward()
    clip(model.parameters())
    optimizer.step()


def scaled_between_passes(model, optimizer):
    loss_of(model).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    loss_of(model, 10, OTHER_KEYS).backward()
    optimizer.step()


def scaled_by_an_operator(model, optimizer):
    loss_of(model).backward()
    for parameter in model.parameters():
        parameter.grad *= 0.1
    optimizer.step()


def replaced_by_another_gradient(model, optimizer):
    loss_of(model).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.1
    optimizer.step()


def gradient_of(model, keys, factor=1.0):
    """The gradients of a batch, saved as programs do that combine gradients by hand."""
    model.zero_grad()
    loss_of(model, factor, keys).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def set_gradients(model, gradients):
    model.zero_grad()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def added_by_hand(model, optimizer):
    one, other = gradient_of(model, KEYS), gradient_of(model, OTHER_KEYS, 3)  # both of three rows
    set_gradients(model, [a + 2 * b for a, b in zip(one, other, strict=True)])
    optimizer.step()


def added_to_grad(model, optimizer):
    one, other = gradient_of(model, KEYS), gradient_of(model, torch.tensor([0, 0, 1, 7]))
    loss_of(model, 10, OTHER_KEYS).backward()
    for parameter, a, b in zip(model.parameters(), one, other, strict=True):
        parameter.grad += a
        parameter.grad.sub_(b)
    optimizer.step()


def without_conflicts(model, optimizer):
    """As PCGrad does: each gradient without its part along the other."""
    one, other = gradient_of(model, KEYS), gradient_of(model, OTHER_KEYS, -3)
    product = sum((a * b).sum() for a, b in zip(one, other, strict=True))
    square = sum(b.norm() ** 2 for b in other)
    set_gradients(model, [a - product / square * b for a, b in zip(one, other, strict=True)])
    optimizer.step()


def without_conflicts_as_a_vector(model, optimizer):
    out, flat = model(), []
    for loss in (out.sum(), (out - 1).square().sum()):
        model.zero_grad()
        loss.backward(retain_graph=True)
        flat.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    both = flat[0] - torch.dot(*flat) / flat[1].norm() ** 2 * flat[1]
    for parameter in model.parameters():
        of_parameter, both = both.split([parameter.grad.numel(), len(both) - parameter.grad.numel()])
        parameter.grad.copy_(of_parameter.view(parameter.grad.shape))
    optimizer.step()


def changed_by_row(model, optimizer):
    """Centralize and normalize gradients, change some of their elements, and average them."""
    loss_of(model).backward()
    for gradient in [parameter.grad for parameter in model.parameters() if parameter.dim() > 1]:
        gradient.sub_(gradient.mean(dim=1, keepdim=True))
        gradient.data = nn.functional.normalize(gradient, dim=1).data * 0.9
        gradient[gradient > 0.1] = 0.2
        gradient[gradient.norm(dim=1) > 0.8] = 0.5
        gradient[:, 0].neg_()
        gradient.copy_(gradient * torch.full(gradient.shape[1:], 0.5))
        gradient.mul_(torch.cosine_similarity(gradient.flatten(), gradient.flatten(), dim=0)).detach_()
        gradient.copy_(torch.stack([gradient, 3 * gradient.square()]).mean(0))
    optimizer.step()


def hooked(model, optimizer):
    table = table_of(model)
    table.register_hook(lambda gradient: gradient / 4)
    table.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    removed = table.register_hook(torch.zeros_like)
    removed.remove()
    two_passes(model, optimizer)


def hooked_after_accumulation(model, optimizer):
    def halve(parameter):
        parameter.grad.mul_(0.5)

    table_of(model).register_post_accumulate_grad_hook(halve)
    two_passes(model, optimizer)


def scaled_for_amp(model, optimizer, factor=1.0, unscale=True):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, factor if number == 1 else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def scaled_without_keys(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    of_table = type(optimizer)([table_of(model)], lr=0.1)
    scaler.scale(model(KEYS[:0], torch.zeros(3, dtype=torch.int64)).sum()).backward()
    scaler.step(of_table)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def frozen(model, optimizer):
    one_step(model, optimizer)
    table_of(model).requires_grad_(False)
    optimizer.zero_grad()
    one_step(model, optimizer)
    assert not model.embedding(KEYS, OFFSETS).requires_grad


def thawed(model, optimizer):
    frozen(model, optimizer)
    optimizer.zero_grad()
    model.requires_grad_(True)
    one_step(model, optimizer)


def evaluated(model, optimizer):
    one_step(model, optimizer)
    optimizer.zero_grad()
    model.eval()
    one_step(model, optimizer)


def only_the_network(model, optimizer):
    loss_of(model, 5).backward(inputs=list(model.net.parameters()))
    loss_of(model, 7).backward(inputs=[table_of(model)])
    optimizer.step()


def gradients_of_the_network(model, optimizer):
    torch.autograd.grad(loss_of(model, 5), list(model.net.parameters()))
    one_step(model, optimizer)


def forward_without_backward(model, optimizer):
    for _ in range(20):
        model()
    one_step(model, optimizer)


def copied(model, optimizer):
    one_step(model, optimizer)
    other = copy.deepcopy(model)
    one_step(other, type(optimizer)(other.parameters(), lr=10.0))
    optimizer.zero_grad()
    one_step(model, optimizer)


def continued_in(model, other):
    """Train a copy, and put its weights where the test looks for them."""
    one_step(other, optimizers.SGD(other.parameters(), lr=0.1))
    model.embedding, model.net = other.embedding, other.net


def a_trained_copy(model, optimizer):
    one_step(model, optimizer)
    continued_in(model, copy.deepcopy(model))


def a_copy_of_model_and_optimizer(model, optimizer):
    one_step(model, optimizer)
    step, other = copy.deepcopy((optimizer, model))
    step.zero_grad()
    one_step(other, step)
    model.embedding, model.net = other.embedding, other.net


def pickled(model, optimizer):
    one_step(model, optimizer)
    continued_in(model, pickle.loads(pickle.dumps(model)))


def saved(model, optimizer):
    one_step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    continued_in(model, torch.load(file, weights_only=False))


def loaded(model, optimizer):
    one_step(model, optimizer)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Model(type(model.embedding)(), model.net.weight.dtype)
    other.load_state_dict(torch.load(file))
    continued_in(model, other)


def moved(model, optimizer):
    loss_of(model).backward()
    model.to("cpu").cpu()
    optimizer.step()


def compiled(model, optimizer):
    @partial(torch.compile, backend="eager")
    def step(keys):
        optimizer.zero_grad()
        loss_of(model, 1.0, keys).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for keys in (KEYS, OTHER_KEYS, KEYS):
        step(keys)


def checkpointed(model, optimizer, use_reentrant):
    one = torch.ones(1, requires_grad=True)  # without it, nothing has a gradient in a reentrant checkpoint
    out = checkpoint(lambda one: one * model(), one, use_reentrant=use_reentrant)
    (out - 1).square().sum().backward()
    optimizer.step()


def known_and_checkpointed(model, optimizer):
    one_step(model, optimizer)
    optimizer.zero_grad()
    checkpointed(model, optimizer, use_reentrant=True)


def in_the_backward_pass(model, optimizer):
    for parameter in model.parameters():
        of_parameter = type(optimizer)([parameter], lr=0.1)

        def step(parameter, of_parameter=of_parameter):
            of_parameter.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss_of(model).backward()


def learning_rates_by_group(model, optimizer):
    two = type(optimizer)(model.net.parameters(), lr=0.1)
    two.add_param_group({"params": list(model.embedding.parameters()), "lr": 0.5})
    schedule = torch.optim.lr_scheduler.ExponentialLR(two, 0.5)
    for _ in range(3):
        one_step(model, two)
        two.zero_grad()
        schedule.step()


FOLLOWED = {
    "a step": one_step,
    "two backward passes": two_passes,
    "300 backward passes": three_hundred_passes,
    "steps without zero_grad": without_zero_grad,
    "two steps": two_steps,
    "a gradient after the step": a_gradient_after_the_step,
    "frozen before backward": frozen_before_the_backward_pass,
    "retain_graph": one_graph_twice,
    "one table in two lookups": one_table_in_two_lookups,
    "optimizer.zero_grad()": partial(zeroed, zero=lambda model, optimizer: optimizer.zero_grad()),
    "optimizer.zero_grad(False)": partial(zeroed, zero=lambda model, optimizer: optimizer.zero_grad(False)),
    "module.zero_grad()": partial(zeroed, zero=lambda model, optimizer: model.zero_grad()),
    "grad = None": partial(
        zeroed, zero=lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()]
    ),
    "clip_grad_value_": partial(clipped, clip=partial(nn.utils.clip_grad_value_, clip_value=0.01)),
    "clip_grad_norm_": partial(clipped, clip=partial(nn.utils.clip_grad_norm_, max_norm=0.5)),
    "clip_grad_norm_, infinite norm": partial(
        clipped, clip=partial(nn.utils.clip_grad_norm_, max_norm=0.5, norm_type=torch.inf)
    ),
    "grad.mul_() between passes": scaled_between_passes,
    "grad *= x": scaled_by_an_operator,
    "del grad": partial(zeroed, zero=lambda model, optimizer: [delattr(p, "grad") for p in model.parameters()]),
    "grad = another": replaced_by_another_gradient,
    "gradients of two batches": added_by_hand,
    "grad += a gradient of another batch": added_to_grad,
    "PCGrad": without_conflicts,
    "PCGrad with vectors": without_conflicts_as_a_vector,
    "gradients changed by row": changed_by_row,
    "register_hook": hooked,
    "register_post_accumulate_grad_hook": hooked_after_accumulation,
    "optimizer in backward": in_the_backward_pass,
    "GradScaler": partial(scaled_for_amp, unscale=False),
    "GradScaler, infinite": partial(scaled_for_amp, factor=torch.inf, unscale=False),
    "GradScaler with clipping": scaled_for_amp,
    "GradScaler with clipping, NaN": partial(scaled_for_amp, factor=torch.nan),
    "GradScaler without keys": scaled_without_keys,
    "requires_grad_(False)": frozen,
    "requires_grad_(True) again": thawed,
    "eval() with gradients": evaluated,
    "backward(inputs=)": only_the_network,
    "autograd.grad of the network": gradients_of_the_network,
    "forward without backward": forward_without_backward,
    "deepcopy": copied,
    "a trained deepcopy": a_trained_copy,
    "deepcopy of model and optimizer": a_copy_of_model_and_optimizer,
    "pickle": pickled,
    "torch.save(model)": saved,
    "state_dict": loaded,
    "to() with gradients": moved,
    "torch.compile": compiled,
    "checkpoint": partial(checkpointed, use_reentrant=False),
    "a reentrant checkpoint with known keys": known_and_checkpointed,
    "parameter groups with a schedule": learning_rates_by_group,
}


def of_gradients(change):
    """A habit that changes every gradient by a factor."""

    def habit(model, optimizer, factor, keys):
        if any(parameter.grad is not None for parameter in model.parameters()):
            change(model, factor)

    return habit


def replace_gradients(model, factor):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor


def pass_back(model, optimizer, factor, keys):
    vectors = model(torch.tensor(keys, dtype=torch.int64), torch.tensor([0, len(keys) // 2, len(keys)]))
    (vectors.tanh().sum() * factor).backward()


ANY_ORDER = {
    "backward": pass_back,
    "step": lambda model, optimizer, factor, keys: optimizer.step(),
    "zero_grad": lambda model, optimizer, factor, keys: optimizer.zero_grad(factor > 1),
    "clip_grad_value_": of_gradients(lambda model, factor: nn.utils.clip_grad_value_(model.parameters(), factor / 9)),
    "clip_grad_norm_": of_gradients(lambda model, factor: nn.utils.clip_grad_norm_(model.parameters(), factor / 3)),
    "grad = another": of_gradients(replace_gradients),
    "requires_grad_": lambda model, optimizer, factor, keys: table_of(model).requires_grad_(factor > 1),
    "eval": lambda model, optimizer, factor, keys: model.train(factor > 1),
}
FACTORS, BAGS = st.floats(0.1, 2), st.lists(st.integers(0, ROWS - 1), max_size=6)
USES = st.one_of(
    st.tuples(st.just("backward"), FACTORS, BAGS), st.tuples(st.sampled_from(sorted(ANY_ORDER)), FACTORS, BAGS)
)


@settings(deadline=None, max_examples=15)
@given(st.lists(USES, max_size=30))
def test_habits_in_any_order_give_the_weights_of_a_parameter(uses):
    ours, theirs = table_model(), plain_model()
    ours(torch.arange(ROWS), torch.arange(ROWS + 1))  # so that all rows exist

    for model in (ours, theirs):
        optimizer = optimizers.SGD(model.parameters(), lr=0.01)
        for name, factor, keys in uses:
            ANY_ORDER[name](model, optimizer, factor, keys)
        optimizer.step()

    torch.testing.assert_close(ours.embedding.rows(), theirs.embedding.rows(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.net.weight.double(), theirs.net.weight, rtol=1e-3, atol=1e-5)


class PapersOptimizer(torch.optim.Optimizer):
    """As in the code of many papers."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad.data.sum(0), alpha=-0.1)


def with_another_optimizer(model, make):
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    closure()
    if isinstance(optimizer, PapersOptimizer):
        optimizer.step()
    else:
        optimizer.step(closure)


def averaged(model, **how):
    average = AveragedModel(model, **how)
    average.update_parameters(model)
    average.update_parameters(model)


def averaged_by_hand(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.9).add_(parameter.data, alpha=0.1)


def leaf_of(model):
    """The module that has the parameter of the embedding, and the parameter's name."""
    *path, leaf = next(name for name, _ in model.embedding.named_parameters()).split(".")
    return model.embedding.get_submodule(".".join(path)), leaf


def penalized(model):
    (loss_of(model) + sum(parameter.square().sum() for parameter in model.parameters())).backward()


REFUSED = {
    "SGD": ("add_", partial(with_another_optimizer, make=partial(torch.optim.SGD, lr=1.0))),
    "SGD(foreach)": (
        "_foreach_add_",
        partial(with_another_optimizer, make=partial(torch.optim.SGD, lr=1.0, foreach=True)),
    ),
    "Adam": ("zeros_like", partial(with_another_optimizer, make=torch.optim.Adam)),
    "AdamW": ("zeros_like", partial(with_another_optimizer, make=torch.optim.AdamW)),
    "Adagrad": ("full_like", partial(with_another_optimizer, make=torch.optim.Adagrad)),
    "LBFGS": ("view_as", partial(with_another_optimizer, make=torch.optim.LBFGS)),
    "a paper's optimizer": ("add_", partial(with_another_optimizer, make=PapersOptimizer)),
    "AveragedModel": ("copy_", averaged),
    "EMA": ("copy_", partial(averaged, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    "an average by hand": ("mul_", averaged_by_hand),
    "half()": ("half", nn.Module.half),
    "bfloat16()": ("bfloat16", nn.Module.bfloat16),
    "double()": ("double", nn.Module.double),
    "to(dtype)": ("to", lambda model: model.to(torch.float16)),
    "to(meta)": ("to", lambda model: model.to("meta")),
    "to_empty()": ("empty_like", lambda model: model.to_empty(device="cpu")),
    "fully_shard": ("chunk", lambda model: table_of(model).detach().chunk(2)),
    "ZeroRedundancyOptimizer": ("type", lambda model: table_of(model).type()),
    "share_memory()": ("share_memory_", nn.Module.share_memory),
    "nn.init": ("uniform_", lambda model: nn.init.xavier_uniform_(table_of(model))),
    "parameter[:] = 0": ("__setitem__", lambda model: table_of(model).detach().__setitem__(slice(None), 0)),
    "parameter.data = rows": ("data", lambda model: setattr(table_of(model), "data", torch.zeros(ROWS, DIM))),
    "equal parameters": ("equal", lambda model: torch.equal(table_of(model), table_of(model))),
    "elements as an array": ("numpy", lambda model: table_of(model).detach().numpy()),
    "L2 of the parameters": ("square", penalized),
    "an operator": ("mul", lambda model: 0.5 * table_of(model)),
    "a function that fails without elements": ("max", lambda model: table_of(model).max()),
    "norm of the parameters": ("norm", lambda model: [parameter.detach().norm() for parameter in model.parameters()]),
    "Parameter(parameter)": ("Parameter", lambda model: nn.Parameter(table_of(model).data)),
    "weight_norm": ("norm_except_dim", lambda model: nn.utils.parametrizations.weight_norm(*leaf_of(model))),
    "spectral_norm": ("flatten", lambda model: nn.utils.parametrizations.spectral_norm(*leaf_of(model))),
    "prune": ("ones_like", lambda model: prune.l1_unstructured(*leaf_of(model), amount=0.5)),
    "parametrize": ("tanh", lambda model: parametrize.register_parametrization(*leaf_of(model), nn.Tanh())),
    "parameters_to_vector": ("view", lambda model: nn.utils.parameters_to_vector(model.parameters())),
    "autograd.grad of the table": ("grad", lambda model: torch.autograd.grad(loss_of(model), [table_of(model)])),
}


EMBEDDINGS = {"collection": Table, "DynamicVariable": Dynamic, "column": Column}
# SOK's variables are saved with sok.dump. Their size is a property, as in SOK, so what calls size() raises an error.
NOT_OF_SOK = {"Parameter(parameter)", "pickle", "torch.save(model)", "state_dict", "nn.init"}
CASES = [
    pytest.param(embedding, habit, id=f"{name}: {kind}")
    for kind, embedding in EMBEDDINGS.items()
    for name, habit in FOLLOWED.items()
    if not (embedding is Dynamic and name in NOT_OF_SOK)
]


REFUSED_CASES = [
    pytest.param(embedding, *habit, id=f"{name}: {kind}")
    for kind, embedding in EMBEDDINGS.items()
    for name, habit in REFUSED.items()
    if not (embedding is Dynamic and name in NOT_OF_SOK)
]


@pytest.fixture(autouse=True)
def start():
    """Let SOK begin."""
    sok.init()


# of the graph breaks of torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("embedding", "habit"), CASES)
def test_a_table_follows_the_habit_as_a_parameter_does(embedding, habit):
    ours, theirs = table_model(embedding), plain_model()

    for model in (ours, theirs):
        habit(model, optimizers.SGD(model.parameters(), lr=0.1))

    torch.testing.assert_close(ours.embedding.rows(), theirs.embedding.rows(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.net.weight.double(), theirs.net.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("embedding", "function", "habit"), REFUSED_CASES)
def test_a_table_refuses_the_habit_by_name(embedding, function, habit):
    model = table_model(embedding)

    with pytest.raises(RuntimeError, match=f"table 't(_embedding)?': PyTorch's {function!r} does not reach the rows"):
        habit(model)


GRAPHS = {
    "torch.jit.trace": lambda lookup, keys: torch.jit.trace(lookup, (keys,), check_trace=False),
    "torch.export": lambda lookup, keys: torch.export.export(Function(lookup), (keys,)),
    "make_fx": lambda lookup, keys: make_fx(lambda keys: lookup(keys))(keys),
    "fx.symbolic_trace": lambda lookup, keys: torch.fx.symbolic_trace(Table()),
    "fake tensors": lambda lookup, keys: without_elements(lookup, keys),
    "func.grad": lambda lookup, keys: torch.func.grad(lambda weights: lookup(keys, weights).sum())(torch.ones(4)),
    "vmap": lambda lookup, keys: torch.vmap(lambda key: lookup(key[None]))(keys),
}


def without_elements(lookup, keys):
    with FakeTensorMode(allow_non_fake_inputs=True):
        lookup(keys)


class Function(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.forward = forward


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_lookup_in_a_graph_or_transformation_is_refused(graph):
    tables = table_model().embedding.tables

    def lookup(keys, weights=None):
        return tables({"t": keys if weights is None else (keys, torch.arange(5), weights)})["t"]

    with pytest.raises(RuntimeError, match=r"EmbeddingBagCollection\.forward: .* the rows"):
        graph(lookup, KEYS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripting_is_refused():
    with pytest.raises(RuntimeError, match=r"EmbeddingBagCollection: torch\.jit\.script cannot have the rows"):
        torch.jit.script(table_model())


@pytest.mark.parametrize("other", [lambda one: torch.zeros(1, DIM), lambda one: one.detach()], ids=["rows", "an alias"])
def test_another_parameter_in_functional_call_is_refused(other):
    tables = table_model().embedding.tables
    torch.func.functional_call(tables, dict(tables.named_parameters()), ({"t": KEYS},))["t"].sum().backward()
    assert len(tables.table_0.grad) == 3

    with pytest.raises(RuntimeError, match=r"table 't': expected its own parameter, .* got (Tensor|TableParameter)"):
        torch.func.functional_call(tables, {"table_0": other(tables.table_0)}, ({"t": KEYS},))


def test_a_parameter_that_was_swapped_for_another_is_refused():
    model, other = table_model(), table_model()
    torch.utils.swap_tensors(table_of(model), table_of(other))

    with pytest.raises(RuntimeError, match=r"table 't': expected its own parameter"):
        model()


def test_sending_a_table_to_another_process_warns_that_it_is_a_copy():
    model = table_model()
    model()

    with pytest.warns(UserWarning, match=r"table 't': another process gets a copy of the rows"):
        sent = pickle.loads(ForkingPickler.dumps(model))

    assert torch.equal(sent.embedding.rows(), model.embedding.rows())


def test_tables_on_the_device_meta_are_refused():
    with torch.device("meta"), pytest.raises(RuntimeError, match=r"table 't': expected a device with memory"):
        Table()


@pytest.mark.parametrize("embedding", EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
def test_a_checkpoint_that_would_never_make_rows_is_refused(embedding):
    model = table_model(embedding)

    with pytest.raises(RuntimeError, match=r"table 't(_embedding)?': .* use_reentrant=False"):
        checkpointed(model, optimizers.SGD(model.parameters(), lr=0.1), use_reentrant=True)


def test_a_checkpoint_asks_for_no_row_of_a_table_that_makes_none():
    configs = {name: EmbeddingBagConfig(DIM, initializer=Constant(0.25)) for name in ("frozen", "t")}
    configs["rare"] = EmbeddingBagConfig(DIM, admit_after=2)
    tables = EmbeddingBagCollection(configs)
    tables.table_0.requires_grad_(False)
    optimizer = optimizers.SGD(tables.parameters(), lr=1.0)

    vectors = checkpoint(lambda: tables(dict.fromkeys(configs, KEYS)), use_reentrant=False)
    sum(vector.sum() for vector in vectors.values()).backward()
    optimizer.step()

    assert [len(table) for table in tables.tables.values()] == [0, 3, 1]  # KEYS has 1 twice
    assert tables.tables["t"].rows()[1][:, 0].tolist() == [-1.75, -0.75, -0.75]


def test_a_gradient_is_the_sum_over_the_rows_that_were_read():
    model = table_model()
    assert table_of(model).grad is None

    model.embedding(KEYS, OFFSETS).sum().backward()

    assert table_of(model).grad.tolist() == [[2.0] * DIM, [1.0] * DIM, [1.0] * DIM]  # of the keys 1, 2 and 5
    assert table_of(model).shape == (0, DIM)


def test_autocast_computes_as_with_an_embedding_bag():
    ours, theirs = table_model(), Model(Plain().float(), torch.float32)

    for model in (ours, theirs):
        optimizer = optimizers.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model()
            loss = (out - 1).square().sum()
        assert out.dtype == torch.bfloat16
        loss.backward()
        optimizer.step()

    torch.testing.assert_close(ours.embedding.rows(), theirs.embedding.rows().double())


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_backward_pass_that_needs_the_rows_before_a_step_is_refused(max_norm):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(DIM, max_norm=max_norm)})
    weights = torch.ones(4, requires_grad=max_norm is None)
    optimizer = optimizers.SGD(tables.parameters(), lr=0.1)
    one, other = (tables({"t": (KEYS, OFFSETS, weights)})["t"].sum() for _ in range(2))
    one.backward()
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("embedding", EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
def test_a_gradient_of_a_gradient_is_refused(embedding):
    with pytest.raises(TypeError, match=r"table 't(_embedding)?': expected backward\(\) without create_graph"):
        loss_of(table_model(embedding)).backward(create_graph=True)


@pytest.mark.parametrize("later", [optimizers.Adam, optimizers.SGD])
def test_an_optimizer_whose_states_another_one_has_replaced_is_refused(later):
    model = table_model()
    one = optimizers.Adam(model.parameters(), lr=0.1)
    other = later(model.parameters(), lr=0.1)

    one_step(model, other)

    with pytest.raises(RuntimeError, match=r"table 't': expected a step of the optimizer that was made last"):
        one_step(model, one)


def test_optimizers_without_states_take_turns():
    model = table_model()
    one, other = (optimizers.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.5))

    for optimizer in (one, other):
        optimizer.zero_grad()
        model.embedding(KEYS, OFFSETS).sum().backward()
        optimizer.step()

    assert model.embedding.rows()[2].tolist() == pytest.approx([0.25 - 0.6] * DIM)


BY_ELEMENT = (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: a.lerp(b, 0.25), lambda a, b: a.add_(b))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(BY_ELEMENT), st.lists(st.integers(0, ROWS - 1), min_size=1)), max_size=6))
def test_gradients_of_any_rows_are_combined_as_those_of_a_parameter(acts):
    made = []
    for embedding in (Table(), Plain()):
        embedding(torch.arange(ROWS), torch.arange(ROWS + 1))
        weight, combined = next(embedding.parameters()), None
        for act, keys in [(None, [3, 1, 3]), *acts]:
            embedding.zero_grad()
            vectors = embedding(torch.tensor(keys), torch.arange(len(keys) + 1))
            (vectors * torch.arange(-1.0, len(keys) - 1)[:, None]).sum().backward()
            combined = weight.grad if combined is None else act(combined, weight.grad)
        weight.grad = combined
        optimizers.SGD([weight], lr=0.5).step()
        made.append(embedding.rows())

    torch.testing.assert_close(*made)


def write_into_zeros(one, other):
    return torch.zeros(3, DIM).add_(one)


UNKNOWN_ROWS = {
    "an operation on all rows": (
        lambda one, other: torch.dot(one.flatten(), other.flatten()),
        "'dot' .* have different",
    ),
    "an operation on lists": (
        lambda one, other: torch._foreach_add_([one], [other]),
        "'_foreach_add_' .* have different",
    ),
    "a tensor without rows": (write_into_zeros, "'add_' .*does not know the rows"),
    "a list of such tensors": (
        lambda one, other: torch._foreach_add_([torch.zeros(3, DIM)], [one]),
        "'_foreach_add_' .*does not know the rows",
    ),
    "an alias without room": (lambda one, other: one.data.add_(other), "'add_' .*more rows"),
    "a copy of a tensor without rows": (lambda one, other: one.copy_(one.plain().flip(0)), "'copy_' .*unknown rows"),
    "a vector without rows": (lambda one, other: one.view(-1).copy_(torch.zeros(9)), "'copy_' .*unknown rows"),
    "copies of a list without rows": (
        lambda one, other: torch._foreach_copy_([one], [torch.zeros(3, DIM)]),
        "'_foreach_copy_' .*unknown rows",
    ),
    "a sparse gradient": (lambda one, other: one.to_sparse(), "'_to_sparse' .*expected a dense result"),
    "grad without rows": (lambda one, other: torch.zeros(3, DIM), r"grad: expected .*got Tensor float32\[3, 3\]"),
    "a number": (lambda one, other: 3, r"grad: expected a tensor, got int"),
    "grad of another shape": (lambda one, other: one[:, :2], r"grad: expected float32\[3, 3\], got float32\[3, 2\]"),
    "grad of another dtype": (lambda one, other: one.double(), r"grad: expected float32\[3, 3\], got float64\[3, 3\]"),
}


@pytest.mark.parametrize(("act", "reason"), UNKNOWN_ROWS.values(), ids=UNKNOWN_ROWS.keys())
def test_a_gradient_whose_rows_would_be_unknown_is_refused(act, reason):
    model = table_model()
    [one, *_], [other, *_] = gradient_of(model, KEYS), gradient_of(model, OTHER_KEYS)

    with pytest.raises((TypeError, ValueError), match=f"table 't': .*{reason}"):
        table_of(model).grad = act(one, other)


def filled(gradient, place, value):
    zeros = torch.zeros_like(gradient)
    zeros[place] = value
    return zeros


IN_ANOTHER_ORDER = {
    "flip": lambda one: one.flip(0),
    "roll": lambda one: one.roll(1, 0),
    "sort": lambda one: one.sort(0).values,
    "index": lambda one: one[[2, 1, 0]],
    "transpose": lambda one: one.T.contiguous(),
    "a product": lambda one: torch.eye(3).flip(0) @ one,
    "cat": lambda one: torch.cat([one[1:], one[:1]]),
    "stack": lambda one: torch.stack(one.unbind()[::-1]),
    "a vector": lambda one: torch.cat(one.flatten().split(3)[::-1]).view(3, 3),
    "a row in the places of all": lambda one: torch.stack([one, one, one], 1)[0],
    "rows written by hand": lambda one: filled(one, 0, one[2]),
    "rows written by index": lambda one: filled(one, [2, 1, 0], one),
    "written in place": lambda one: one.copy_(one.flip(0)),
    "a sum with one in another order": lambda one: torch.flip(one, [0]).add_(one),
    "data": lambda one: setattr(one, "data", one.flip(0)),
    "a view in place": lambda one: one.t_(),
    "a product with one in another order": lambda one: one * one.flip(0),
}


@pytest.mark.parametrize("permute", IN_ANOTHER_ORDER.values(), ids=IN_ANOTHER_ORDER.keys())
def test_a_gradient_whose_rows_are_in_another_order_is_refused(permute):
    model = table_model()
    [one, *_] = gradient_of(model, KEYS)
    before = one.tolist()

    with pytest.raises((TypeError, ValueError), match=r"table 't': .*expected"):
        table_of(model).grad = permute(one)

    assert one.tolist() == before
    table_of(model).register_hook(permute)
    with pytest.raises((TypeError, ValueError), match=r"table 't': .*expected"):
        loss_of(model).backward()


MOVES = (
    lambda one: one.flip(0),
    lambda one: one.roll(1, -1),
    lambda one: one.flatten(),
    lambda one: one.reshape(3, -1),
    lambda one: one.reshape(-1, 2),
    lambda one: one.mT if one.dim() > 1 else one,
    lambda one: one.contiguous(),
    lambda one: torch.cat([one[1:], one[:1]]),
    lambda one: torch.cat([one[:1], one[1:]]),
    lambda one: torch.stack([one, one])[1],
    lambda one: torch.stack([one, one], 1).sum(1) / 2,
    lambda one: torch.stack([one, one, one]).mean(0),
    lambda one: torch.cat([one.flatten(), torch.ones(3)])[: one.numel()].view(one.shape),
    lambda one: torch.cat([one.flatten()[-2:], one.flatten()])[2:],
    lambda one: one[torch.arange(len(one))],
    lambda one: torch.cat(one.split(2)[::-1]),
    lambda one: torch.cat(one.chunk(2, -1), -1),
    lambda one: one.unsqueeze(0).expand(2, *one.shape)[1],
    lambda one: torch.zeros_like(one).add_(one),
    lambda one: one * torch.ones(one.shape[-1:]),
    lambda one: torch.stack([one, one], 1)[: len(one) // 2].view(one.shape),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(MOVES), max_size=6))
def test_a_moved_gradient_is_refused_or_its_elements_are_in_their_places(moves):
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(2)})
    tables({"t": torch.arange(6)})["t"].mul(torch.arange(12.0).view(6, 2)).sum().backward()
    gradient, expected = tables.table_0.grad, tables.table_0.grad.tolist()

    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        moved = reduce(lambda one, move: move(one), moves, gradient)
        tables.table_0.grad = moved.reshape(6, 2) if moved.numel() == 12 else moved

    assert [sorted(row) for row in tables.table_0.grad.tolist()] == expected  # columns may be in another order


def test_a_gradient_that_was_swapped_for_one_of_unknown_rows_is_refused():
    model = table_model()
    loss_of(model).backward()
    gradient = table_of(model).grad

    torch.utils.swap_tensors(gradient, gradient.flip(0))

    with pytest.raises(TypeError, match="table 't': grad: expected what was computed from grad of this table"):
        optimizers.SGD(model.parameters()).step()


def test_a_part_of_a_joined_vector_moves_a_parameter_of_the_size_of_the_gradient():
    model = table_model()
    model(torch.tensor([1, 1]), torch.tensor([0, 1, 2])).sum().backward()
    table, weight = table_of(model), model.net.weight
    assert table.grad.shape == weight.shape
    expected = weight.detach() - 0.1 * weight.grad

    vector = torch.cat([table.grad.flatten(), weight.grad.flatten()])
    weight.grad = vector[DIM:].view(1, DIM)
    torch.optim.SGD([weight], lr=0.1).step()

    torch.testing.assert_close(weight.detach(), expected)


def test_a_gradient_of_another_table_is_refused():
    model, copied = table_model(), copy.deepcopy(table_model())
    [one, *_], [other, *_] = gradient_of(model, KEYS), gradient_of(copied, KEYS)

    with pytest.raises(ValueError, match=r"table 't': PyTorch's 'add' of gradients: they have different rows"):
        one + other
    with pytest.raises(TypeError, match=r"table 't': grad: expected what was computed from grad of this table"):
        table_of(copied).grad = one


def test_a_gradient_can_be_read_as_an_array_and_saved():
    model = table_model()
    [gradient, *_] = gradient_of(model, KEYS)
    expected = gradient.tolist()

    assert np.asarray(gradient).tolist() == gradient.numpy().tolist() == expected
    assert pickle.loads(pickle.dumps(gradient)).tolist() == expected
    table_of(model).grad = copy.deepcopy(gradient)
    assert table_of(model).grad.tolist() == expected


def test_a_state_of_an_earlier_revision_is_loaded():
    model, other = table_model(), table_model()
    one_step(model, optimizers.SGD(model.parameters(), lr=0.1))

    other.load_state_dict(model.state_dict() | {"embedding.tables.table_0": torch.zeros(1)})

    assert torch.equal(other.embedding.rows(), model.embedding.rows())


def test_a_process_without_loaded_rows_knows_the_last_step():
    model, other = table_model(), table_model()
    optimizer = optimizers.Adam(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    one_step(model, optimizer)
    table, loaded = (one.embedding.tables.tables["t"] for one in (model, other))

    loaded.load_state(table.state(), lambda keys: np.zeros(keys.size, np.bool_))

    assert (len(loaded), loaded.step) == (0, 2)


def test_a_frozen_table_makes_no_rows():
    model = table_model()
    model.embedding.requires_grad_(False)

    model()

    assert len(model.embedding.tables.tables["t"]) == 0


def test_first_weights_follow_torch_manual_seed_and_differ_between_tables():
    def vectors(seed, count):
        torch.manual_seed(seed)
        made = [EmbeddingBagCollection({"t": EmbeddingBagConfig(2)}) for _ in range(count)]
        return [tables({"t": torch.tensor([5])})["t"].tolist() for tables in made]

    one, other = vectors(0, 2)

    assert [one, other] == vectors(0, 2)
    assert one != other
    assert vectors(1, 1) != [one]


def test_lookups_without_backward_keep_nothing():
    model = table_model()
    model()
    gc.collect()
    before = len(gc.get_objects())

    for _ in range(100):
        model()

    assert len(gc.get_objects()) < before + 100
