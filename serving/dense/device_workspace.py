"""Where a dense network runs on a device for one request at a time, behind its lookup, as one CUDA graph with it."""

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
"""Sizes of batches for which there is a graph. Beyond the last, launches are little beside the work, padding much."""


def class_sizes(max_samples: int) -> tuple[int, ...]:
    """Return the size classes for batches of up to ``max_samples``, which is the last unless graphs end before it."""
    below = tuple(takewhile(lambda size: size < max_samples, CLASS_SAMPLES))
    return below if len(below) == len(CLASS_SAMPLES) else (*below, max_samples)


class Lookup(Protocol):
    """What looks up the rows of one request at a time; a ``gpu_cache.workspace.Workspace`` is such.

    A request's dense features and keys have been uploaded on its stream. All its arrays stay where they are.
    """

    @property
    def stream(self) -> Stream:
        """Where all is queued."""

    @property
    def dense(self) -> Array:
        """float32[max_samples, F]."""

    @property
    def buffers(self) -> tuple[Array, ...]:
        """float32[max_samples, S, D] per embedding layer: where the launch writes pooled rows."""

    def launch(self) -> None:
        """Queue the request's launch."""

    def queue(self, samples: int) -> None:
        """Queue the launch of any request of up to so many samples, to be captured."""

    def reading(self) -> AbstractContextManager[None]:
        """Where a graph of that launch is to be launched."""


class NetworkWorkspace:
    """Looks rows up and runs a network on them for one request at a time, on one stream.

    ::

        work.queue(samples)      # as often as rows that were missing have come; never waits
        stream.synchronize()
        probabilities = work.answer()

    A batch is run at the size of its class, what lies behind it being left over: samples do not mix, and nobody reads
    the answers to these rows. The first batch of a class is queued launch by launch and has the class's graph captured:
    lookup, network and download of the answer. All later ones are one launch of it. Where samples mix there are no
    classes and no graphs. After a capture that failed the next batch without a graph tries once more; where one fails
    again, for lack of memory say, no more are captured.

    Used by one thread at a time. Made by ``DeviceNetwork.workspace``.
    """

    def __init__(self, network: "DeviceNetwork", lookup: Lookup, max_samples: int) -> None:
        """Take the memory.

        Args:
            network: what is run.
            lookup: on the network's device.
            max_samples: most samples of a request.

        Raises:
            ValueError: ``max_samples`` is less than 1, or an array of the lookup has another shape or dtype.
        """
        if max_samples < 1:
            raise ValueError(f"max_samples: expected at least 1, got {max_samples}")
        embeddings = lookup.buffers
        _check_inputs(network.graph, max_samples, lookup.dense, embeddings)
        graph, answer = network.graph, network.device.pinned((max_samples, network.graph.label_dim), np.float32)
        self._pass = _Pass(network, lookup, lookup.dense, embeddings, answer)
        self._max_samples = max_samples
        self._sizes = class_sizes(max_samples) if network.use_graphs and not graph.mixes_samples else ()
        self._graphs: dict[int, DeviceGraph] = {}
        self._has_failed = False  # to capture a graph
        self._samples = 0

    def queue(self, samples: int) -> None:
        """Queue lookup and network for the request that the lookup has loaded; does not wait.

        May be called again for the same request, behind ``complete`` of its missing rows.

        Args:
            samples: B of the request.

        Raises:
            ValueError: there are fewer than the graph can work on, or more than ``max_samples``.
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
        self._pass.queue_network(size)  # also loads what a capture cannot
        if size in self._sizes:
            self._capture(size)

    def answer(self) -> Floats:
        """Return the probabilities of what was queued last, float32[B, L]; the stream must have been waited for."""
        return self._pass.answer[: self._samples].copy()

    def _capture(self, size: int) -> None:
        network, stream = self._pass.network, self._pass.lookup.stream
        try:
            self._graphs[size] = network.device.capture(stream, partial(self._pass.queue, size))
        except KernelError as err:
            if not self._has_failed:  # what another thread did may have been in the way, and is over by the next batch
                self._has_failed = True
                return
            self._sizes = tuple(self._graphs)
            _log.warning("%s: no more CUDA graphs for this worker buffer: %s", network.graph.source, err)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What is queued for a request, always with the same buffers.

    Graphs keep it. So it does not know them: in a circle, memory would wait for the garbage collector.
    """

    network: "DeviceNetwork"
    lookup: Lookup
    dense: Array
    embeddings: tuple[Array, ...]
    answer: Floats

    def queue(self, size: int) -> None:
        """Queue lookup, network and download of so many rows, to be captured."""
        self.lookup.queue(size)
        self.queue_network(size)

    def queue_network(self, size: int) -> None:
        """Queue the network on so many rows, and the download of its answer."""
        stream = self.lookup.stream
        answer = self.network(self.dense[:size], [table[:size] for table in self.embeddings], stream)
        self.network.device.download(answer, self.answer[:size], stream)


def _check_inputs(graph: Graph, max_samples: int, dense: Array, embeddings: tuple[Array, ...]) -> None:
    """Check that a lookup's arrays are what the network reads."""
    if len(embeddings) != len(graph.embeddings):
        raise ValueError(f"expected {len(graph.embeddings)} embedding tensors, got {len(embeddings)}")
    shapes: dict[str, tuple[int, ...]] = {graph.dense_top: (max_samples, graph.dense_dim)}
    shapes |= {layer.top: (max_samples, layer.slots, layer.dim) for layer in graph.embeddings}
    for (name, shape), array in zip(shapes.items(), (dense, *embeddings), strict=True):
        if array.shape != shape or array.dtype != np.float32:
            raise ValueError(f"{name}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}")
