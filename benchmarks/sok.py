"""SparseOperationKit's ``lookup_sparse`` against ``torch.nn.EmbeddingBag(sparse=True)``, on the CPU.

26 tables of 100,000 vectors of 16 floats, batches of 4,096 rows, and 1 to 3 ids per row and table, combined by sum.
``lookup_sparse`` gets the ids of each table as a ``SparseTensor``, and looks up all tables in one call. The peer gets
ids and offsets, one call per table.

- ``passes``: forward and backward. A gradient of ``sok.Variable`` has each row once, and the rows are sorted. So the
  peer's gradients are coalesced.
- ``repeated_rows``: the same, and the peer's gradients stay as they are: one row for each id.
- ``step``: forward, backward and a step of Adam: ``DynamicVariable`` and our Adam against ``SparseAdam``. Our tables
  find rows by key, the peer's by position.

Both use the same number of threads, and take turns.
"""

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish, take_turns
from kernels.host import set_lookup_threads
from training import sok
from training.optimizers import Adam

TABLES, BATCH, DIM, MOST_IDS = 26, 4096, 16, 3
LEARNING_RATE = 0.01


def draw(rng, rows_of_table):
    """The ids of each table in one batch: as sparse tensors, and as ids and offsets."""
    sparse, jagged = [], []
    for _ in range(TABLES):
        counts = rng.integers(1, MOST_IDS + 1, BATCH)
        ids = torch.from_numpy(rng.integers(0, rows_of_table, counts.sum()))
        rows = np.repeat(np.arange(BATCH), counts)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = torch.from_numpy(np.stack([rows, columns], axis=1))
        sparse.append(sok.SparseTensor(indices, ids, [BATCH, MOST_IDS]))
        jagged.append((ids, torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))))
    return sparse, jagged


class Ours:
    """One call for all tables."""

    def __init__(self, variables, optimizer):
        self._variables = variables
        self._optimizer = optimizer(variables, lr=LEARNING_RATE)

    def passes(self, ids, gradients):
        self._optimizer.zero_grad()
        hotness, combiners = [MOST_IDS] * TABLES, ["sum"] * TABLES
        vectors = sok.lookup_sparse(self._variables, ids[0], hotness=hotness, combiners=combiners)
        torch.autograd.backward(vectors, gradients)

    def step(self, ids, gradients):
        self.passes(ids, gradients)
        self._optimizer.step()


class Peer:
    """One module per table."""

    def __init__(self, tables):
        options = {"freeze": False, "mode": "sum", "sparse": True, "include_last_offset": True}
        self._bags = [torch.nn.EmbeddingBag.from_pretrained(table.clone(), **options) for table in tables]
        self._optimizer = torch.optim.SparseAdam([bag.weight for bag in self._bags], lr=LEARNING_RATE)

    def repeated_rows(self, ids, gradients):
        self._optimizer.zero_grad()
        vectors = [bag(*one) for bag, one in zip(self._bags, ids[1], strict=True)]
        torch.autograd.backward(vectors, gradients)

    def passes(self, ids, gradients):
        self.repeated_rows(ids, gradients)
        for bag in self._bags:
            bag.weight.grad = bag.weight.grad.coalesce()

    def step(self, ids, gradients):
        self.repeated_rows(ids, gradients)
        self._optimizer.step()


def dynamic(rows):
    """Variables with all rows, which exist before the clock runs."""
    variables = [sok.DynamicVariable(DIM) for _ in range(TABLES)]
    for variable in variables:
        variable.set_rows(np.arange(rows), np.zeros((rows, DIM), np.float32))
    return variables


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rows, rounds, batches = (1_000, 1, 1) if options.quick else (100_000, 15, 4)
    threads = torch.get_num_threads()
    set_lookup_threads(threads)
    sok.init()
    rng = np.random.default_rng(0)
    tables = torch.randn(TABLES, rows, DIM, generator=torch.Generator().manual_seed(0))
    gradients = list(torch.randn(TABLES, BATCH, DIM, generator=torch.Generator().manual_seed(1)))
    data = [[(draw(rng, rows), gradients) for _ in range(batches)] for _ in range(rounds + 1)]
    params = {"rows": rows, "batch": BATCH, "tables": TABLES, "dim": DIM, "threads": threads}
    peer, static = Peer(tables), Ours([sok.Variable(table) for table in tables], torch.optim.SparseAdam)
    sides = {
        "passes": (static.passes, peer.passes),
        "repeated_rows": (static.passes, peer.repeated_rows),
        "step": (Ours(dynamic(rows), Adam).step, peer.step),
    }
    records = []
    for name, both in sides.items():
        seconds = take_turns(*both, data)[1:]  # the first round warms up
        speeds = [(batches * BATCH / ours, batches * BATCH / theirs) for ours, theirs in seconds]
        records.append(Record.of(f"sok.{name}", params, "1/s", speeds))
    publish(records, options.json)


if __name__ == "__main__":
    main()
