"""Run in several processes: random training in shared tables, against one process that does the work of all.

In some trials a process does something else than the others, and in the last one it ends. Then every other process has
to raise an error that says so. Each process checks itself.
"""

import logging
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.training.embedding.oracle import flat
from training import EmbeddingBagCollection, EmbeddingBagConfig, clip_grad_norm_
from training.optimizers import SGD, Adam, MomentumSGD

CONFIGS = {
    "plain": EmbeddingBagConfig(3),
    "shared": EmbeddingBagConfig(1, "mean", features=("viewed", "bought")),
    "rare": EmbeddingBagConfig(2, admit_after=2),
    "fixed": EmbeddingBagConfig(2, rows=12),
}
FEATURES = ("plain", "viewed", "bought", "rare", "fixed")
STEPS = 4
NAMED = "expected the same lookups and steps in every process"
EXPECTED = {
    "": ["equal"],
    "skips a step": [NAMED],
    "looks up twice": [NAMED],
    "reads a gradient": [NAMED, "equal"],  # the others may read it too
    "ends": ["another process has ended"],
}


class Trial:
    """The same random decisions in every process."""

    def __init__(self, seed, own_group):
        self.rng = np.random.default_rng(seed)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sharding, optimizer = self.one_of("key", "table"), self.one_of(SGD, Adam, MomentumSGD)
        self.tables = EmbeddingBagCollection(CONFIGS, seed=seed, process_group=dist.group.WORLD, sharding=sharding)
        self.alone = EmbeddingBagCollection(CONFIGS, seed=seed, process_group=own_group)
        self.both = [
            (one, optimizer(one.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0))
            for one in (self.tables, self.alone)
        ]

    def one_of(self, *values):
        return values[self.rng.integers(len(values))]

    def does(self, probability):
        return self.rng.random() < probability

    def train(self, fault):
        fault_step, culprit = self.rng.integers(STEPS - 1), self.rng.integers(self.size)
        for step in range(STEPS):
            is_culprit = fault and (step, self.rank) == (fault_step, culprit)
            if is_culprit and fault == "ends":
                sys.stdout.flush()
                os._exit(0)
            self.step(fault if is_culprit else "")

    def step(self, fault):
        zeroes_late, self.scales, clips = self.does(0.5), self.does(0.3), self.does(0.3)
        if not zeroes_late:
            self.zero_grad()
        has_gradient = False
        for number in range(self.one_of(1, 1, 2)):
            bags = [self.draw_bags() for _ in range(self.size)]
            pooled = self.tables(bags[self.rank])
            self.alone.train()({name: joined([bag.get(name) for bag in bags]) for name in FEATURES})  # makes the rows
            if fault == "looks up twice":
                self.tables({})
            if zeroes_late and not number:
                self.zero_grad()
            terms = self.draw_terms(bags)
            has_gradient |= bool(terms)
            self.backward(pooled, bags, terms)
        if fault == "reads a gradient":
            next(self.tables.parameters()).grad  # noqa: B018
        if fault != "skips a step":
            self.move(clips, has_gradient)

    def draw_bags(self):
        """The features that a process has in a step, and their bags."""
        bags = {}
        for name in FEATURES:
            if self.does(0.7):
                keys, offsets = flat([self.rng.integers(0, 12, n).tolist() for n in self.rng.integers(0, 3, 3)])
                bags[name] = torch.tensor(keys, dtype=torch.int64), torch.tensor(offsets)
        return bags

    def draw_terms(self, bags):
        """The terms of the losses: processes, their features, and factors. A process may have none."""
        terms = []
        for rank, of_rank in enumerate(bags):
            has_loss, is_infinite = self.does(0.8), self.scales and self.does(0.05)
            for name in of_rank:
                factor = np.inf if is_infinite else self.rng.uniform(0.5, 1)
                if self.does(0.6) and has_loss:
                    terms.append((rank, name, factor))
        return terms

    def backward(self, pooled, bags, terms):
        self.alone.eval()
        whole = [factor * self.alone({name: bags[rank][name]})[name].square().sum() for rank, name, factor in terms]
        mine = [factor * pooled[name].square().sum() for rank, name, factor in terms if rank == self.rank]
        for (_, _, scaler), loss in zip(self.both, (sum(mine), sum(whole) / self.size), strict=True):
            scaled = scaler.scale(torch.as_tensor(loss)) if self.scales else loss
            if isinstance(loss, torch.Tensor):
                scaled.backward()

    def move(self, clips, has_gradient):
        for tables, optimizer, scaler in self.both:
            if self.scales and has_gradient:
                scaler.unscale_(optimizer)
            if clips:
                clip_grad_norm_(tables.parameters(), 0.5)
            if not self.scales:
                optimizer.step()
            elif has_gradient:
                scaler.step(optimizer)
                scaler.update()

    def zero_grad(self):
        for _, optimizer, _ in self.both:
            optimizer.zero_grad()

    def compare(self):
        for (name, table), other in zip(self.tables.tables.items(), self.alone.tables.values(), strict=True):
            keys, vectors = other.rows()
            mine = self.tables.owner_of(name, keys) == self.rank
            own_keys, own = table.rows()
            np.testing.assert_array_equal(np.sort(own_keys), np.sort(keys[mine]))
            np.testing.assert_allclose(
                own[np.argsort(own_keys)], vectors[mine][np.argsort(keys[mine])], rtol=1e-3, atol=1e-4
            )


def joined(bags):
    """The bags of all processes, in their order. None: a process has none."""
    have = [bag for bag in bags if bag is not None]
    lengths = [offsets.diff() for _, offsets in have]
    keys = torch.cat([torch.zeros(0, dtype=torch.int64), *(keys for keys, _ in have)])
    return keys, torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0)


def run(own_group, first, count):
    """Run trials in this process, which does not return after the last one: its group cannot end in order."""
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        fault = str(rng.choice(list(EXPECTED)[:4], p=[0.7, 0.1, 0.1, 0.1])) if seed < first + count - 1 else "ends"
        way = mock.patch.object(os, "memfd_create", side_effect=OSError) if rng.random() < 0.3 else nullcontext()
        with way:  # without memory, as between machines
            trial = Trial(seed, own_group)
            try:
                trial.train(fault)
            except RuntimeError as err:
                result = f"named: {err}"
            else:
                trial.compare()
                result = "equal"
        assert any(one in result for one in EXPECTED[fault]), (seed, fault, result)
        sys.stdout.write(f"seed {seed} rank {trial.rank}: {result}\n")
    sys.stdout.flush()
    os._exit(0)


def wait_for_a_silent_process(rank, size):
    """A process is late, which is logged, and then it never comes."""
    tables = EmbeddingBagCollection(CONFIGS, process_group=dist.group.WORLD)
    for seconds in (0, 12, 30):
        if rank == size - 1:
            time.sleep(seconds)
        try:
            tables({"plain": torch.tensor([1])})
        except RuntimeError as err:
            sys.stdout.write(f"rank {rank}: {err}\n")
    sys.stdout.flush()
    os._exit(0)


def main(first, count):
    logging.basicConfig(stream=sys.stdout)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    own_group, _ = dist.new_subgroups(1)
    if int(count):
        run(own_group, int(first), int(count))
    wait_for_a_silent_process(dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    main(*sys.argv[1:])
