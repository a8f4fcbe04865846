"""Routes through one model: an embedding lookup and the dense network behind it, one route per device."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter as now_s
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.config import ModelConfig
from serving.dense.calibration import Calibration
from serving.dense.device_memory import network_bytes
from serving.dense.files import open_dense, open_device_dense
from serving.dense.network import DenseNetwork
from serving.errors import DeviceMemoryError
from serving.lookup import LookupSession
from serving.model.graph import Graph, is_network_file, read_model_graph
from serving.option_values import Engine
from serving.stages import Stage, listener
from serving.storage.store import Mask

if TYPE_CHECKING:
    from serving.dense.device_network import DeviceNetwork
    from serving.dense.network_workspace import NetworkWorkspace
    from serving.lookup.cached_session import CachedLookupSession
    from serving.lookup.device_workspace import DeviceWorkspace


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one batch.

    Attributes:
        values: float32[B, L], the columns of all outputs; see ``Output.columns``.
        defaulted_keys: how many keys were answered with their table's default value: keys that no tier holds, and in
            the asynchronous mode of a GPU cache also keys whose rows are inserted later.
        incomplete: see ``LookupResult``.
    """

    values: NDArray[np.float32]
    defaulted_keys: int
    incomplete: Sequence[tuple[int, Mask | None]] = ()

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """The values, by their name in earlier versions."""
        return self.values


class Route(Protocol):
    """One way from a batch to its answer. Several threads may use it at the same time."""

    @property
    def is_answering(self) -> bool:
        """Whether its lookup can answer; see ``LookupSession.is_answering``."""

    def predict(self, batch: Batch) -> Prediction:
        """Answer one batch; the caller checks that the values are finite.

        Raises:
            StoreError: a tier did not answer, and no other tier holds one of the keys.
            DeviceFaultError: work on the device failed, now or earlier.
        """


class HostRoute:
    """Pooled vectors come to the host, and the dense network runs there."""

    def __init__(self, lookup: LookupSession, network: DenseNetwork) -> None:
        """Join a lookup and a network of the same model."""
        self._lookup = lookup
        self._network = network

    @property
    def is_answering(self) -> bool:
        """See ``Route.is_answering``."""
        return self._lookup.is_answering

    def predict(self, batch: Batch) -> Prediction:
        """See ``Route.predict``."""
        looked_up = self._lookup.lookup_pooled(batch)
        began_s = now_s() if listener.stages is not None else 0.0
        most = self._lookup.config.max_batchsize
        if batch.samples <= most:
            values = self._network(batch.dense, looked_up.embeddings, batch.wanted)
        else:
            parts = [slice(begin, begin + most) for begin in range(0, batch.samples, most)]
            rows = looked_up.embeddings
            values = np.concatenate(
                [self._network(batch.dense[at], [of[at] for of in rows], batch.wanted) for at in parts]
            )
        if listener.stages is not None:
            listener.stages.append(Stage("network", began_s, now_s(), {"hotrow.samples": batch.samples}))
        return Prediction(values, looked_up.defaulted_keys, looked_up.incomplete)


class DeviceRoute:
    """Pooled vectors stay on a device, and the dense network runs there.

    A request is one upload, one launch of the lookup's graph and one launch of the network's graph. If rows are
    missing, the tiers are asked, and another upload and launch complete the vectors before the network runs.
    """

    def __init__(self, lookup: "CachedLookupSession", network: "DeviceNetwork") -> None:
        """Join a lookup and a network of the same model on the same device."""
        self._lookup = lookup
        self._network = network
        # The networks of several versions may use one lookup, so a workspace may be lent to several routes in turn.
        self._buffers: WeakKeyDictionary[DeviceWorkspace, NetworkWorkspace] = WeakKeyDictionary()

    @property
    def is_answering(self) -> bool:
        """See ``Route.is_answering``."""
        return self._lookup.is_answering

    def predict(self, batch: Batch) -> Prediction:
        """See ``Route.predict``. A batch with shared bags is expanded, and answered in parts."""
        if batch.bags is None:
            return self._answer(batch)
        answers = [self._answer(part) for part in batch.expanded().parts(self._lookup.config.max_batchsize)]
        tables = sorted({table for answer in answers for table, _ in answer.incomplete})
        return Prediction(
            np.concatenate([answer.values for answer in answers]),
            sum(answer.defaulted_keys for answer in answers),
            [(table, None) for table in tables],
        )

    def _answer(self, batch: Batch) -> Prediction:
        began_s = now_s()
        with self._lookup.request(batch) as request:
            network = self._network_in(request.work)
            network.begin(batch.samples)
            while request.complete():
                network.again()
            looked_up_s = now_s()
            values = network.answer()
        if listener.stages is not None:
            device = {"hotrow.device": self._lookup.device.name}
            listener.stages += [
                Stage("lookup", began_s, looked_up_s, device),
                Stage("network", looked_up_s, now_s(), {**device, "hotrow.samples": batch.samples}),
            ]
        return Prediction(values, request.defaulted_keys, request.incomplete)

    def _network_in(self, work: "DeviceWorkspace") -> "NetworkWorkspace":
        """Return the network's buffers in a workspace; the first request makes them."""
        buffers = self._buffers.get(work)
        if buffers is None:
            config = self._lookup.config
            is_static = config.gpu_cache.kind == "static"  # and has every row
            buffers = self._network.workspace(work.pooling, config.max_batchsize, in_one=is_static)
            self._buffers[work] = buffers
        return buffers


def open_routes(
    config: ModelConfig,
    lookups: Sequence[LookupSession],
    engine: Engine,
    threads: int,
    calibration: Calibration | None = None,
) -> tuple[Graph, "DenseNetwork | DeviceNetwork", list[Route]]:
    """Open a model's dense network and join it to each lookup; return the graph, one of the networks and the routes.

    With the engine ``"auto"`` the network runs on each device that has caches. A network that is an ONNX file runs on
    the CPU, and so does every network without caches or with another engine.
    """
    files = config.network_files()
    if engine == "auto" and not is_network_file(files[1]) and all(session.device is not None for session in lookups):
        return _device_routes(config, lookups)
    graph, network = open_dense(*files, config.onnx_file, engine, threads, calibration)
    return graph, network, [HostRoute(lookup, network) for lookup in lookups]


def _device_routes(config: ModelConfig, lookups: Sequence[LookupSession]) -> tuple[Graph, "DeviceNetwork", list[Route]]:
    from serving.lookup.cached_session import CachedLookupSession  # only a device needs it

    _check_memory(config, lookups)
    said = config.gpu_network
    routes: list[Route] = []
    for lookup in (session for session in lookups if isinstance(session, CachedLookupSession)):
        graph, network = open_device_dense(*config.network_files(), lookup.device, said.precision, said.captures_graphs)
        routes.append(DeviceRoute(lookup, network))
    return graph, network, routes


def _check_memory(config: ModelConfig, lookups: Sequence[LookupSession]) -> None:
    """Refuse a network that does not fit a device's memory; the caches are allocated already."""
    graph = read_model_graph(*config.network_files())
    buffers, uses_graphs = config.gpu_cache.worker_buffers, config.gpu_network.captures_graphs
    needed_bytes = network_bytes(graph, config.max_batchsize, buffers, uses_graphs)
    for device in (lookup.device for lookup in lookups if lookup.device is not None):
        free_bytes, _ = device.memory()
        if needed_bytes > free_bytes:
            reason = (
                f"the dense network of model {config.name!r} takes about {needed_bytes:,} bytes with {buffers} "
                f"worker buffers, but {free_bytes:,} are free; use fewer worker buffers or a lower gpucacheper"
            )
            raise DeviceMemoryError(device.name, reason)


R = TypeVar("R")


class LeastBusy(Generic[R]):
    """Several resources of a kind; each caller gets the resource with the fewest users.

    A resource that fails at once would always be the least busy, so an unusable resource comes last.
    """

    def __init__(self, things: Sequence[R], is_usable: Callable[[R], bool] = lambda _: True) -> None:
        """Take at least one resource; ``is_usable`` is asked each time."""
        self._things = tuple(things)
        self._is_usable = is_usable
        self._users = [0] * len(self._things)
        self._lock = threading.Lock()  # guards the numbers of users

    @contextmanager
    def one(self) -> Iterator[R]:
        """Return a resource to use inside the block."""
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
