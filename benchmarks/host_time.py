"""Hotrow's own host time of a GPU request, against the same lookup on the CPU without a cache.

The GPU is a stub whose driver calls cost nothing, so the benchmark shows what Python and the host kernels cost. It says
nothing about the time on a GPU. Each table has one key per sample, so no offsets are packed. Of each round the fastest
call counts.

- ``predict``: a whole request of a model, without the calls of its dense network; ``misses`` is the number of missing
  keys in each table, whose rows the memory tier has
- ``lookup``: the same with the pooled rows as its answer
- ``pack``: the part of ``predict`` that checks and writes the request; the peer is NumPy's copy of as many bytes
- ``launches`` and ``copies``: how many of them a request queues, against the most that it may queue
"""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import numpy as np

from benchmarks import free_gpu
from benchmarks.one_table import vectors_from, write_table
from benchmarks.report import Record, parse_arguments, publish
from serving.batch import Batch, TableKeys
from serving.config import GpuCacheConfig, ModelConfig, TableConfig
from serving.lookup import LookupSession
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore

DIM, DENSE_DIM, MOST_SAMPLES = 32, 13, 1024
MOST_LAUNCHES = MOST_COPIES = 8
BATCHES = 20


def main():
    arguments = parse_arguments(__doc__)
    tables, rows, rounds, calls = (3, 2000, 2, 3) if arguments.quick else (26, 20_000, 15, 200)
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name  # the stub's kernels must not become those of a GPU
        free_gpu.install()
        with opened(model(Path(name), tables, rows)) as sides:
            records = [
                measure(sides, name, samples, misses, rounds, calls)
                for name, samples, misses in (
                    ("predict", 64, 0),
                    ("predict", 64, 1),
                    ("predict", 1024, 0),
                    ("lookup", 64, 0),
                    ("lookup", 64, 1),
                    ("pack", 64, 0),
                    ("pack", 1024, 0),
                )
            ]
            records += count_calls(sides, 64, 1)
    publish(records, arguments.json)


def model(folder, tables, rows):
    """A model of tables with the keys 0, 1, 2, ..."""
    write_table(folder / "t", np.arange(rows), vectors_from)
    return ModelConfig(
        name="m",
        graph_file=folder / "graph.json",
        dense_file=folder / "dense.model",
        tables=tuple(
            TableConfig(name=f"t{place}", dim=DIM, slots=1, combiner="sum", file=folder / "t")
            for place in range(tables)
        ),
        key_type="I64",
        max_batchsize=MOST_SAMPLES,
        dense_dim=DENSE_DIM,
        label_dim=1,
        gpu_cache=GpuCacheConfig(fills_at_start=False),
    )


@contextmanager
def opened(config):
    """The model with a cache on the free GPU, and without one."""
    from kernels.device import open_device  # finds the stub
    from serving.lookup.cached_session import CachedLookupSession
    from serving.routes import DeviceRoute

    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)
        device = open_device("cuda:0")
        lookup = CachedLookupSession(server, config, device)
        try:
            [work] = lookup._workspaces._idle
            reports = Reports(work.pooling._missing)
            free_gpu.hooks.on_launch = reports.on_launch
            route = DeviceRoute(lookup, FreeNetwork(device, config))
            yield SimpleNamespace(
                route=route, lookup=lookup, peer=LookupSession(server, config), work=work, reports=reports
            )
        finally:
            free_gpu.hooks.on_launch = lambda name: None
            lookup.close()


class FreeNetwork:
    """A dense network without layers."""

    use_graphs = True

    def __init__(self, device, config):
        self.device = device
        self.graph = SimpleNamespace(
            label_dim=1,
            dense_dim=config.dense_dim,
            dense_width=config.dense_dim,
            dense_top="dense",
            embeddings=[SimpleNamespace(top=table.name, slots=1, dim=DIM) for table in config.tables],
            mixes_samples=False,
            too_few=lambda samples: "",
        )
        self._answer = device.empty((config.max_batchsize, 1), np.float32)

    def __call__(self, dense, embeddings, stream):
        return self._answer[: len(dense)]

    def workspace(self, lookup, max_samples, in_one):
        from serving.dense.network_workspace import NetworkWorkspace

        return NetworkWorkspace(self, lookup, max_samples, in_one)


class Reports:
    """Writes what the kernels would report: the first launch of a request misses the first keys of each table."""

    def __init__(self, missing):
        self._missing = missing
        self._batch, self._misses = None, 0

    def begin(self, batch, misses):
        self._batch, self._misses = batch, misses

    def on_launch(self, name):
        report, tables, misses = self._missing._report, len(self._missing._report), self._misses
        if name == "pool_again":
            report["bags"] = 0
        if self._batch is None or name not in ("graph", "pool"):
            return
        for field in ("bags", "keys", "distinct"):
            report[field] = misses
        report["used"] = tables * misses
        if misses:
            self._missing._keys[: tables * misses] = np.concatenate(
                [table.keys[:misses] for table in self._batch.tables]
            )
            self._missing._times[: tables * misses] = 1
        self._batch = None


def measure(sides, name, samples, misses, rounds, calls):
    """Microseconds per request."""
    rng = np.random.default_rng(samples)
    ours, peer = CALLS[name](sides)
    pairs = []
    for number in range(rounds):
        batches = [draw(sides, rng, samples) for _ in range(BATCHES)]
        took = {ours: [], peer: []}
        for call in (ours, peer) if number % 2 else (peer, ours):
            for at in range(calls):
                sides.reports.begin(batches[at % BATCHES], misses)
                begin = perf_counter()
                call(batches[at % BATCHES])
                took[call].append(1e6 * (perf_counter() - begin))
        pairs.append((min(took[ours]), min(took[peer])))
    params = {"tables": len(sides.lookup.config.tables), "samples": samples, "dim": DIM, "misses": misses}
    return Record.of(f"host_time.{name}", params, "us", pairs)


def draw(sides, rng, samples):
    """A request of distinct keys per table."""
    rows = sides.lookup.plans[0].table_rows
    row_ptrs = np.arange(samples + 1, dtype=np.int32)
    tables = [TableKeys(rng.permutation(rows)[:samples], row_ptrs.copy()) for _ in sides.lookup.config.tables]
    return Batch(np.zeros((samples, DENSE_DIM), np.float32), tuple(tables))


def packing(sides):
    """Pack a request, and copy as many bytes."""
    request = sides.work.pooling._request
    copied = np.empty(request.bytes.size, np.uint8)

    def copy(batch):
        at = 0
        for parts in ([table.keys for table in batch.tables], [batch.dense.ravel()]):
            size = sum([part.nbytes for part in parts])
            np.concatenate(parts, out=copied[at : at + size].view(parts[0].dtype))
            at += -(-size // 8) * 8

    return lambda batch: request.pack(batch.tables, None, batch.dense), copy


CALLS = {
    "predict": lambda sides: (sides.route.predict, sides.peer.lookup_pooled),
    "lookup": lambda sides: (sides.lookup.lookup_pooled, sides.peer.lookup_pooled),
    "pack": packing,
}


def count_calls(sides, samples, misses):
    """Launches, with those of graphs, and copies of a request."""
    batch = draw(sides, np.random.default_rng(0), samples)
    for _ in range(2):
        free_gpu.calls.clear()
        sides.reports.begin(batch, misses)
        sides.route.predict(batch)
    launches = free_gpu.calls["launch"] + free_gpu.calls["graph"]
    params = {"tables": len(sides.lookup.config.tables), "samples": samples, "misses": misses}
    return [
        Record.of("host_time.launches", params, "calls", [(launches, MOST_LAUNCHES)]),
        Record.of("host_time.copies", params, "calls", [(free_gpu.calls["copy"], MOST_COPIES)]),
    ]


if __name__ == "__main__":
    main()
