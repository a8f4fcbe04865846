"""One table's cache on one device, the tiers behind it, and whether the device can be used."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import ceil

import numpy as np

from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheFullError
from gpu_cache.readers import Readers
from kernels.device import Device
from kernels.errors import DeviceFaultError
from serving.lookup.cache_plan import ERASED_AT_ONCE, PlannedCache
from serving.parameter_server import ParameterServer
from serving.parameter_server.copies import ReadRows
from serving.storage.store import Keys

logger = logging.getLogger(__name__)

_MOST_REFRESHED_ROWS = 65536  # in one step, because a step holds all its rows in the host's memory
# Requests miss the rows of one update until the readers before it have ended, and their misses cost time. Updates do
# not queue up, because later readers would wait for all of them.
_UPDATED_AT_ONCE = 1024


class DeviceHealth:
    """Remembers the first fault of a device under one model's caches. May be used from any thread.

    CUDA refuses all work in a process whose kernel has failed. A device that still works may have missed an erasure,
    and its cache would answer with an outdated row. So nothing uses the device after its first fault.
    """

    def __init__(self, about: str) -> None:
        """Begin without a fault; ``about`` names the model and the device in messages."""
        self._about = about
        self._fault: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no work has failed so far."""
        return self._fault is None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Use the device in this block.

        Raises:
            DeviceFaultError: work failed, in this block or in an earlier block.
        """
        if self._fault is not None:
            raise DeviceFaultError(f"{self._about}: not used after a fault: {self._fault}")
        try:
            yield
        except DeviceFaultError as err:
            self._fault = str(err)
            logger.error("%s: not used anymore, restart the process: %s", self._about, err)
            raise


class TableCache:
    """One table's cache in front of the tiers. Every method may be called from any thread.

    Attributes:
        plan: the table and the size of its cache.
        cache: the cache that a ``CacheGroup`` queries.
        copies: reads the table's rows, and reports their changes.
    """

    def __init__(
        self,
        server: ParameterServer,
        name: str,
        plan: PlannedCache,
        device: Device,
        readers: Readers,
        device_health: DeviceHealth,
    ) -> None:
        """Allocate the memory, and subscribe to changes of the table ``name`` in the tiers of ``server``.

        ``readers`` is shared by all caches of the model on the device. Callers use the cache only inside
        ``device_health.watch()``.
        """
        layout, capacity = plan.capacity.layout, plan.capacity
        self.plan = plan
        self._name = name
        self.cache = EmbeddingCache(
            layout.dim,
            capacity.rows,
            device,
            layout.row_dtype,
            layout.key_type,
            layout.line_keys,
            capacity.kind,
            readers=readers,
        )
        self._device_health = device_health
        self._is_static = capacity.kind == "static"
        self._changes = 0  # reported by the tiers
        self._full_after = -1  # value of _changes when a static cache had no place for a row
        self._is_short_of_memory = False
        # Allocated now, because changed rows must be erased even when no memory is left.
        self._erased = device.pinned(ERASED_AT_ONCE, np.int64)
        self._erased_on_device = device.empty(ERASED_AT_ONCE, np.int64)
        self.copies = server.copies(name, self._forget)

    def keep(self, read: ReadRows) -> None:
        """Offer rows to the cache, except rows that changed since they were read and keys that it cannot hold.

        Keys that no tier holds are noted as absent. Without memory nothing is inserted, which is logged once: the tiers
        have the rows.

        Args:
            read: rows of distinct keys that the cache does not hold.
        """
        changes, (keys,), (rows,) = self._changes, read.keys, read.rows
        with self.copies.storing([read]) as unchanged:
            fits = unchanged & self.cache.layout.can_hold(keys)
            kept, absent = fits & read.found & (not self._is_full()), fits & ~read.found
            try:
                if np.count_nonzero(absent):
                    self.cache.note_absent(keys[absent], are_distinct=True)
                if np.count_nonzero(kept):
                    self.cache.replace(keys[kept], rows[kept], are_distinct=True)
                self._is_short_of_memory = False
            except CacheFullError:  # rows that were added after the load; the tiers have them
                self._full_after = changes
            except MemoryError as err:
                if not self._is_short_of_memory:
                    logger.warning("%s: missing rows were not inserted into its GPU cache: %s", self._name, err)
                self._is_short_of_memory = True

    def can_keep(self, keys: Keys) -> bool:
        """Whether the cache can hold all these keys: lines of 32-bit keys cannot hold the two largest uint32."""
        return bool(self.cache.layout.can_hold(keys).all())

    def fill(self, batches: Iterable[Keys]) -> None:
        """Offer the rows of distinct keys, before requests come.

        Raises:
            StoreError: a tier did not answer.
        """
        for keys in batches:
            self.keep(self.copies.read([keys], is_request=False))
        self.wait()
        if self._is_full():
            logger.warning("%s: its static cache has no room for some rows: the tiers answer them", self._name)

    def refresh(self, ratio: float, closing: threading.Event) -> None:
        """Read the cached rows from the tiers again, part by part, and erase rows that no tier has.

        Absent keys are read again too. Those that a tier has now are missing afterwards.

        Args:
            ratio: the part of the capacity that one step reads; never more than 65,536 rows.
            closing: ends the refresh between two steps.

        Raises:
            StoreError: a tier did not answer; the remaining rows stay as they were.
        """
        step = max(min(ceil(ratio * self.plan.capacity.rows), _MOST_REFRESHED_ROWS), 1)
        for keys, are_held in ((self.cache.dump()[0], True), (self.cache.absent_keys(), False)):
            for begin in range(0, keys.size, step):
                if closing.is_set():
                    return
                part = keys[begin : begin + step]
                read = self.copies.read([part], is_request=False)
                for first in range(0, part.size, _UPDATED_AT_ONCE):
                    self._update(read, slice(first, first + _UPDATED_AT_ONCE), are_held)

    def _update(self, read: ReadRows, part: slice, are_held: bool) -> None:
        """Update a part of the rows, or erase them if no tier has them, and wait for it."""
        (keys,), (rows,), found = read.keys, read.rows, read.found[part]
        keys, rows = keys[part], rows[part]
        with self.copies.storing([ReadRows([keys], [rows], found, read.version)]) as unchanged:
            kept = unchanged & found
            self.cache.update(keys[kept], rows[kept], are_distinct=True)
            if are_held:
                self.cache.erase(keys[unchanged & ~found])
        self.wait()

    def wait(self) -> None:
        """Wait until the cache has all rows that were offered so far."""
        for write in self.cache.readers.writers.latest():
            write.synchronize()

    def close(self) -> None:
        """Free the memory."""
        self.copies.close()
        self.cache.close()
        del self._erased, self._erased_on_device

    def _is_full(self) -> bool:
        """Whether a static cache had no place for a row, and nothing was erased since."""
        return self._is_static and self._full_after == self._changes

    def _forget(self, keys: Keys) -> None:
        """Erase keys whose rows have changed in the tiers; queries that begin afterwards do not find them.

        A device fault is not raised here, because no query follows it and the tiers have taken the change. Only one
        thread at a time reports changes, so the buffers need no lock.
        """
        self._changes += 1
        with suppress(DeviceFaultError), self._device_health.watch():
            for begin in range(0, keys.size, ERASED_AT_ONCE):
                part = keys[begin : begin + ERASED_AT_ONCE]
                host, on_device = self._erased[: part.size], self._erased_on_device[: part.size]
                host[:] = part
                self.cache.device.upload(host, on_device, self.cache.stream)
                self.cache.erase(on_device)
                self.cache.stream.synchronize()
