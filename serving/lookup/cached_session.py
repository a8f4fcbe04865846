"""Lookup through a model's caches on one device."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from gpu_cache.answer import CacheStats
from gpu_cache.cache_group import CacheGroup
from gpu_cache.readers import Readers
from kernels.device import Device
from kernels.errors import DeviceFaultError
from serving.background import InFlightCounter, PeriodicWorker
from serving.batch import Batch, TableKeys, check_batch
from serving.config import ModelConfig, TableConfig
from serving.errors import DeviceMemoryError, RequestError, UnknownModelError
from serving.lookup.cache_plan import (
    SINGLE_KEYS,
    PlannedCache,
    check_memory,
    first_max_keys,
    idle_refresh,
    keys_left_out,
    plan_caches,
)
from serving.lookup.cache_readings import cache_readings, insertion_readings
from serving.lookup.cached_request import CachedRequest
from serving.lookup.device_workspace import DeviceWorkspace
from serving.lookup.insertions import InsertQueue
from serving.lookup.session import LookupResult, LookupSession
from serving.lookup.table_cache import DeviceHealth, TableCache
from serving.lookup.workspaces import Workspaces
from serving.metrics import MetricSample
from serving.parameter_server import FirstRows, ParameterServer
from serving.parameter_server.arguments import check_weights
from serving.parameter_server.copies import Copies
from serving.parameter_server.table_files import open_table_file
from serving.storage.store import Keys

logger = logging.getLogger(__name__)

_LONGEST_CLOSE_S = 30.0  # closing must not wait for a tier that hangs; its requests keep their memory until they end
_FILL_BATCH_ROWS = 65536
# A cache does not rank the keys of one batch, so hot keys come in several batches.
_HOT_BATCHES, _LEAST_HOT_BATCH_ROWS = 16, 1024


class CachedLookupSession(LookupSession):
    """One model's view of a parameter server through caches on one device. May be used from any thread.

    Attributes:
        device: where the caches are.
        plans: the size of each cache.
    """

    def __init__(
        self,
        server: ParameterServer,
        config: ModelConfig,
        device: Device,
        device_id: int = 0,
        refreshing: threading.Semaphore | None = None,
    ) -> None:
        """Make the caches, and fill them if the configuration asks for it.

        Args:
            server: holds the model.
            config: the model; ``gpu_cache`` describes its caches.
            device: where the caches are.
            device_id: the GPU that ``CreateEmbeddingCache`` named.
            refreshing: limits how many devices refresh their caches at the same time; None: no shared limit.

        Raises:
            ConfigError: the caches would have no row.
            DeviceMemoryError: the device has too little free memory.
            StoreError: a tier did not answer while the caches were filled.
            UnknownModelError: the server does not hold the model.
        """
        super().__init__(server, config, device_id)
        self.device: Device = device
        self.plans = plan_caches(config)
        check_memory(config, self.plans, device)
        self._device_health = DeviceHealth(f"model {config.name!r} on {device.name}")
        self._refreshing = refreshing or threading.Semaphore()
        self._late_keys = 0
        self._late_lock = threading.Lock()  # guards the number above
        closed = f"the GPU cache of model {config.name!r} on {device.name} is closed"
        self._calls = InFlightCounter(lambda: UnknownModelError(closed))
        self._closing = threading.Event()
        with ExitStack() as memory, ExitStack() as threads:
            self._caches = _open_caches(server, config, self.plans, device, self._device_health, memory)
            self._copies = Copies([table for cache in self._caches for table in cache.copies.tables])
            self._workspaces = _open_workspaces(config, self._caches, memory)
            self._insertions = self._open_insertions(threads)
            self._warm_up()
            self._fill()
            self._start_clock(threads)
            self._memory, self._threads = memory.pop_all(), threads.pop_all()

    def lookup_pooled(self, batch: Batch, weights: Sequence[NDArray[np.float32] | None] | None = None) -> LookupResult:
        """See ``LookupSession.lookup_pooled``. A request with shared bags is expanded, and answered in parts."""
        check_batch(batch)
        parts = batch.expanded().parts(self.config.max_batchsize) if batch.bags is not None else [batch]
        return joined_results([self._pooled_part(part, weights) for part in parts])

    def _pooled_part(self, batch: Batch, weights: Sequence[NDArray[np.float32] | None] | None) -> LookupResult:
        with self.request(batch, weights, is_whole=True) as request:
            rows = request.rows()
        return LookupResult(rows, request.defaulted_keys, request.incomplete)

    def lookup(self, keys: Sequence[Keys]) -> LookupResult:
        """See ``LookupSession.lookup``. A large request is split and answered in parts.

        Raises:
            DeviceFaultError: work on the device failed, now or in an earlier request.
            DeviceMemoryError: the device has too little free memory for rows that the caches miss.
        """
        self._check_keys(keys)
        parts = [self._lookup_part(part) for part in parts_of(keys, SINGLE_KEYS)]
        defaulted = [counts for _, counts in parts if counts is not None]
        self._copies.answered([of_table.size for of_table in keys], np.sum(defaulted, axis=0) if defaulted else None)
        return joined_results([result for result, _ in parts])

    def request(
        self, batch: Batch, weights: Sequence[NDArray[np.float32] | None] | None = None, is_whole: bool = False
    ) -> AbstractContextManager[CachedRequest]:
        """Return a context in which a request looks up and pools all keys of ``batch``.

        The batch is loaded at its start. At its end, the missed rows are inserted into the caches.

        Args:
            batch: the samples.
            weights: see ``LookupSession.lookup_pooled``.
            is_whole: the pooled rows are in one piece and the dense features are not uploaded. Otherwise the dense
                features are in ``work.pooling.dense``. See ``Workspace.load``.

        Raises:
            See ``LookupSession.lookup_pooled``.
            UnknownModelError: the lookup is closed.
            DeviceFaultError: work on the device failed, now or in an earlier request.
            DeviceMemoryError: the request is too large for the device's free memory.
        """
        check_batch(batch)
        if batch.samples > self.config.max_batchsize:
            raise RequestError(f"{batch.samples} samples, but the model takes at most {self.config.max_batchsize}")
        self._check_weights(batch, weights)
        dense = None if is_whole else batch.dense
        keys = [table.keys for table in batch.tables]
        return self._request(keys, lambda work: work.pooling.load(batch.tables, weights, dense, is_whole))

    @property
    def is_answering(self) -> bool:
        """See ``LookupSession.is_answering``."""
        return self._device_health.is_sound and not self._closing.is_set()

    def refresh(self) -> None:
        """Read all rows of the caches from the tiers again, and erase rows that no tier has; ``close`` ends it early.

        Raises:
            StoreError: a tier did not answer; the remaining rows stay as they were.
            UnknownModelError: the lookup is closed, or the model has been unloaded.
            DeviceFaultError: work on the device failed.
        """
        ratio = self.config.gpu_cache.refresh_ratio or 1.0
        with self._calls.call(), self._refreshing, self._device_health.watch():
            for cache in self._caches:
                cache.refresh(ratio, self._closing)

    def wait_for_insertions(self, timeout_s: float | None = None) -> bool:
        """Wait until the caches have the rows that earlier requests read or queued.

        Args:
            timeout_s: how long to wait for queued rows; None: without limit.

        Returns:
            whether all queued rows were read in time.

        Raises:
            UnknownModelError: the lookup is closed.
            DeviceFaultError: work on the device failed.
        """
        are_read = self._insertions is None or self._insertions.wait(timeout_s)
        with self._calls.call(), self._device_health.watch():
            for cache in self._caches:
                cache.wait()
        return are_read

    def readings(self) -> Iterator[MetricSample]:
        """Return the caches' counters for the metrics page, none after a device fault; waits for the device."""
        labels = (("model", self.config.name), ("version", str(self.config.version)), ("device", self.device.name))
        for stats, table in zip(self._stats(), self.config.tables, strict=False):
            yield from cache_readings(stats, (*labels, ("table", table.name)))
        if self._insertions is not None:
            yield from insertion_readings(self._late_keys, self._insertions.dropped_keys, labels)

    def close(self) -> None:
        """Refuse new requests, wait for requests in flight, and free the memory.

        The memory of requests that run longer than half a minute is freed when they end. Closing twice is allowed.

        Raises:
            DeviceFaultError: work on the device failed and no call has reported it.
        """
        self._closing.set()
        self._threads.close()
        if not self._calls.close(self._free_memory, _LONGEST_CLOSE_S):
            logger.warning("model %r on %s: closed while requests are in flight", self.config.name, self.device.name)

    def _free_memory(self) -> None:
        try:
            self._memory.close()
        except DeviceFaultError:
            if self._device_health.is_sound:
                raise

    def _lookup_part(self, keys: Sequence[Keys]) -> tuple[LookupResult, NDArray[np.int64] | None]:
        with self._request(keys, lambda work: work.pooling.load_keys(keys), is_part=True) as request:
            rows = request.rows()
        return LookupResult(rows, request.defaulted_keys, request.incomplete), request.defaulted

    @contextmanager
    def _request(
        self, keys: Sequence[Keys], load: Callable[[DeviceWorkspace], None], is_part: bool = False
    ) -> Iterator[CachedRequest]:
        """Lend a workspace for a request of bags or of single keys, then insert the missed rows into the caches.

        The request's keys are counted, unless it is a part of a larger request.
        """
        insert_later = self._insertions.offer if self._insertions else None
        sizes = [of_table.size for of_table in keys]
        count = sum(sizes)
        with self._calls.call(), self._device_health.watch(), self._workspaces.lend(max(count, 1)) as work:
            with _within_memory(self.config, self.device, count):
                load(work)
                request = CachedRequest(self.config.gpu_cache, self._caches, self._copies, keys, work, insert_later)
                yield request
            self._copies.check_loaded()
            request.keep()
        if not is_part:
            self._copies.answered(sizes, request.defaulted)
        if request.late_keys:
            with self._late_lock:
                self._late_keys += request.late_keys

    def _stats(self) -> Sequence[CacheStats]:
        """Return the counters of each table's cache; none if the device has failed or the lookup is closed."""
        with suppress(DeviceFaultError, UnknownModelError), self._calls.call(), self._device_health.watch():
            return [cache.cache.stats() for cache in self._caches]
        return ()

    def _open_insertions(self, opened: ExitStack) -> InsertQueue | None:
        settings = self.config.gpu_cache
        if settings.mode == "exact":
            return None
        if line := keys_left_out(self.config):
            logger.warning("%s", line)
        queue = InsertQueue(self._insert, len(self.config.tables), settings.insertion_threads)
        return opened.enter_context(closing(queue))

    def _fill(self) -> None:
        settings = self.config.gpu_cache
        if settings.fills_at_start or settings.kind == "static":
            for cache, table in zip(self._caches, self.config.tables, strict=True):
                cache.fill(keys_to_fill(self.server, self.config, table, cache.plan.capacity.rows))

    def _warm_up(self) -> None:
        """Compile the kernels and make one workspace, so that the first request does not wait for them."""
        none = np.empty(0, dtype=np.int64)
        empty = [TableKeys(none, np.zeros(table.positions + 1, dtype=np.int32)) for table in self.config.tables]
        with self._workspaces.lend(1) as work:
            work.pooling.pool(empty)
            work.pooling.missing()

    def _start_clock(self, opened: ExitStack) -> None:
        settings = self.config.gpu_cache
        if line := idle_refresh(self.config):
            logger.warning("%s", line)
        elif settings.refresh_delay_s or settings.refresh_interval_s:
            name = f"refresh of the GPU cache of {self.config.name!r} on {self.device.name}"
            first_s, interval_s = (
                settings.refresh_delay_s or settings.refresh_interval_s,
                settings.refresh_interval_s or inf,
            )
            clock = PeriodicWorker(name, self.refresh, interval_s, first_after_s=first_s)
            opened.callback(clock.close, timeout_s=0)  # `close` waits for a refresh as for every other call

    def _insert(self, table: int, keys: Keys) -> None:
        """Insert rows into a table's cache, and wait for it, because insertions must not pile up on the device."""
        cache = self._caches[table]
        with self._calls.call(), self._device_health.watch():
            cache.keep(cache.copies.read([keys]))
            cache.wait()

    def _check_weights(self, batch: Batch, weights: Sequence[NDArray[np.float32] | None] | None) -> None:
        if weights is None:
            return
        self._check_count("weights", weights)
        for table, of_table, given in zip(self.config.tables, batch.tables, weights, strict=True):
            if given is not None:
                check_weights(self.config.full_name(table), of_table.keys, given)


def keys_to_fill(server: ParameterServer, config: ModelConfig, table: TableConfig, rows: int) -> Iterator[Keys]:
    """Yield at most ``rows`` keys of a table, in batches of distinct keys: the hottest first, then in the file's order.

    Hot keys that the table does not have are yielded too.
    """
    model, name = open_table_file(config, table), config.full_name(table)
    first = FirstRows(hot_keys=server.hot_keys)
    choice = first.choose(name, model, rows)
    hottest = _distinct(first.hottest(name))[:rows]
    step = max(-(-hottest.size // _HOT_BATCHES), _LEAST_HOT_BATCH_ROWS)
    for begin in range(0, hottest.size, step):
        yield hottest[begin : begin + step]
    for keys in model.key_batches(_FILL_BATCH_ROWS):
        if choice.is_full:
            return
        keys = _distinct(keys)  # a single file may have a key twice
        others = keys[choice.take(keys)]
        yield others[~np.isin(others, hottest)]


def _distinct(keys: Keys) -> Keys:
    """Return each key once, in the order of first occurrence."""
    _, first = np.unique(keys, return_index=True)
    return keys[np.sort(first)]


def parts_of(keys: Sequence[Keys], most_keys: int) -> Iterator[list[Keys]]:
    """Cut a request, int64[N] per table, into parts of at most ``most_keys`` over all tables; at least one part."""
    ends = list(accumulate((of_table.size for of_table in keys), initial=0))
    for begin in range(0, max(ends[-1], 1), most_keys):
        cuts = zip(keys, ends, strict=False)
        yield [of_table[max(begin - first, 0) : max(begin + most_keys - first, 0)] for of_table, first in cuts]


def joined_results(answers: Sequence[LookupResult]) -> LookupResult:
    """Join the answers to the parts of a request."""
    if len(answers) == 1:
        return answers[0]
    embeddings = [np.concatenate(of_table) for of_table in zip(*(answer.embeddings for answer in answers), strict=True)]
    incomplete = sorted({table for answer in answers for table, _ in answer.incomplete})
    defaulted_keys = sum(answer.defaulted_keys for answer in answers)
    return LookupResult(tuple(embeddings), defaulted_keys, [(table, None) for table in incomplete])


def _open_caches(
    server: ParameterServer,
    config: ModelConfig,
    plans: Sequence[PlannedCache],
    device: Device,
    device_health: DeviceHealth,
    opened: ExitStack,
) -> tuple[TableCache, ...]:
    """Allocate a cache per table; ``opened`` frees the caches."""
    readers = Readers()
    caches = []
    for plan in plans:
        cache = TableCache(server, config.full_name(plan.table), plan, device, readers, device_health)
        caches.append(opened.enter_context(closing(cache)))
    return tuple(caches)


def _open_workspaces(
    config: ModelConfig, caches: Sequence[TableCache], opened: ExitStack
) -> Workspaces[DeviceWorkspace]:
    """Return a pool that makes each workspace when it is first needed; ``opened`` drops them."""
    group = CacheGroup(
        [cache.cache for cache in caches],
        [table.positions for table in config.tables],
        [table.combiner for table in config.tables],
        [table.default_value for table in config.tables],
    )

    def make(max_keys: int) -> DeviceWorkspace:
        with _within_memory(config, group.device, max_keys):
            return DeviceWorkspace(group, config.max_batchsize, max_keys, config.dense_width)

    return opened.enter_context(closing(Workspaces(make, config.gpu_cache.worker_buffers, first_max_keys(config))))


@contextmanager
def _within_memory(config: ModelConfig, device: Device, keys: int) -> Iterator[None]:
    """Turn a MemoryError in this block into a DeviceMemoryError that names the model and the request's size."""
    try:
        yield
    except MemoryError as err:
        reason = f"no memory for requests of {keys:,} keys to model {config.name!r}: {err}"
        raise DeviceMemoryError(device.name, reason) from err
