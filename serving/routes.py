"""Ways through one model: an embedding lookup and a dense network that belong together, one per device."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.config import ModelConfig
from serving.dense.calibration import Calibration
from serving.dense.device_memory import network_bytes
from serving.dense.files import open_dense, open_device_dense
from serving.dense.network import DenseNetwork, Engine
from serving.errors import DeviceMemoryError
from serving.lookup import LookupSession
from serving.model.graph import Graph, is_network_file, read_model_graph

if TYPE_CHECKING:
    from serving.dense.device_network import DeviceNetwork
    from serving.dense.device_workspace import NetworkWorkspace
    from serving.lookup.cached_lookup import CachedLookup
    from serving.lookup.device_workspace import DeviceWorkspace


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one batch.

    Attributes:
        probabilities: float32[B, L].
        defaulted_keys: keys that no tier holds, answered with their table's default value; of a GPU cache in the
            asynchronous mode also those whose rows were still to come.
    """

    probabilities: NDArray[np.float32]
    defaulted_keys: int


class Route(Protocol):
    """One way from a batch to its probabilities. May be used by several threads at once."""

    @property
    def is_answering(self) -> bool:
        """Whether its lookup can answer; see ``LookupSession.is_answering``."""

    def predict(self, batch: Batch) -> Prediction:
        """Answer one batch, whose probabilities may still be no finite numbers.

        Raises:
            StoreError: a tier did not answer, and no other holds one of the keys.
            DeviceFaultError: work on the device failed, now or earlier.
        """


class HostRoute:
    """Pooled vectors come to the host, and the dense network runs there."""

    def __init__(self, lookup: LookupSession, network: DenseNetwork) -> None:
        """Join the two, of the same model."""
        self._lookup = lookup
        self._network = network

    @property
    def is_answering(self) -> bool:
        """See ``Route.is_answering``."""
        return self._lookup.is_answering

    def predict(self, batch: Batch) -> Prediction:
        """See ``Route.predict``."""
        looked_up = self._lookup.lookup_pooled(batch)
        return Prediction(self._network(batch.dense, looked_up.embeddings), looked_up.defaulted_keys)


class DeviceRoute:
    """Pooled vectors stay on a device, and the dense network runs there.

    If no row is missing, a request is one upload, one launch of a graph, and one wait.
    """

    def __init__(self, lookup: "CachedLookup", network: "DeviceNetwork") -> None:
        """Join the two, of the same model and device."""
        self._lookup = lookup
        self._network = network
        self._lock = threading.Lock()  # guards the networks' workspaces, each of which is its lookup workspace's
        self._workspaces: WeakKeyDictionary[DeviceWorkspace, NetworkWorkspace] = WeakKeyDictionary()

    @property
    def is_answering(self) -> bool:
        """See ``Route.is_answering``."""
        return self._lookup.is_answering

    def predict(self, batch: Batch) -> Prediction:
        """See ``Route.predict``."""

        def compute(work: "DeviceWorkspace") -> Callable[[], NDArray[np.float32]]:
            network = self._workspace(work)
            network.queue(batch.samples)
            return network.answer

        return Prediction(*self._lookup.compute(batch, compute))

    def _workspace(self, work: "DeviceWorkspace") -> "NetworkWorkspace":
        """The network's workspace behind a lookup's."""
        with self._lock:
            held = self._workspaces.get(work)
        if held is None:
            held = self._network.workspace(work.pooling, self._lookup.config.max_batchsize)
            with self._lock:
                self._workspaces[work] = held
        return held


def open_routes(
    config: ModelConfig,
    lookups: Sequence[LookupSession],
    engine: Engine,
    threads: int,
    calibration: Calibration | None = None,
) -> tuple[Graph, "DenseNetwork | DeviceNetwork", list[Route]]:
    """Open the dense network of a model beside each of its lookups.

    Where these have caches on devices and ``engine`` is ``"auto"``, it is opened on each device, but for an ONNX
    network of a user's own; else once, on the CPU.

    Returns:
        the graph, one of the networks, which are all alike, and a route for each lookup.

    Raises:
        ConfigError: see ``open_dense`` and ``open_device_dense``, and for other errors.
        DeviceMemoryError: a device has too little free memory for the network.
    """
    files = config.network_files()
    if engine == "auto" and not is_network_file(files[1]) and all(one.device is not None for one in lookups):
        return _device_routes(config, lookups)
    graph, network = open_dense(*files, config.onnx_file, engine, threads, calibration)
    return graph, network, [HostRoute(lookup, network) for lookup in lookups]


def _device_routes(config: ModelConfig, lookups: Sequence[LookupSession]) -> tuple[Graph, "DeviceNetwork", list[Route]]:
    from serving.lookup.cached_lookup import CachedLookup  # not before a device is used

    _check_memory(config, lookups)
    said = config.gpu_network
    routes: list[Route] = []
    for lookup in (one for one in lookups if isinstance(one, CachedLookup)):
        graph, network = open_device_dense(*config.network_files(), lookup.device, said.precision, said.captures_graphs)
        routes.append(DeviceRoute(lookup, network))
    return graph, network, routes


def _check_memory(config: ModelConfig, lookups: Sequence[LookupSession]) -> None:
    """Refuse a network that a device has no room for beside the caches, which are there."""
    graph = read_model_graph(*config.network_files())
    buffers, uses_graphs = config.gpu_cache.worker_buffers, config.gpu_network.captures_graphs
    needed_bytes = network_bytes(graph, config.max_batchsize, buffers, uses_graphs)
    for device in (lookup.device for lookup in lookups if lookup.device is not None):
        free_bytes, _ = device.memory()
        if needed_bytes > free_bytes:
            reason = (
                f"the dense network of model {config.name!r} takes about {needed_bytes:,} bytes with "
                f"{buffers} worker buffers, {free_bytes:,} are free; fewer of them, or a lower gpucacheper, leave more"
            )
            raise DeviceMemoryError(device.name, reason)


R = TypeVar("R")


class LeastBusy(Generic[R]):
    """Several things of a kind; who needs one is given one that the fewest others are using.

    One that fails at once is the least busy of all: it is given only where no other is usable.
    """

    def __init__(self, things: Sequence[R], is_usable: Callable[[R], bool] = lambda _: True) -> None:
        """Take at least one thing; ``is_usable`` is asked each time."""
        self._things = tuple(things)
        self._is_usable = is_usable
        self._users = [0] * len(self._things)
        self._lock = threading.Lock()  # guards the numbers of users

    @contextmanager
    def one(self) -> Iterator[R]:
        """A thing to use inside the block."""
        if len(self._things) == 1:
            yield self._things[0]
            return
        with self._lock:
            place = min(range(len(self._things)), key=self._order)
            self._users[place] += 1
        try:
            yield self._things[place]
        finally:
            with self._lock:
                self._users[place] -= 1

    def _order(self, place: int) -> tuple[bool, int]:
        return not self._is_usable(self._things[place]), self._users[place]
