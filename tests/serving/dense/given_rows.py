"""A lookup with given rows, and the network's workspace that reads from it."""

from contextlib import nullcontext

import numpy as np


class GivenRows:
    """A ``serving.dense.network_workspace.Lookup``: its launch copies rows from page-locked memory."""

    def __init__(self, device, graph, max_samples):
        self.stream = device.stream()
        self.dense = device.zeros((max_samples, graph.dense_dim), np.float32)
        shapes = [(max_samples, layer.slots, layer.dim) for layer in graph.embeddings]
        self.buffers = tuple(device.zeros(shape, np.float32) for shape in shapes)
        self._host_rows = [device.pinned(shape, np.float32) for shape in shapes]
        self._device = device

    def load(self, dense, embeddings):
        self._device.upload(dense, self.dense[: len(dense)], self.stream)
        for host, rows in zip(self._host_rows, embeddings, strict=True):
            host[: len(rows)] = rows

    def launch(self):
        self.queue(len(self.dense))

    def queue(self, samples):
        for host, rows in zip(self._host_rows, self.buffers, strict=True):
            self._device.upload(host[:samples], rows[:samples], self.stream)

    def reading(self):
        return nullcontext()


class Served:
    """Answers requests one by one."""

    def __init__(self, network, max_samples, in_one=False):
        self.rows = GivenRows(network.device, network.graph, max_samples)
        self.work = network.workspace(self.rows, max_samples, in_one)

    def answer(self, dense, embeddings):
        self.rows.load(dense, embeddings)
        self.work.begin(len(dense))
        return self.work.answer()
