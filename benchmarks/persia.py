"""Samples per second of Persia's roles against the same training in one process, with the loss of both, on the CPU.

Model: 26 features with one sign each and 16 columns, 13 dense features, one hidden layer of 128. Batches of 4,096
samples; low signs are frequent. Adagrad moves the rows, Adam the dense network.

Ours has two embedding workers, two embedding servers, a data loader and an NN worker, all on this machine. The peer is
one process with an ``EmbeddingBagCollection``. Both have their batches in memory before the clock runs, and take turns.
``staleness`` is the most batches that are looked up and whose gradients are not applied; the peer's is 1.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish

SLOTS, DENSE, DIM, HIDDEN, BATCH = 26, 13, 16, 128, 4096
SPARSE_RATE, DENSE_RATE = 0.05, 0.01
ROOT = Path(__file__).parents[1]
VARIABLE = "HOTROW_PERSIA_BENCHMARK"  # the settings of the scripts


def draw(rows, batches, seed):
    """Dense features, signs and labels, with a planted truth: a sign's click rate depends on the sign."""
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        signs = (rows * rng.random((BATCH, SLOTS)) ** 3).astype(np.uint64)
        score = ((signs * np.uint64(2654435761) % np.uint64(1000)) / 1000 - 0.5).sum(axis=1, keepdims=True)
        labels = (rng.random((BATCH, 1)) < 1 / (1 + np.exp(-score))).astype(np.float32)
        yield rng.standard_normal((BATCH, DENSE), dtype=np.float32), signs, labels


class Net(torch.nn.Module):
    """The dense network."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(SLOTS * DIM + DENSE, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
        )

    def forward(self, dense, sparse):
        return self.layers(torch.cat([*sparse, *dense], dim=1))


class Clock:
    """Times the batches after the warm-up."""

    def __init__(self, warm_up):
        self._warm_up = warm_up
        self._losses = []
        self._began = 0.0

    def count(self, loss):
        """Take the loss of a batch."""
        self._losses.append(loss.item())
        if len(self._losses) == self._warm_up:
            self._began = time.perf_counter()

    def result(self):
        """Samples per second, and the mean loss."""
        timed = self._losses[self._warm_up :]
        return BATCH * len(timed) / (time.perf_counter() - self._began), sum(timed) / len(timed)


def make_net():
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.Adam(net.parameters(), DENSE_RATE), torch.nn.BCEWithLogitsLoss()


def load():
    """Persia's data loader."""
    from training.persia.ctx import init_backend
    from training.persia.prelude import PyPersiaBatchData

    settings = json.loads(os.environ[VARIABLE])
    batches = []
    for dense, signs, labels in draw(settings["rows"], settings["batches"], settings["seed"]):
        batch = PyPersiaBatchData()
        batch.add_dense_f32(dense)
        batch.add_sparse((f"f{slot}", list(signs[:, slot : slot + 1])) for slot in range(SLOTS))
        batch.add_target(labels)
        batches.append(batch)
    backend = init_backend()
    for batch in batches:
        backend.send_data(batch)


def train():
    """Persia's NN worker."""
    from training.persia.ctx import TrainCtx
    from training.persia.sparse.optim import Adagrad

    settings = json.loads(os.environ[VARIABLE])
    net, optimizer, loss_of = make_net()
    clock = Clock(settings["warm_up"])
    context = TrainCtx(
        sparse_optimizer=Adagrad(SPARSE_RATE),
        port=int(os.environ["TRAINER_PORT"]),
        data_queue_size=int(os.environ["FORWARD_QUEUE_SIZE"]),
        embedding_staleness=settings["staleness"],
    )
    with context:
        for number, data in enumerate(context.data_loader()):
            (dense, sparse), target = context.prepare_features(data)
            loss = loss_of(net(dense, sparse), target)
            optimizer.zero_grad()
            loss.backward()
            context.on_after_backward(1.0, number)
            optimizer.step()
            clock.count(loss)
    Path(settings["result"]).write_text(json.dumps(clock.result()), encoding="utf-8")


def one_process(rows, batches, warm_up, seed):
    """Samples per second and the mean loss of the peer."""
    from training import EmbeddingBagCollection, EmbeddingBagConfig
    from training.embedding import Uniform
    from training.optimizers import AdaGrad

    data = list(draw(rows, batches, seed))
    config = EmbeddingBagConfig(DIM, initializer=Uniform(-0.01, 0.01))
    tables = EmbeddingBagCollection({f"f{slot}": config for slot in range(SLOTS)})
    net, optimizer, loss_of = make_net()
    sparse_optimizer = AdaGrad(tables.parameters(), SPARSE_RATE, 1e-2, 1e-10)
    clock = Clock(warm_up)
    for dense, signs, labels in data:
        keys = torch.from_numpy(signs.astype(np.int64))
        vectors = tables({f"f{slot}": keys[:, slot] for slot in range(SLOTS)})
        loss = loss_of(net([torch.from_numpy(dense)], vectors.values()), torch.from_numpy(labels))
        for one in (optimizer, sparse_optimizer):
            one.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        optimizer.step()
        clock.count(loss)
    return clock.result()


def several_roles(rows, batches, warm_up, seed, staleness):
    """Samples per second and the mean loss of ours."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slots = {f"f{slot}": {"dim": DIM} for slot in range(SLOTS)}
        (folder / "embedding.yml").write_text(json.dumps({"slots_config": slots}), encoding="utf-8")
        (folder / "global.yml").write_text("{}", encoding="utf-8")
        for script in ("load", "train"):
            text = f"from benchmarks.persia import {script}\n\n{script}()\n"
            (folder / f"{script}.py").write_text(text, encoding="utf-8")
        settings = {"rows": rows, "batches": batches, "warm_up": warm_up, "seed": seed, "staleness": staleness}
        settings["result"] = str(folder / "result.json")
        command = [sys.executable, "-m", "training.persia", "run", "--embedding-workers=2", "--embedding-servers=2"]
        command += [f"--embedding-config={folder / 'embedding.yml'}", f"--global-config={folder / 'global.yml'}"]
        command += [f"--data-loader={folder / 'load.py'}", f"--nn-worker={folder / 'train.py'}"]
        environment = {**os.environ, VARIABLE: json.dumps(settings)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return json.loads(Path(settings["result"]).read_text(encoding="utf-8"))


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rows, rounds, batches, warm_up = (5_000, 1, 4, 2) if options.quick else (20_000, 3, 150, 50)
    records = []
    for staleness in (4,) if options.quick else (1, 4, 8):
        speeds, losses = [], []
        for seed in range(rounds):
            ours = several_roles(rows, batches, warm_up, seed, staleness)
            peer = one_process(rows, batches, warm_up, seed)
            speeds.append((ours[0], peer[0]))
            losses.append((ours[1], peer[1]))
        params = {"staleness": staleness, "workers": 2, "servers": 2, "rows": rows, "batch": BATCH}
        records.append(Record.of("persia.samples_per_s", params, "1/s", speeds))
        records.append(Record.of("persia.loss", params, "", losses))
    publish(records, options.json)


if __name__ == "__main__":
    main()
