"""Batches for tests. Without PyTorch, so a data loader starts fast."""

import numpy as np

from training.persia.prelude import PyPersiaBatchData

SLOTS = {"a": {"dim": 3}, "b": {"dim": 2, "sqrt_scaling": True}, "c": {"dim": 3, "embedding_summation": False}}


def batch_of(dense, bags, *targets):
    """Make a batch of arrays."""
    batch = PyPersiaBatchData()
    for array in dense:
        batch.add_dense([np.asarray(array, np.float32)])
    batch.add_sparse([(name, [np.array(bag, np.uint64) for bag in of_feature]) for name, of_feature in bags.items()])
    for target in targets:
        batch.add_target(np.asarray(target, np.float32))
    return batch


def draw(count, samples=4, seed=0):
    """Ragged batches: dense, bags, target."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        bags = {name: [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(samples)] for name in SLOTS}
        batches.append((rng.normal(size=(samples, 2)), bags, rng.integers(0, 2, (samples, 1))))
    return batches


def batches_of(drawn):
    """Make them batches of Persia."""
    return [batch_of([dense], bags, target) for dense, bags, target in drawn]
