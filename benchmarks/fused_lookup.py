"""Fused lookups of DeepRec's front end against the same steps as plain PyTorch operations, on the CPU.

26 features, batches of 4,096 samples, and 0 to 5 ids per sample and feature, of which one in 20 is invalid. Each
feature has a table of 100,000 vectors of 16 floats. A lookup gives each sample the mean of its valid ids' vectors.

- ``step``: ``input_layer``, which is one call for all features, the backward pass, and a step of SGD. Its tables find
  rows by key, the peer's by position.
- ``tensors``: ``fused_embedding_lookup_sparse_v2``, one call per feature, and the backward pass.

The peer prunes ids, fills empty rows, makes ids unique, gathers vectors, adds and divides. Its gradients are sparse.
Both use the same number of threads, and take turns.
"""

from functools import partial

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish, take_turns
from kernels.host import set_lookup_threads
from training import deeprec
from training.optimizers import SGD

FEATURES, BATCH, DIM, MOST_IDS = 26, 4096, 16, 5
LEARNING_RATE = 0.01
INVALID_RATIO = 0.05
NAMES = [f"C{number + 1:02}" for number in range(FEATURES)]


def draw(rng, rows_of_table):
    """The ids of each feature in one batch."""
    features = {}
    for name in NAMES:
        counts = rng.integers(0, MOST_IDS + 1, BATCH)
        ids = rng.integers(0, rows_of_table, counts.sum())
        ids[rng.random(len(ids)) < INVALID_RATIO] = -1
        rows = np.repeat(np.arange(BATCH), counts)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = torch.from_numpy(np.stack([rows, columns], axis=1))
        features[name] = deeprec.SparseTensor(indices, torch.from_numpy(ids), [BATCH, MOST_IDS])
    return features


def compose(weight, ids, fills):
    """The lookup as plain PyTorch operations."""
    is_valid = ids.values >= 0
    rows, values = ids.indices[is_valid, 0], ids.values[is_valid]
    if fills:
        empty = (torch.bincount(rows, minlength=BATCH) == 0).nonzero()[:, 0]
        rows, values = torch.cat([rows, empty]), torch.cat([values, torch.zeros_like(empty)])
    unique, inverse = torch.unique(values, return_inverse=True)
    vectors = torch.nn.functional.embedding(unique, weight, sparse=True)
    sums = vectors.new_zeros(BATCH, DIM).index_add(0, rows, vectors.index_select(0, inverse))
    return sums / torch.bincount(rows, minlength=BATCH).clamp(min=1)[:, None]


class Tensors:
    """One tensor per feature."""

    def __init__(self, rows, look_up):
        generator = torch.Generator().manual_seed(0)
        self._tensors = [torch.nn.Parameter(torch.randn(rows, DIM, generator=generator)) for _ in NAMES]
        self._optimizer = torch.optim.SGD(self._tensors, lr=LEARNING_RATE)
        self._look_up = look_up

    def passes(self, features, gradients):
        """A forward and a backward pass."""
        self._optimizer.zero_grad()
        vectors = [self._look_up(tensor, features[name]) for tensor, name in zip(self._tensors, NAMES, strict=True)]
        torch.autograd.backward(vectors, gradients)

    def step(self, features, gradients):
        self.passes(features, gradients)
        self._optimizer.step()


class Columns:
    """One column per feature."""

    def __init__(self, rows):
        columns = [deeprec.categorical_column_with_embedding(name) for name in NAMES]
        self._columns = [deeprec.embedding_column(column, DIM, do_fusion="v2") for column in columns]
        self._optimizer = SGD([column.parameter for column in self._columns], lr=LEARNING_RATE)
        every = torch.arange(rows)
        ids = deeprec.SparseTensor(torch.stack([every, every], dim=1), every, [rows, rows])
        deeprec.input_layer(dict.fromkeys(NAMES, ids), self._columns)  # makes all rows before the clock runs

    def step(self, features, gradients):
        self._optimizer.zero_grad()
        vectors = deeprec.input_layer(features, self._columns)
        torch.autograd.backward(vectors.split(DIM, dim=1), gradients)
        self._optimizer.step()


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rows, rounds, batches = (1_000, 1, 1) if options.quick else (100_000, 15, 4)
    threads = torch.get_num_threads()
    set_lookup_threads(threads)
    rng = np.random.default_rng(0)
    gradients = list(torch.randn(FEATURES, BATCH, DIM, generator=torch.Generator().manual_seed(1)))
    data = [[(draw(rng, rows), gradients) for _ in range(batches)] for _ in range(rounds + 1)]
    fused = partial(deeprec.fused_embedding_lookup_sparse_v2, prune=True)
    pairs = {
        "step": (Columns(rows).step, Tensors(rows, partial(compose, fills=False)).step),
        "tensors": (Tensors(rows, fused).passes, Tensors(rows, partial(compose, fills=True)).passes),
    }
    params = {"rows": rows, "batch": BATCH, "features": FEATURES, "dim": DIM, "threads": threads}
    records = []
    for name, sides in pairs.items():
        seconds = take_turns(*sides, data)[1:]  # the first round warms up
        speeds = [(batches * BATCH / ours, batches * BATCH / peer) for ours, peer in seconds]
        records.append(Record.of(f"fused_lookup.{name}", params, "1/s", speeds))
    publish(records, options.json)


if __name__ == "__main__":
    main()
