"""The tables of a model with the same rows in caches and in PyTorch, and requests to them in turn."""

import numpy as np

from benchmarks.gpu.keys import filled_cache, rows_of
from benchmarks.gpu.rounds import on_stream
from gpu_cache.cache_group import CacheGroup
from gpu_cache.readers import Readers


class Tables:
    """The same rows in caches and, if PyTorch is installed, in its tables as float32."""

    def __init__(self, device, peer, dim, count, slots, row_dtype="fp32"):
        readers = Readers()
        self.device, self.peer, self.dim, self.row_dtype = device, peer, dim, row_dtype
        self.filled = [filled_cache(device, slots // count, dim, row_dtype, readers=readers) for _ in range(count)]
        self.group = CacheGroup([filled.cache for filled in self.filled], (1,) * count, ("sum",) * count)
        self.populations = [filled.population for filled in self.filled]
        self.weights = [self._weights(population) for population in self.populations] if peer else []

    def close(self):
        for filled in self.filled:
            filled.close()

    def _weights(self, population):
        rows = self.device.empty((population.size, self.dim), np.float32)
        for first in range(0, population.size, 1 << 18):
            keys = self.device.xp.asarray(population[first : first + (1 << 18)])
            rows[first : first + keys.size] = rows_of(self.device.xp, keys, self.dim, self.row_dtype)
        return self.peer.tensor(rows)


def as_graphs(device, works, queue, prepare=None):
    """A contender that replays one graph of ``queue(work)`` per workspace; see ``on_stream`` for ``prepare``.

    Only launches are timed: PyTorch's indices and the requests are already on the GPU.
    """
    for work in works:
        work.stream.synchronize()
    graphs = [device.capture(work.stream, lambda work=work: queue(work)) for work in works]
    stream = device.stream()

    def launch():
        for graph in graphs:
            graph.launch(stream)

    return on_stream(device, stream, launch, len(works), prepare=prepare)


def with_peer(ours, make_peer, why):
    """Return both contenders, or only ours and the reason why there is no peer."""
    if why.startswith("absent"):
        return [ours], why
    try:
        return [ours, make_peer()], why
    except RuntimeError as err:
        return [ours], f"absent: {err}"
