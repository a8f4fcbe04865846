"""A workspace for one request at a time: pinned and device buffers of a fixed size, and a stream.

Letters for shapes: B samples, S slots, T tables, N keys, M missing keys, D embedding_vec_size, F dense features.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu_cache.arguments import whole_number
from gpu_cache.bag_layout import BLOCK_THREADS, MOST_KEYS, deal_items
from gpu_cache.missing import Insertion, Missing, MissingSet, Staging
from gpu_cache.outputs import KeyRows, Launch, Output, OutputBuffer, PooledRows
from gpu_cache.readers import defer_free, free_unused
from gpu_cache.request import Floats, RequestBuffer, TableBags, Weights
from kernels.device import Array, Stream

if TYPE_CHECKING:
    from gpu_cache.cache_group import CacheGroup

_FLOAT32 = np.dtype(np.float32)  # faster to compare than the type
# Ten times what a large GPU runs at a time: in larger launches, blocks take items in turns. A graph has the grid of its
# largest request; blocks without an item end at once.
_MOST_BLOCKS = 1 << 12


class Workspace:
    """Pools the bags of one request at a time, or looks its keys up one by one, on a stream of its own.

    ::

        rows = work.pool(batch.tables)  # or work.lookup(keys)
        while missing := work.missing():
            work.complete([fetch(table, of_table.keys) for table, of_table in zip(tables, missing)])

    ``pool``, ``lookup`` and ``complete`` each queue one upload and one launch and do not wait. ``missing`` waits for
    the launch, but not for work that the caller has queued on the stream after it. If another stream reads the rows,
    let it wait for this stream. Missing rows hold the table's default value until ``complete`` runs. Skip ``complete``
    if default values are acceptable. Fetched rows are kept for the request, so the loop ends even if the caches evict
    keys in between. After ``lookup`` the loop has at most one round.

    ``pool`` is ``load``, which queues the upload, then ``launch``. ``lookup`` is ``load_keys``, then ``launch``. A CUDA
    graph may take the place of ``launch`` for bags. It captures ``queue`` and the work that reads the rows and the
    dense features, which are always in the same places::

        graph = device.capture(work.stream, lambda: (work.queue(max_samples), compute(work.dense, *work.buffers)))
        work.load(batch.tables, dense=batch.dense)
        with work.reading():
            graph.launch(work.stream)

    The same graph may run again after ``complete``: once a launch has missed keys of a request, the request's next
    launches of ``queue`` do nothing.

    One thread at a time may use a workspace. ``CacheGroup.workspace`` makes one. The memory of a dropped workspace is
    freed when its launches have run, because they know some of it only by address.

    Attributes:
        stream: where everything is queued.
        dense: float32[max_samples, F] on the device: the request's dense features. Rows after its last sample are
            undefined.
    """

    def __init__(
        self, group: CacheGroup, max_samples: int, max_keys: int, dense_dim: int = 0, max_single_keys: int = 0
    ) -> None:
        """See ``CacheGroup.workspace``."""
        max_samples = whole_number("max_samples", max_samples, 1)
        max_keys = whole_number("max_keys", max_keys, 1, MOST_KEYS)
        dense_dim = whole_number("dense_dim", dense_dim, 0)
        self._max_single_keys = whole_number("max_single_keys", max_single_keys, 0, max_keys)
        device = group.device
        free_unused()  # to make room
        self.stream: Stream = device.stream()
        self._group = group
        self._request = RequestBuffer(device, group.tables, group.dims, max_samples, max_keys, dense_dim)
        self._request_on_device: Array = device.empty(self._request.bytes.size, np.uint8)
        self._head_on_device: Array = self._request_on_device[: self._request.head.nbytes]
        dense = self._request_on_device[self._request.dense_place]
        self.dense: Array = dense.view(np.float32).reshape(max_samples, dense_dim)
        self._buffer = OutputBuffer(group, max_samples, self._max_single_keys)
        self._pooled, self._key_rows = PooledRows(group, max_samples, self._buffer), KeyRows(group, self._buffer)
        self._output: Output = self._pooled
        self._missing = MissingSet(group, max_keys, self.stream)
        self._staging = Staging(device)
        self._insertion = Insertion(group, max_keys)
        self._sample_bags = sum(table.slots for table in group.tables)
        self._is_idle = False
        self._reported: Missing | None = None  # by missing, for complete
        kept = (
            self._request,
            self._request_on_device,
            self._buffer,
            self._missing,
            self._staging,
            self._insertion,
            group.descriptors,
        )
        weakref.finalize(self, defer_free, group.readers, kept).atexit = False

    @property
    def buffers(self) -> tuple[Array, ...]:
        """The memory of every request's pooled rows: float32[max_samples, S, D] per table."""
        return self._pooled.buffers

    @property
    def rows(self) -> tuple[Array, ...]:
        """The last request's rows by table, valid once its launch has run and until the next request.

        Bags have rows float32[B, S, D], single keys float32[N, D]. Each table's rows begin at a multiple of 16 bytes.
        """
        return self._buffer.rows

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of ``rows``."""
        return self._buffer.shapes

    @property
    def whole(self) -> Array:
        """The memory of all ``rows``, float32[...]."""
        return self._buffer.whole

    @property
    def absent(self) -> NDArray[np.uint32]:
        """uint32[T], how many of the request's keys, with duplicates, are known to be in no tier; after ``missing``."""
        return self._missing.absent

    @property
    def most_floats(self) -> int:
        """The largest size of ``whole``."""
        return int(self._buffer.out.size)

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which launches that ask the caches are queued; see ``Readers.reading``."""
        return self._group.readers.reading(self.stream)

    def pool(
        self, tables: Sequence[TableBags], weights: Sequence[Weights | None] | None = None, is_whole: bool = False
    ) -> tuple[Array, ...]:
        """Begin a request: pool the rows that the caches hold, and return ``rows``. See ``load``."""
        self.load(tables, weights, is_whole=is_whole)
        self.launch()
        return self.rows

    def lookup(self, keys: Sequence[NDArray[np.int64]]) -> tuple[Array, ...]:
        """Begin a request: copy the rows that the caches hold, and return ``rows``. See ``load_keys``."""
        self.load_keys(keys)
        self.launch()
        return self.rows

    def load(
        self,
        tables: Sequence[TableBags],
        weights: Sequence[Weights | None] | None = None,
        dense: Floats | None = None,
        is_whole: bool = False,
    ) -> None:
        """Begin a request without the launch: check it, and queue the upload of its bytes.

        Waits for the previous request if it still runs.

        Args:
            tables: for each table keys int64[N] and row_ptrs int32[B * S + 1], which go from 0 to N and never fall. A
                reserved key has a row of the default value and is not reported as missing.
            weights: for each table float32[N], or None if each weight is 1.
            dense: float32[B, F] for the attribute ``dense``, or None if nobody reads it.
            is_whole: the tables' rows follow each other, so that one copy brings ``whole``. Otherwise they are in
                ``buffers``, whatever B is.

        Raises:
            ValueError: an array has another dtype or size, ``row_ptrs`` breaks its rules, the workspace is too small
                for the request, or ``tables`` or ``weights`` does not have T elements.
            CacheClosedError: a cache was closed.
        """
        self._begin()
        floats = self._request.pack(tables, weights, dense, is_whole)
        self._output = self._pooled
        self._upload()
        self._pooled.place(self._request.samples, floats)

    def load_keys(self, keys: Sequence[NDArray[np.int64]]) -> None:
        """Begin a request whose keys are answered one by one, without the launch; see ``load``.

        Args:
            keys: int64[N] for each table. A reserved key has a row of the default value, as in ``load``.

        Raises:
            ValueError: an array has another dtype or shape, ``keys`` does not have T elements, or there are more than
                ``max_single_keys`` keys.
            CacheClosedError: a cache was closed.
        """
        self._begin()
        floats = self._request.pack_keys(keys, self._key_rows.item_keys, self._max_single_keys)
        self._key_rows.place([of_table.size for of_table in keys], floats)
        self._output = self._key_rows
        self._upload()

    def launch(self) -> None:
        """Queue the request's launch."""
        with self.reading():
            self.queue_request()

    def queue_request(self) -> None:
        """Queue the request's launch for the caller's own ``reading()``, or for a graph of this request alone."""
        self._launch(self._output.first(), max(min(self._request.items, _MOST_BLOCKS), 1))

    def queue(self, samples: int) -> None:
        """Queue the launch of any request of bags of up to this many samples, in a graph or inside ``reading()``."""
        self._launch(self._pooled.first(), min(samples * self._sample_bags, _MOST_BLOCKS))

    def missing(self) -> Missing | tuple[()]:
        """Wait for the last launch, and return its missing keys.

        Returns:
            per table, the keys that the request's earlier launches did not miss; ``complete`` needs their rows. () if
            every bag, or every single key, is complete.

        Raises:
            DeviceFaultError: work on the stream failed.
        """
        (self._group.readers.last(self.stream) or self.stream).synchronize()
        self._is_idle = True
        self._reported = self._missing.read()
        return self._reported if np.count_nonzero(self._reported.bags) else ()

    def complete(self, rows: Sequence[NDArray[np.float32]]) -> None:
        """Queue the rows that the last launch missed; incomplete bags are pooled again from cached and fetched rows.

        Args:
            rows: for each table float32[M, D], the rows of ``missing()``'s keys in their order, used as they are. If a
                cache keeps rows in a narrower row dtype than their source, ``kernels.host.round_rows`` rounds them to
                what the cache will return later.

        Raises:
            ValueError: an array has another dtype or shape, ``rows`` does not have T elements, or ``missing`` was not
                called since the last launch.
            CacheClosedError: a cache was closed.
        """
        self._group.require_open()
        reported = self._reported
        if reported is None:
            raise ValueError("complete: expected a call of missing() since the last launch")
        self._check_rows(reported, rows)
        head = self._request.head.copy()
        head["bags"] = reported.bags
        items = deal_items(head)
        if not items:
            return
        fetched, places, on_device = self._staging.upload(rows, head, self.stream)
        self._reported = None
        self._is_idle = False
        self._missing.settle()
        with self.reading():
            self._launch(self._output.again(), min(items, _MOST_BLOCKS), on_device, (fetched, places))

    def insert(self, misses: NDArray[np.uint32]) -> None:
        """Queue the insertion of the request's fetched rows into the caches; nothing waits.

        The caches choose which rows they keep, as in ``EmbeddingCache.replace``. A static cache without a slot for a
        key counts the key as refused. The next request on this stream starts after the insertion. If a cache occurs
        more than once in the group, it gets the keys of its first table only.

        Args:
            misses: uint32[M], for the keys of all calls of ``complete``, in their order, round after round and table
                after table: how often the key was missed (``MissingKeys.times``), or 0 to leave it out. A key whose
                row has changed since it was read must be left out. ``times | ABSENT`` says that no tier holds the key.
                Later lookups answer such a key with the default value and do not report it as missing, until
                ``erase``, ``replace`` or ``update`` names it. A cache keeps a bounded number of such keys.

        Raises:
            ValueError: ``misses`` has another dtype or shape.
            CacheClosedError: a cache was closed.
        """
        self._group.require_open()
        count = sum(self._staging.counts)
        if misses.dtype != np.uint32 or misses.shape != (count,):
            raise ValueError(f"misses: expected uint32[{count}], got {misses.dtype}{list(misses.shape)}")
        if np.count_nonzero(misses):
            self._insertion.queue(misses, self._missing, self._staging, self._head_on_device)

    def _begin(self) -> None:
        """Wait for the previous request, because the next one uses its buffers."""
        self._group.require_open()
        if not self._is_idle:
            self.stream.synchronize()
        self._reported = None

    def _upload(self) -> None:
        """Queue the upload of a packed request."""
        self._is_idle = False
        self._missing.begin()
        self._staging.begin()
        used = self._request.used_bytes
        self._group.device.upload(self._request.bytes[:used], self._request_on_device[:used], self.stream)

    def _launch(self, launch: Launch, blocks: int, head: Array | None = None, fetched: tuple[Array, ...] = ()) -> None:
        request, (kernel, output) = self._request_on_device, launch
        if head is None:
            head = self._head_on_device
        arguments = (self._group.descriptors, head, np.uint32(len(self._group.tables)), request)
        kernel((blocks,), (BLOCK_THREADS,), (*arguments, self._missing.descriptor, *fetched, *output), self.stream)

    def _check_rows(self, reported: Missing, rows: Sequence[Any]) -> None:
        if len(rows) != len(reported):
            raise ValueError(f"expected rows of {len(reported)} tables, got {len(rows)}")
        for t, (size, dim, given) in enumerate(
            zip(np.diff(reported.ends).tolist(), self._group.dims, rows, strict=True)
        ):
            if given.shape != (size, dim) or given.dtype != _FLOAT32:
                wanted = f"float32[{size}, {dim}]"
                raise ValueError(f"table {t}: rows: expected {wanted}, got {given.dtype}{list(given.shape)}")
