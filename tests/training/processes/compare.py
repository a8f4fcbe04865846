"""Run by torchrun: lookups in shared tables against the same lookups of one process. Each process checks itself."""

import gc
import os
import sys
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.training.embedding.oracle import flat
from training import EmbeddingBagCollection, EmbeddingBagConfig
from training.embedding import Constant
from training.optimizers import Adam, MomentumSGD

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


def compare(sharding, optimizer, rank, size):
    shared = EmbeddingBagCollection(CONFIGS, seed=4, process_group=dist.group.WORLD, sharding=sharding)
    alone = EmbeddingBagCollection(CONFIGS, seed=4)
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
    for sharding in ("key", "table"):
        compare(sharding, Adam, rank, size)
        with mock.patch.object(os, "memfd_create", side_effect=OSError):  # the way between machines
            compare(sharding, MomentumSGD, rank, size)
    with_ddp(rank)
    sys.stdout.write(f"rank {rank} of {size}: all equal\n")
    gc.collect()  # DistributedDataParallel refers to itself and to the group, which then would not end its threads
    dist.destroy_process_group()


def check_states(shared, alone, rank, size, sharding):
    """A process loads its own state, and its share of the state of one process, and no other state."""
    other = EmbeddingBagCollection(CONFIGS, seed=9, process_group=dist.group.WORLD, sharding=sharding)
    for state in (shared.get_extra_state(), alone.get_extra_state()):
        other.set_extra_state(state)
        for name, table in shared.tables.items():
            assert sorted(other.tables[name].rows()[0].tolist()) == sorted(table.rows()[0].tolist())
    state = shared.get_extra_state() | {"shard": [(rank + 1) % size, size, sharding]}
    try:
        other.set_extra_state(state)
    except ValueError as err:
        assert "expected the rows of process" in str(err)  # noqa: PT017
    else:
        raise AssertionError("another process's rows were loaded")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection({"t": EmbeddingBagConfig(4)}, process_group=dist.group.WORLD)
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


if __name__ == "__main__":
    main()
