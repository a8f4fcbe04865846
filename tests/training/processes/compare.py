"""Lookups in shared tables against the same lookups of one process. Each process runs this, and checks itself."""

import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.training.embedding.oracle import flat
from tests.training.processes import trials
from training import EmbeddingBagCollection, EmbeddingBagConfig, clip_grad_norm_, embedding_plugin, join_state_dicts
from training.embedding import Constant, Uniform
from training.optimizers import SGD, Adam, MomentumSGD
from training.processes import Processes

CONFIGS = {
    "plain": EmbeddingBagConfig(3),
    "shared": EmbeddingBagConfig(5, "mean", features=("viewed", "bought")),
    "clipped": EmbeddingBagConfig(2, "sqrtn", max_norm=0.04),
    "rare": EmbeddingBagConfig(2, admit_after=3, default_value=0.5),
    "fixed": EmbeddingBagConfig(2, rows=40),
    "narrow": EmbeddingBagConfig(2, row_dtype="bf16", initializer=Constant(0.25)),
}
FEATURES = ("plain", "viewed", "bought", "clipped", "rare", "fixed", "narrow")
BATCH = 8


def draw(rng):
    """Bags of every feature for a global batch; some are empty, and ``clipped`` has weights."""
    features = {}
    for feature in FEATURES:
        keys, offsets = flat([rng.integers(0, 40, rng.integers(0, 4)).tolist() for _ in range(BATCH)])
        weights = torch.tensor(rng.uniform(0.1, 1, len(keys)), dtype=torch.float32)
        features[feature] = (torch.tensor(keys, dtype=torch.int64), torch.tensor(offsets), weights)
    return features


def share_of(rank, size, step):
    """A process's samples of a batch. In some steps the first process has all of them, and in some the last has."""
    if step % 3 == 2:
        return slice(0, BATCH if rank == 0 else 0) if step % 2 else slice(0 if rank == size - 1 else BATCH, BATCH)
    return slice(BATCH * rank // size, BATCH * (rank + 1) // size)


def part_of(features, rows):
    """The bags of some samples, each with a leaf of weights."""
    cut = {}
    for name, (keys, offsets, weights) in features.items():
        offsets = offsets[rows.start : rows.stop + 1]
        inside = slice(int(offsets[0]), int(offsets[-1]))
        tensors = (keys[inside], offsets - offsets[0])
        cut[name] = (*tensors, weights[inside].clone().requires_grad_()) if name == "clipped" else tensors
    return cut


def loss_of(pooled):
    return sum((one - 1).square().sum() for one in pooled.values()) / BATCH


def compare(sharding, optimizer, rank, size, own_group):
    shared = EmbeddingBagCollection(CONFIGS, seed=4, process_group=dist.group.WORLD, sharding=sharding)
    alone = EmbeddingBagCollection(CONFIGS, seed=4, process_group=own_group)
    steps = [optimizer(net.parameters(), lr=0.05, update_type="LazyGlobal") for net in (shared, alone)]
    rng = np.random.default_rng(0)
    for number in range(6):
        features, share = draw(rng), share_of(rank, size, number)
        whole, mine = part_of(features, slice(0, BATCH)), part_of(features, share)
        if rank % 2:  # the order of the features does not matter
            mine = dict(reversed(mine.items()))
        expected, pooled = alone(whole), shared(mine)
        for name in FEATURES:
            torch.testing.assert_close(pooled[name], expected[name][share], rtol=1e-4, atol=1e-5)
        for step in steps:
            step.zero_grad()
        (loss_of(pooled) * size).backward()  # the mean over the processes is that of the whole batch
        loss_of(expected).backward()
        begin, end = features["clipped"][1][share.start], features["clipped"][1][share.stop]
        torch.testing.assert_close(mine["clipped"][2].grad / size, whole["clipped"][2].grad[begin:end])
        for step in steps:
            step.step()
    check_states(shared, alone, rank, size, sharding)
    share = share_of(rank, size, 0)
    with torch.no_grad():
        features = draw(rng)
        for name, answer in shared(part_of(features, share)).items():
            torch.testing.assert_close(
                answer, alone(part_of(features, slice(0, BATCH)))[name][share], rtol=1e-3, atol=1e-5
            )
    for name, table in shared.tables.items():
        keys, vectors = table.rows()
        known = dict(zip(*(part.tolist() for part in alone.tables[name].rows()), strict=True))
        assert (shared.owner_of(name, keys) == rank).all()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([len(table)]))
        assert sum(counts).item() == len(known)
        expected = np.reshape([known[key] for key in keys.tolist()], vectors.shape)
        np.testing.assert_allclose(vectors, expected, rtol=1e-2 if name == "narrow" else 1e-3, atol=1e-4)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own_group, _ = dist.new_subgroups(1)
    for sharding in ("key", "table"):
        compare(sharding, Adam, rank, size, own_group)
        with mock.patch.object(os, "memfd_create", side_effect=OSError):  # the way between machines
            compare(sharding, MomentumSGD, rank, size, own_group)
    with_ddp(rank)
    for options, hook in DDP_OPTIONS:
        with_options(rank, size, options, hook)
    with_other_losses(rank, size)
    with_clipping(rank, size)
    with_gradients_by_hand(rank, size)
    with_a_gradient_that_is_not_finite(rank)
    with_a_key_beyond_fixed_rows()
    with_a_checkpoint()
    with_an_early_end()
    with_sharded_parameters(size)
    with_other_habits(rank)
    with_two_collections(rank)
    with_other_titles(rank)
    without_a_group()
    sys.stdout.write(f"rank {rank} of {size}: all equal\n")
    trials.run(own_group, 0, 10)


def check_states(shared, alone, rank, size, sharding):
    """A process loads its own state, and its share of the state of one process, and no other state."""
    other = EmbeddingBagCollection(CONFIGS, seed=9, process_group=dist.group.WORLD, sharding=sharding)
    for state in (shared.get_extra_state(), alone.get_extra_state()):
        other.set_extra_state(state)
        for name, table in shared.tables.items():
            assert sorted(other.tables[name].rows()[0].tolist()) == sorted(table.rows()[0].tolist())
    states = [None] * size
    dist.all_gather_object(states, shared.state_dict())
    joined = EmbeddingBagCollection(CONFIGS)
    joined.load_state_dict(join_state_dicts(states))
    for name, table in alone.tables.items():
        np.testing.assert_array_equal(*(np.sort(one.rows()[0]) for one in (joined.tables[name], table)))
        assert len(joined.tables[name].native.sightings()[0]) == len(table.native.sightings()[0])
    [[name, share]] = shared.get_extra_state().items()
    state = {name: share | {"shard": [(rank + 1) % size, size, sharding]}}
    with pytest.raises(ValueError, match="expected the rows of process"):
        other.set_extra_state(state)


class Net(torch.nn.Module):
    def __init__(self, initializer=Uniform(-0.05, 0.05)):  # noqa: B008
        super().__init__()
        config = EmbeddingBagConfig(4, initializer=initializer)
        self.tables = EmbeddingBagCollection({"t": config}, process_group=dist.group.WORLD)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, keys):
        return self.top(self.tables({"t": keys})["t"])


def with_ddp(rank):
    """A module with tables trains in DistributedDataParallel."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        keys = torch.arange(rank, 20, 2)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(keys)[:, 0], (keys > 9).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3, losses


DDP_OPTIONS = [
    ({}, None),
    ({"find_unused_parameters": True}, None),
    ({"gradient_as_bucket_view": True}, None),
    ({"static_graph": True}, None),
    ({}, default_hooks.fp16_compress_hook),
]


def two_tables(names="uv"):
    configs = {name: EmbeddingBagConfig(1, initializer=Constant(0.0)) for name in names}
    tables = EmbeddingBagCollection(configs, process_group=dist.group.WORLD)
    return tables, SGD(tables.parameters(), lr=1.0)


def rows_of(tables, name):
    return dict(zip(*(part.ravel().tolist() for part in tables.tables[name].rows()), strict=True))


def with_options(rank, size, options, hook):
    """The options of DistributedDataParallel change no row."""
    model = torch.nn.parallel.DistributedDataParallel(Net(Constant(0.0)), **options)
    torch.nn.init.ones_(model.module.top.weight)
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(torch.tensor([7, 10 + rank])).sum().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    for key, vector in zip(*model.module.tables.tables["t"].rows(), strict=True):
        np.testing.assert_allclose(vector, -0.5 if key == 7 else -min(0.5, 1 / size), rtol=1e-6)


def with_other_losses(rank, size):
    """The losses of the processes read different tables."""
    tables, optimizer = two_tables()
    pooled = tables({"u": torch.arange(4), "v": torch.arange(4)})
    (pooled["u"].sum() if rank == 0 else 10 * pooled["v"].sum()).backward()
    optimizer.step()
    np.testing.assert_allclose(list(rows_of(tables, "u").values()), -1 / size, rtol=1e-6)
    np.testing.assert_allclose(list(rows_of(tables, "v").values()), -10 * (size - 1) / size, rtol=1e-6)


def with_clipping(rank, size):
    """A norm is that of all processes, or is refused."""
    tables, optimizer = two_tables("u")
    weight = torch.nn.Parameter(torch.tensor(0.0))
    (tables({"u": torch.arange(3)})["u"].sum() + 2 * weight).backward()
    [table] = tables.parameters()
    for of_one_process in (
        lambda: torch.nn.utils.clip_grad_norm_([table, weight], 1.0),
        lambda: table.grad.data.norm(2),
        lambda: table.grad.detach().pow(2).sum(),
        lambda: table.grad.abs().max(),
        lambda: torch.dot(table.grad.flatten(), table.grad.flatten()),
    ):
        with pytest.raises(TypeError, match=r"training\.clip_grad_norm_"):
            of_one_process()
    into = torch.empty(4, 1)
    for collective in (
        lambda: dist.all_reduce(table.grad),
        lambda: dist.all_reduce(torch.cat([weight.grad.reshape(1), table.grad.flatten()])),
        lambda: dist.broadcast(table.grad, 0),
        lambda: dist.all_gather([into, into], table.grad * 2),
        lambda: functional_collectives.all_reduce(table.grad, "sum", dist.group.WORLD),
    ):
        with pytest.raises(TypeError, match=r"mixes the rows of different keys"):
            collective()
    norm = clip_grad_norm_([*tables.parameters(), weight], 1.0)
    optimizer.step()
    torch.testing.assert_close(norm, torch.tensor(7.0).sqrt())
    torch.testing.assert_close(weight.grad, 2 / norm)
    np.testing.assert_allclose(list(rows_of(tables, "u").values()), -1 / norm.item(), rtol=1e-5)


def with_gradients_by_hand(rank, size):
    """Gradients of two batches are combined by their rows."""
    tables, optimizer = two_tables("u")
    [table], saved = tables.parameters(), []
    for keys in (torch.arange(rank, 4), torch.arange(3, 5)):
        optimizer.zero_grad()
        tables({"u": keys})["u"].sum().backward()
        saved.append(table.grad.clone())
    optimizer.zero_grad()
    table.grad = saved[0] + 10 * saved[1]
    optimizer.step()
    read = [sum(key >= rank for rank in range(size)) / size if key < 4 else 0 for key in range(5)]
    expected = {key: -one - 10 * (key >= 3) for key, one in enumerate(read) if key % size == rank}
    assert rows_of(tables, "u") == pytest.approx(expected, rel=1e-5)


def with_a_gradient_that_is_not_finite(rank):
    """Every process sees it, so every GradScaler skips the step."""
    tables, optimizer = two_tables("u")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(tables({"u": torch.arange(8)})["u"].sum() * (np.inf if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert set(rows_of(tables, "u").values()) == {0.0}
    assert scaler.get_scale() == 1.0


def with_a_key_beyond_fixed_rows():
    """The process that asks for the key refuses it, not the process that has the rows."""
    for sharding in ("key", "table"):
        config = EmbeddingBagConfig(1, rows=4)
        tables = EmbeddingBagCollection({"t": config}, process_group=dist.group.WORLD, sharding=sharding)
        with pytest.raises(IndexError, match=r"table 't': expected keys from 0 to 3, got 4 at position 1"):
            tables({"t": torch.tensor([1, 4])})


def with_a_checkpoint():
    """No process knows whether another one has the row of a key."""
    tables, _ = two_tables("u")
    one = torch.ones(1, requires_grad=True)
    out = checkpoint(lambda one: one * tables({"u": torch.tensor([1])})["u"], one, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"table 'u': .* keep the tables out of torch.utils.checkpoint"):
        out.sum().backward()


def with_an_early_end():
    """No process could answer for the rows of a process whose data have ended."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList([two_tables("u")[0], torch.nn.Linear(1, 1)]))
    model.module.forward = lambda keys: model.module[0]({"u": keys})["u"]
    with model.join(), pytest.raises(RuntimeError, match=r"tables u\[1\]: DistributedDataParallel\.join\(\)"):
        model(torch.arange(4))


def with_sharded_parameters(size):
    """The norm is that of the table and of the parameters of ``fully_shard``."""
    tables, _ = two_tables("u")
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    (tables({"u": torch.arange(3)})["u"].sum() + 2 * net(torch.ones(1, 1)).sum()).backward()
    norm = clip_grad_norm_([*tables.parameters(), *net.parameters()], 1.0)
    torch.testing.assert_close(norm, torch.tensor(7.0).sqrt())
    torch.testing.assert_close(net.weight.grad.full_tensor(), (2 / norm).reshape(1, 1))


def with_other_titles(rank):
    """Every message says what it is."""
    processes, one = Processes(dist.group.WORLD), torch.ones(1)
    acts = [
        lambda: processes.total("norms", one),
        lambda: processes.wait("a checkpoint"),
        lambda: processes.from_first("a path", 1),
        lambda: list(processes.to_first("the rows of t", iter(()))),
    ]
    titles = ["sum of norms 1", "a checkpoint", "a path", "the rows of t"]
    for number in range(len(acts)):
        other = (number + 1) % len(acts)
        message = f"got {titles[number]} in process 0 and {titles[other]} in process 1"
        with pytest.raises(RuntimeError, match=message.replace(" 1 in", r" \d in").replace("norms 1", r"norms \d")):
            acts[number if rank == 0 else other]()


def with_two_collections(rank):
    """They have tables of the same names, and the first one has been used before."""
    (one, _), (other, _) = two_tables("u"), two_tables("u")
    keys = {"u": torch.arange(4)}
    one(keys)
    with pytest.raises(RuntimeError, match=r"tables u\[1\] in process 1, which are tables of another collection"):
        (other if rank else one)(keys)


def with_other_habits(rank):
    """A process that freezes a table, or forgets zero_grad, is named."""
    keys = dict.fromkeys("uv", torch.arange(4))
    tables, _ = two_tables()
    tables.table_1.requires_grad_(rank == 0)
    with pytest.raises(RuntimeError, match=r"without new rows of tables v\[1\] in process 1"):
        tables(keys)

    tables, optimizer = two_tables("u")
    tables({"u": keys["u"]})["u"].sum().backward()
    optimizer.step()
    optimizer.step()
    assert rows_of(tables, "u") == dict.fromkeys(range(rank, 4, dist.get_world_size()), -2.0)
    if rank == 0:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"added to the gradients of tables u\[1\] in process 1"):
        optimizer.step()


def without_a_group():
    """Each process would train tables of its own."""
    tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(1)})
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList([tables, torch.nn.Linear(1, 1)]))
    with pytest.raises(RuntimeError, match=r"expected process_group=torch.distributed.group.WORLD"):
        model.module[0]({"t": torch.tensor([1])})
    fixed = EmbeddingBagCollection({"t": EmbeddingBagConfig(1, rows=2)}).eval()
    with pytest.raises(RuntimeError, match="table 't': expected tables that the processes share"):
        fixed({"t": torch.tensor([1])})["t"].sum().backward()
    with pytest.raises(RuntimeError, match="init: expected one process with several replicas, got"):
        embedding_plugin.init([0])


if __name__ == "__main__":
    main()
