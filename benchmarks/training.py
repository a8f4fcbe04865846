"""Samples per second of training against PyTorch's sparse embeddings, on the CPU.

Model: 26 slots with one key each from one table of 16 columns, 13 dense features, one hidden layer of 128. Batches of
4,096 samples; their keys are uniform over the rows, which all exist. Adam moves the rows that a batch reads.

The peer is the same network in PyTorch: ``EmbeddingBag(sparse=True)`` with ``SparseAdam``, and ``Adam`` for the other
weights. It gets row numbers instead of keys. Both use the same number of threads, and take turns.

``clipped`` also clips the norm of all gradients, which reads the gradient of the table. We train the peer's network
with an ``EmbeddingBagCollection``.

Memory is what the process takes for each row: its weights, both moments of Adam, and with us its key.

``fused`` compares the table alone with FBGEMM's table for the CPU: lookup, backward pass and step, with the same
batches. Keys are row numbers on both sides. FBGEMM's backward pass is its step. This part needs ``fbgemm-gpu-cpu``.
"""

import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish, take_turns
from kernels.host import look_up_bags
from serving.model.graph import parse_graph
from training.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from training.model.ctr_model import CtrModel
from training.optimizers import SGD, AdaGrad, Adam, RowWiseAdaGrad
from training.samples import Bags, Samples

SLOTS, DENSE, DIM, HIDDEN, BATCH = 26, 13, 16, 128, 4096
LEARNING_RATE, MOST_NORM = 0.001, 0.01
FUSED = {"EXACT_SGD": SGD, "EXACT_ADAGRAD": AdaGrad, "EXACT_ROWWISE_ADAGRAD": RowWiseAdaGrad}
GRAPH = {
    "layers": [
        {
            "name": "data",
            "type": "Data",
            "label": {"top": "label", "label_dim": 1},
            "dense": {"top": "dense", "dense_dim": DENSE},
            "sparse": [
                {"top": "keys", "type": "DistributedSlot", "max_feature_num_per_sample": SLOTS, "slot_num": SLOTS}
            ],
        },
        {
            "name": "table",
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "keys",
            "top": "table",
            "sparse_embedding_hparam": {"embedding_vec_size": DIM, "combiner": 0},
        },
        {"name": "flat", "type": "Reshape", "bottom": "table", "top": "flat", "leading_dim": SLOTS * DIM},
        {"name": "concat", "type": "Concat", "bottom": ["flat", "dense"], "top": "concat"},
        {"name": "fc1", "type": "InnerProduct", "bottom": "concat", "top": "fc1", "fc_param": {"num_output": HIDDEN}},
        {"name": "relu", "type": "ReLU", "bottom": "fc1", "top": "relu"},
        {"name": "fc2", "type": "InnerProduct", "bottom": "relu", "top": "fc2", "fc_param": {"num_output": 1}},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc2", "label"], "top": "loss"},
    ]
}


class Network(torch.nn.Module):
    """The same network in PyTorch, with a table that a subclass makes."""

    def __init__(self, table, sparse):
        super().__init__()
        self.table = table
        self.net = torch.nn.Sequential(
            torch.nn.Linear(SLOTS * DIM + DENSE, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
        )
        self._sparse = sparse(table.parameters(), lr=LEARNING_RATE)
        self._dense = torch.optim.Adam(self.net.parameters(), lr=LEARNING_RATE, eps=1e-7)
        self._loss = torch.nn.BCEWithLogitsLoss()

    def train_batch(self, samples, clips=False):
        """Take one step and return the loss."""
        dense = torch.from_numpy(samples.dense)
        pooled = self.pool(torch.from_numpy(samples.bags.keys))
        logits = self.net(torch.cat([pooled.reshape(len(samples), -1), dense], dim=1))
        loss = self._loss(logits, torch.from_numpy(samples.labels))
        self._sparse.zero_grad()
        self._dense.zero_grad()
        loss.backward()
        if clips:
            self.clip()
        self._sparse.step()
        self._dense.step()
        return float(loss.detach())


class Peer(Network):
    """PyTorch's sparse embeddings."""

    def __init__(self, rows):
        table = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
        torch.nn.init.uniform_(table.weight, -0.05, 0.05)
        super().__init__(table, partial(torch.optim.SparseAdam, eps=1e-7))

    def pool(self, keys):
        """Look up one row per bag."""
        return self.table(keys, torch.arange(len(keys)))

    def clip(self):
        """Clip the norm. PyTorch's own function takes no sparse gradients, so it gets their values."""
        weight = self.table.weight
        weight.grad = weight.grad.coalesce()
        gradients = [weight.grad.values(), *(parameter.grad for parameter in self.net.parameters())]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(torch.clamp(MOST_NORM / (norm + 1e-6), max=1.0))


class OurNetwork(Network):
    """An ``EmbeddingBagCollection``."""

    def __init__(self, rows):
        super().__init__(EmbeddingBagCollection({"t": EmbeddingBagConfig(DIM)}, seed=0), Adam)
        make_rows(self.table.tables["t"], rows)

    def pool(self, keys):
        """Look up one row per bag."""
        return self.table({"t": keys})["t"]

    def clip(self):
        """Clip the norm."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), MOST_NORM)


def draw(rows, batches, rng):
    """Batches of samples with a planted truth: a key's click rate depends on the key."""
    for _ in range(batches):
        keys = rng.integers(0, rows, (BATCH, SLOTS))
        score = ((keys * 2654435761 % 1000) / 1000 - 0.5).sum(axis=1, keepdims=True)
        labels = (rng.random((BATCH, 1)) < 1 / (1 + np.exp(-score))).astype(np.float32)
        yield Samples(labels, rng.standard_normal((BATCH, DENSE), dtype=np.float32), Bags.one_key_each(keys))


def memory_bytes():
    """The memory of this process now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def make_rows(table, rows):
    """Give every key its row before the clock runs."""
    for first in range(0, rows, 100_000):
        keys = np.arange(first, min(rows, first + 100_000))
        look_up_bags([table.native], [keys], [None], ["sum"], [None], [1], trains=[True])


def fused(rows, rounds, batches):
    """Records of the speed against FBGEMM, one per optimizer; none if FBGEMM is not installed."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        print("fbgemm-gpu-cpu is not installed, so there is no comparison with it")
        return []
    records, rng = [], np.random.default_rng(0)
    offsets = torch.arange(BATCH * SLOTS + 1)
    for name, optimizer in FUSED.items():
        ours = EmbeddingBagCollection({"t": EmbeddingBagConfig(DIM, rows=rows)}, seed=0)
        stepping = optimizer(ours.parameters(), lr=LEARNING_RATE)
        specs = [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)]
        peer = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType[name], learning_rate=LEARNING_RATE, eps=1e-7, pooling_mode=PoolingMode.SUM
        )
        peer.init_embedding_weights_uniform(-0.05, 0.05)

        def our_step(keys, gradient, ours=ours, stepping=stepping):
            stepping.zero_grad()
            ours({"t": keys})["t"].backward(gradient)
            stepping.step()

        def peer_step(keys, gradient, peer=peer):
            peer(keys, offsets).backward(gradient)

        def draw_batch():
            return torch.from_numpy(rng.integers(0, rows, BATCH * SLOTS)), torch.randn(BATCH * SLOTS, DIM)

        calls = [[draw_batch() for _ in range(batches)] for _ in range(rounds + 1)]
        pairs = take_turns(our_step, peer_step, calls)[1:]  # the first warms up
        speeds = [tuple(batches * BATCH / seconds for seconds in pair) for pair in pairs]
        params = {"rows": rows, "batch": BATCH, "slots": SLOTS, "dim": DIM, "optimizer": name}
        records.append(Record.of("training.fused_samples_per_s", params, "1/s", speeds))
    return records


def compare(rows, rounds, batches):
    """Records of the speed, of the loss and of the memory at one number of rows."""
    ours = CtrModel(parse_graph(GRAPH, "graph.json"), seed=0)
    before = memory_bytes()
    make_rows(ours.tables[0], rows)
    memory = [memory_bytes() - before]
    torch.manual_seed(0)
    before = memory_bytes()
    peer = Peer(rows)
    rng = np.random.default_rng(0)
    train = {"ours": lambda batch: ours.train_batch(batch, LEARNING_RATE), "peer": peer.train_batch}
    speeds, losses = [], []
    for round_number in range(rounds + 1):
        data = list(draw(rows, batches, rng))
        if not round_number:
            peer.train_batch(data[0])  # makes the moments
            memory.append(memory_bytes() - before)
        speed, loss = {}, {}
        for name, step in train.items():
            began = time.perf_counter()
            loss[name] = sum(map(step, data)) / batches
            speed[name] = batches * BATCH / (time.perf_counter() - began)
        if round_number:  # the first warms up
            speeds.append((speed["ours"], speed["peer"]))
            losses.append((loss["ours"], loss["peer"]))
    params = {"rows": rows, "batch": BATCH, "slots": SLOTS, "dim": DIM, "threads": torch.get_num_threads()}
    clipping = OurNetwork(rows)
    calls = [[(batch, True) for batch in draw(rows, batches, rng)] for _ in range(rounds + 1)]
    pairs = take_turns(clipping.train_batch, peer.train_batch, calls)[1:]  # the first warms up
    clipped = [tuple(batches * BATCH / seconds for seconds in pair) for pair in pairs]
    return [
        Record.of("training.samples_per_s", params, "1/s", speeds),
        Record.of("training.clipped_samples_per_s", params, "1/s", clipped),
        Record.of("training.loss", params, "", losses),
        Record.of("training.memory_bytes_per_row", params, "bytes", [tuple(taken / rows for taken in memory)]),
    ]


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    sizes, rounds, batches = ([10_000], 1, 2) if options.quick else ([1_000_000, 10_000_000], 5, 20)
    records = []
    for rows in sizes:
        records += compare(rows, rounds, batches)
    records += fused(sizes[0], rounds, batches)
    publish(records, options.json)


if __name__ == "__main__":
    main()
