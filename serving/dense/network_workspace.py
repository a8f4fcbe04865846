"""A dense network's workspace on a device: one request at a time runs lookup and network as CUDA graphs."""

import logging
from collections.abc import Callable
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

# The network is queued before the misses are known if at least this share of recent requests missed nothing. That saves
# the host's reaction to the lookup's end, about 20 us, and costs a run of the network, some 100 us, for each request
# that missed a row: 20 / (20 + 100) of the requests may miss.
_QUEUES_EARLY_FROM = 0.83
_NEWEST_WEIGHT = 1 / 16  # of the newest request in the running average


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

        work.begin(samples)         # queues the lookup, and the network too if misses are unlikely
        while ...:                  # the lookup missed rows, and the caller has completed them
            work.again()
        probabilities = work.answer()

    A batch runs at the size of its class. The rows after the batch are left over from earlier batches, which does no
    harm: samples do not mix, and nobody reads the answers of these rows. A network that mixes samples has no classes
    and no graphs.

    The first batch of a class is queued launch by launch. Then the class's graphs are captured: one of the lookup, and
    one of the network and the download of its answer. With ``in_one``, all of it is one graph, for lookups that hardly
    ever miss. If a capture fails, the next batch without graphs tries once more. After a second failure, for example
    without memory, no more graphs are captured.

    Only one thread at a time uses a workspace.

    Attributes:
        network: the network.
    """

    def __init__(self, network: "DeviceNetwork", lookup: Lookup, max_samples: int, in_one: bool = False) -> None:
        """Allocate memory for requests of at most ``max_samples`` samples; ``lookup`` is on the network's device."""
        if max_samples < 1:
            raise ValueError(f"max_samples: expected at least 1, got {max_samples}")
        embeddings = lookup.buffers
        _check_inputs(network.graph, max_samples, lookup.dense, embeddings)
        graph, answer = network.graph, network.device.pinned((max_samples, network.graph.label_dim), np.float32)
        self.network = network
        self._pass = _Pass(network, lookup, lookup.dense, embeddings, answer)
        self._max_samples, self._in_one = max_samples, in_one
        self._sizes = class_sizes(max_samples) if network.use_graphs and not graph.mixes_samples else ()
        self._graphs: dict[int, _Graphs] = {}
        self._has_failed = False  # a capture has failed once
        self._hit_shares: dict[int, float] = {}  # by size: the running average of requests that missed nothing
        self._samples = self._size = 0
        self._is_queued = self._has_missed = False  # the network on the request's rows; some of these rows

    def begin(self, samples: int) -> None:
        """Queue the lookup, without waiting, for the request of ``samples`` samples that the lookup has loaded.

        Raises:
            ValueError: ``samples`` is too small for the network or larger than ``max_samples``.
        """
        if not 1 <= samples <= self._max_samples:
            raise ValueError(f"expected 1 to {self._max_samples} samples, got {samples}")
        if too_few := self.network.graph.too_few(samples):
            raise ValueError(too_few)
        size = next((size for size in self._sizes if size >= samples), samples)
        self._samples, self._size = samples, size
        self._is_queued = self._has_missed = False
        graphs = self._graphs.get(size)
        if graphs is None:
            self._pass.lookup.launch()
        else:
            self._launch_lookup(graphs)
        if not self._is_queued and (self._in_one or self._hit_shares.get(size, 0.0) >= _QUEUES_EARLY_FROM):
            self._queue_network()

    def again(self) -> None:
        """Queue the network, without waiting, after missing rows were completed."""
        self._has_missed = True
        self._queue_network()

    def answer(self) -> Floats:
        """Wait for the network, and return the probabilities, float32[B, L].

        Raises:
            DeviceFaultError: work on the stream failed.
        """
        if not self._is_queued:
            self._queue_network()
        share = self._hit_shares.get(self._size, 0.0)
        self._hit_shares[self._size] = share + _NEWEST_WEIGHT * ((not self._has_missed) - share)
        self._pass.lookup.stream.synchronize()
        return self._pass.answer[: self._samples].copy()

    def _queue_network(self) -> None:
        graphs = self._graphs.get(self._size)
        if graphs is not None and graphs.network is None:
            self._launch_lookup(graphs)
        elif graphs is not None and graphs.network is not None:
            graphs.network.launch(self._pass.lookup.stream)
        else:
            self._pass.queue_network(self._size)  # also loads kernels, which a capture cannot do
            if self._size in self._sizes:
                self._capture(self._size)
        self._is_queued = True

    def _launch_lookup(self, graphs: "_Graphs") -> None:
        lookup = self._pass.lookup
        with lookup.reading():
            graphs.lookup.launch(lookup.stream)
        self._is_queued = graphs.network is None

    def _capture(self, size: int) -> None:
        done = self._pass
        parts = [done.queue] if self._in_one else [done.lookup.queue, done.queue_network]
        try:
            self._graphs[size] = _Graphs(*[self._captured(part, size) for part in parts])
        except KernelError as err:
            if not self._has_failed:  # work of another thread can break a capture, so the next batch tries again
                self._has_failed = True
                return
            self._sizes = tuple(self._graphs)
            _log.warning("%s: no more CUDA graphs for this worker buffer: %s", self.network.graph.source, err)

    def _captured(self, part: Callable[[int], None], size: int) -> DeviceGraph:
        return self.network.device.capture(self._pass.lookup.stream, partial(part, size))


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs of a size class: of the lookup and of the network, or one of both."""

    lookup: DeviceGraph
    network: DeviceGraph | None = None


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
    shapes: dict[str, tuple[int, ...]] = {graph.dense_top: (max_samples, graph.dense_width)}
    shapes |= {layer.top: (max_samples, layer.slots, layer.dim) for layer in graph.embeddings}
    for (name, shape), array in zip(shapes.items(), (dense, *embeddings), strict=True):
        if array.shape != shape or array.dtype != np.float32:
            raise ValueError(f"{name}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}")
