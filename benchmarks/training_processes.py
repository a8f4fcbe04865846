"""Samples per second of training in two processes against one, each with one thread.

The model and the batches are those of ``benchmarks.training``: 26 slots of one key from one table, in batches of 4,096.
Two processes share the rows by key and each batch by halves, so they take the same steps as one. Both start anew for
every round. The speed is that of the median step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Record, parse_arguments, publish
from benchmarks.training import BATCH, DIM, GRAPH, LEARNING_RATE, SLOTS, draw
from serving.model.graph import parse_graph
from training.model.ctr_model import CtrModel
from training.processes import start_processes
from training.samples import Bags, Samples

WARM_UP = 3


def train(rows, batches, file):
    """Run in every process: train, and write the speed and the last loss to a file."""
    torch.set_num_threads(1)
    processes = start_processes()
    model = CtrModel(parse_graph(GRAPH, "graph.json"), seed=0, processes=processes)
    for first in range(0, rows, 260_000):  # every key has its row before the clock runs
        keys = np.resize(np.arange(first, min(rows, first + 260_000)), (10_000, SLOTS))
        labels, dense = np.zeros((10_000, 1), np.float32), np.zeros((10_000, 13), np.float32)
        samples = Samples(labels, dense, Bags.one_key_each(keys))
        model.train_batch(samples, 0.0)
    data = list(draw(rows, WARM_UP + batches, np.random.default_rng(0)))
    for batch in data[:WARM_UP]:
        model.train_batch(batch, LEARNING_RATE)
    losses, seconds = [], []
    for batch in data[WARM_UP:]:
        began = time.perf_counter()
        losses.append(model.train_batch(batch, LEARNING_RATE))
        seconds.append(time.perf_counter() - began)
    if processes.is_first:
        speed = BATCH / statistics.median(seconds)
        Path(file).write_text(json.dumps([speed, statistics.mean(losses)]), encoding="utf-8")


def measure(processes, rows, batches):
    """Return the speed and the loss of a training in so many processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = [sys.executable] if processes == 1 else torchrun
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOTROW_LOOKUP_THREADS": "1"}
    with tempfile.NamedTemporaryFile() as file:
        arguments = ["-m", "benchmarks.training_processes", "--worker", json.dumps([rows, batches, file.name])]
        subprocess.run([*start, *arguments], env=environment, check=True, stderr=subprocess.DEVNULL)
        return json.loads(Path(file.name).read_text(encoding="utf-8"))


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__, worker={"help": "for the processes of the benchmark itself"})
    if options.worker:
        train(*json.loads(options.worker))
        return
    rows, rounds, batches = (10_000, 1, 2) if options.quick else (1_000_000, 5, 40)
    speeds, losses = [], []
    for _ in range(rounds):
        two, one = (measure(processes, rows, batches) for processes in (2, 1))
        speeds.append((two[0], one[0]))
        losses.append((two[1], one[1]))
    params = {"rows": rows, "batch": BATCH, "slots": SLOTS, "dim": DIM, "processes": 2}
    records = [
        Record.of("training_processes.samples_per_s", params, "1/s", speeds),
        Record.of("training_processes.loss", params, "", losses),
    ]
    publish(records, options.json)


if __name__ == "__main__":
    main()
