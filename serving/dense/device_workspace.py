"""A dense network's workspace on a device: one request at a time runs lookup and network as one CUDA graph."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.device import Array, Stream
from kernels.device import Graph as DeviceGraph
from kernels.errors import KernelError
from serving.model.records import Graph

if TYPE_CHECKING:
    from serving.dense.device_network import DeviceNetwork

Floats = NDArray[np.float32]

_log = logging.getLogger(__name__)

CLASS_SAMPLES = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Batch sizes that have a graph. For larger batches launches cost little and padding would cost much."""


def class_sizes(max_samples: int) -> tuple[int, ...]:
    """Return the size classes for batches of up to ``max_samples``."""
    below = tuple(takewhile(lambda size: size < max_samples, CLASS_SAMPLES))
    return below if len(below) == len(CLASS_SAMPLES) else (*below, max_samples)


class Lookup(Protocol):
    """Looks up the rows of one request at a time, as a ``gpu_cache.workspace.Workspace`` does.

    A request's dense features and keys have been uploaded on its stream. Its arrays keep their addresses.
    """

    @property
    def stream(self) -> Stream:
        """The stream of all its work."""

    @property
    def dense(self) -> Array:
        """float32[max_samples, F]."""

    @property
    def buffers(self) -> tuple[Array, ...]:
        """float32[max_samples, S, D] per embedding layer; the launch writes pooled rows here."""

    def launch(self) -> None:
        """Queue the request's launch."""

    def queue(self, samples: int) -> None:
        """Queue the launch of any request of at most ``samples`` samples, for a capture."""

    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which to launch a graph that contains the captured launch."""


class NetworkWorkspace:
    """Looks rows up and runs a network on them for one request at a time, on one stream.

    ::

        work.queue(samples)      # again after missing rows were completed; never waits
        stream.synchronize()
        probabilities = work.answer()

    A batch runs at the size of its class. The rows after the batch are left over from earlier batches, which does no
    harm: samples do not mix, and nobody reads the answers of these rows. A network that mixes samples has no classes
    and no graphs.

    The first batch of a class is queued launch by launch. Then the class's graph is captured: lookup, network and
    download of the answer. Each later batch is one launch of this graph. If a capture fails, the next batch without a
    graph tries once more. After a second failure, for example without memory, no more graphs are captured.

    Only one thread at a time uses a workspace.
    """

    def __init__(self, network: "DeviceNetwork", lookup: Lookup, max_samples: int) -> None:
        """Allocate memory for requests of at most ``max_samples`` samples; ``lookup`` is on the network's device."""
        if max_samples < 1:
            raise ValueError(f"max_samples: expected at least 1, got {max_samples}")
        embeddings = lookup.buffers
        _check_inputs(network.graph, max_samples, lookup.dense, embeddings)
        graph, answer = network.graph, network.device.pinned((max_samples, network.graph.label_dim), np.float32)
        self._pass = _Pass(network, lookup, lookup.dense, embeddings, answer)
        self._max_samples = max_samples
        self._sizes = class_sizes(max_samples) if network.use_graphs and not graph.mixes_samples else ()
        self._graphs: dict[int, DeviceGraph] = {}
        self._has_failed = False  # a capture has failed once
        self._samples = 0

    def queue(self, samples: int) -> None:
        """Queue lookup and network, without waiting, for the request of ``samples`` samples that the lookup has loaded.

        Call it again for the same request after ``complete`` of its missing rows. Raises ValueError if ``samples`` is
        too small for the graph or larger than ``max_samples``.
        """
        if not 1 <= samples <= self._max_samples:
            raise ValueError(f"expected 1 to {self._max_samples} samples, got {samples}")
        if too_few := self._pass.network.graph.too_few(samples):
            raise ValueError(too_few)
        self._samples = samples
        lookup = self._pass.lookup
        size = next((size for size in self._sizes if size >= samples), samples)
        if size in self._graphs:
            with lookup.reading():
                self._graphs[size].launch(lookup.stream)
            return
        lookup.launch()
        self._pass.queue_network(size)  # also loads kernels, which a capture cannot do
        if size in self._sizes:
            self._capture(size)

    def answer(self) -> Floats:
        """Return the probabilities of the last queued request, float32[B, L]; the caller has waited for the stream."""
        return self._pass.answer[: self._samples].copy()

    def _capture(self, size: int) -> None:
        network, stream = self._pass.network, self._pass.lookup.stream
        try:
            self._graphs[size] = network.device.capture(stream, partial(self._pass.queue, size))
        except KernelError as err:
            if not self._has_failed:  # work of another thread can break a capture, so the next batch tries again
                self._has_failed = True
                return
            self._sizes = tuple(self._graphs)
            _log.warning("%s: no more CUDA graphs for this worker buffer: %s", network.graph.source, err)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The work of a request, always on the same buffers.

    Graphs refer to it, so it does not refer to graphs: in a cycle, memory would wait for the garbage collector.
    """

    network: "DeviceNetwork"
    lookup: Lookup
    dense: Array
    embeddings: tuple[Array, ...]
    answer: Floats

    def queue(self, size: int) -> None:
        """Queue lookup, network and download of ``size`` samples, for a capture."""
        self.lookup.queue(size)
        self.queue_network(size)

    def queue_network(self, size: int) -> None:
        """Queue the network on ``size`` samples, and the download of its answer."""
        stream = self.lookup.stream
        answer = self.network(self.dense[:size], [table[:size] for table in self.embeddings], stream)
        self.network.device.download(answer, self.answer[:size], stream)


def _check_inputs(graph: Graph, max_samples: int, dense: Array, embeddings: tuple[Array, ...]) -> None:
    """Check that a lookup's arrays fit the network's inputs."""
    if len(embeddings) != len(graph.embeddings):
        raise ValueError(f"expected {len(graph.embeddings)} embedding tensors, got {len(embeddings)}")
    shapes: dict[str, tuple[int, ...]] = {graph.dense_top: (max_samples, graph.dense_dim)}
    shapes |= {layer.top: (max_samples, layer.slots, layer.dim) for layer in graph.embeddings}
    for (name, shape), array in zip(shapes.items(), (dense, *embeddings), strict=True):
        if array.shape != shape or array.dtype != np.float32:
            raise ValueError(f"{name}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}")
