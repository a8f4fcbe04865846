"""Where one lookup at a time is done: pinned and device buffers of a fixed size, and a stream.

Letters for shapes: B samples, S slots, T tables, N keys, M missing keys, D embedding_vec_size, F dense features.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import BLOCK_THREADS, MOST_KEYS, deal_items
from gpu_cache.left_behind import keep_until_unused, release_unused
from gpu_cache.missing import MissingKeys, MissingSet
from gpu_cache.numbers import whole_number
from gpu_cache.outputs import KeyRows, Launch, Output, PooledRows, RowRoom
from gpu_cache.request import Floats, RequestBuffer, TableBags, Weights
from gpu_cache.staging import Staging
from kernels.device import Array, Stream

if TYPE_CHECKING:
    from gpu_cache.cache_group import CacheGroup

# Ten times what a large GPU runs at a time: blocks take the items of larger launches in turns. The grid of a graph is
# that of its largest request; blocks without an item end at once.
_MOST_BLOCKS = 1 << 12


class Workspace:
    """Pools the bags of one request at a time, or looks its keys up one by one, on a stream of its own.

    ::

        rows = work.pool(batch.tables)  # or work.lookup(keys)
        while missing := work.missing():
            work.complete([fetch(table, of_table.keys) for table, of_table in zip(tables, missing)])

    ``pool``, ``lookup`` and ``complete`` queue one upload and one launch each and do not wait; ``missing`` waits for
    the stream. Whoever reads the rows on another stream lets it wait for this one. A row that lacks is, until
    ``complete`` has run, one of the table's default value: who takes that for an answer need not call it. Rows fetched
    once are kept for the request, so that the loop ends however many keys the caches let go of meanwhile; that of
    ``lookup`` has one round at most.

    ``pool`` is ``load``, which has the upload, and ``launch``; ``lookup`` is ``load_keys`` and ``launch``. In place of
    a launch for bags there may be a CUDA graph of ``queue`` and of what reads the rows and the dense features, which
    always lie in the same places::

        graph = device.capture(work.stream, lambda: (work.queue(max_samples), compute(work.dense, *work.buffers)))
        work.load(batch.tables, dense=batch.dense)
        with work.reading():
            graph.launch(work.stream)

    The same graph serves behind ``complete``: once a launch has missed keys of a request, its next ones do nothing.

    Used by one thread at a time. Made by ``CacheGroup.workspace``. Of one that is dropped, the memory stays until its
    launches have run: they know some of it by address alone.

    Attributes:
        stream: where all is queued.
        dense: float32[max_samples, F] on the device: the request's dense features, and anything behind its last sample.
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
        release_unused()  # there may be room to take
        self.stream: Stream = device.stream()
        self._group = group
        self._request = RequestBuffer(device, group.tables, group.dims, max_samples, max_keys, dense_dim)
        self._request_on_device: Array = device.empty(self._request.bytes.size, np.uint8)
        dense = self._request_on_device[self._request.dense_place]
        self.dense: Array = dense.view(np.float32).reshape(max_samples, dense_dim)
        self._room = RowRoom(group, max_samples, self._max_single_keys)
        self._pooled, self._key_rows = PooledRows(group, max_samples, self._room), KeyRows(group, self._room)
        self._output: Output = self._pooled
        self._missing = MissingSet(group, max_keys, self.stream)
        self._staging = Staging(device)
        self._sample_bags = sum(table.slots for table in group.tables)
        self._is_idle = False
        self._told: tuple[MissingKeys, ...] | None = None  # what complete has to bring, once missing was asked
        kept = (
            self._request,
            self._request_on_device,
            self._room,
            self._missing,
            self._staging,
            group.descriptors,
        )
        weakref.finalize(self, keep_until_unused, group.readers, None, kept).atexit = False

    @property
    def buffers(self) -> tuple[Array, ...]:
        """Where every request's pooled rows lie, from its first sample on: float32[max_samples, S, D] per table."""
        return self._pooled.buffers

    @property
    def rows(self) -> tuple[Array, ...]:
        """The last request's rows on the device by table, once its launch has run; valid until the next request.

        Of bags float32[B, S, D], of single keys float32[N, D]: parts of one buffer, each at a multiple of 16 bytes.
        """
        return self._room.rows

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Those of ``rows``, which need not be made for it."""
        return self._room.shapes

    @property
    def whole(self) -> Array:
        """The buffer that ``rows`` are parts of, float32[...], up to where they end."""
        return self._room.whole

    @property
    def room_floats(self) -> int:
        """The most that ``whole`` may have."""
        return int(self._room.out.size)

    def reading(self) -> AbstractContextManager[None]:
        """See ``Readers.reading``; what asks the caches on the stream is queued inside."""
        return self._group.readers.reading(self.stream)

    def pool(
        self, tables: Sequence[TableBags], weights: Sequence[Weights | None] | None = None, is_whole: bool = False
    ) -> tuple[Array, ...]:
        """Begin a request: pool what the caches hold, and return ``rows``. See ``load``."""
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
        """Begin a request, without the launch: check it, and queue its upload, of just the bytes that it has.

        Waits for the request before, if that is still under way.

        Args:
            tables: T of them: keys int64[N] and row_ptrs int32[B * S + 1], from 0 to N, never falling. A reserved key
                is taken for one that nobody has: it counts as a row of the default value and is not told of as missing.
            weights: T of them: float32[N], or None where each is 1.
            dense: float32[B, F], for whoever reads the attribute ``dense``; None: nobody does.
            is_whole: the tables' rows follow each other, so that one copy brings ``whole``; else they lie where
                ``buffers`` has them, whatever B is.

        Raises:
            ValueError: an array is of another dtype or size, ``row_ptrs`` are no such offsets, B or the number of all
                keys is beyond what this workspace is for, or ``tables`` or ``weights`` are not T.
            CacheClosedError: a cache was closed.
        """
        self._begin()
        floats = self._request.pack(tables, weights, dense, is_whole)
        self._output = self._pooled
        self._upload()
        self._pooled.place(self._request.samples, floats)

    def load_keys(self, keys: Sequence[NDArray[np.int64]]) -> None:
        """Begin a request whose keys are answered one by one, without the launch; as ``load``.

        Args:
            keys: T of them: int64[N]. A reserved key is taken for one that nobody has, as in ``load``.

        Raises:
            ValueError: an array is of another dtype or shape, they are not T, or there are more keys than this
                workspace answers one by one.
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
        """Queue the request's launch, as ``launch`` does, but outside ``reading()``: a graph of it is of no other."""
        self._launch(self._output.first(), max(min(self._request.items, _MOST_BLOCKS), 1))

    def queue(self, samples: int) -> None:
        """Queue the launch of any request of bags of up to so many samples: what a graph of it captures.

        Who does not capture it calls it in ``reading()``.
        """
        self._launch(self._pooled.first(), min(samples * self._sample_bags, _MOST_BLOCKS))

    def missing(self) -> tuple[MissingKeys, ...]:
        """Wait for the stream, and return what the last launch lacked.

        Returns:
            per table, the keys that no launch of the request missed before, which are what ``complete`` needs rows for;
            or () where no bag, or no key that is answered by itself, lacks one.

        Raises:
            DeviceFaultError: work of the stream failed.
        """
        self.stream.synchronize()
        self._is_idle = True
        self._told = self._missing.read()
        return self._told if any(of_table.bags for of_table in self._told) else ()

    def complete(self, rows: Sequence[NDArray[np.float32]]) -> None:
        """Queue what the last launch lacked; bags are pooled anew, from the caches and what was fetched so far.

        Args:
            rows: T of them: float32[M, D], the rows of ``missing()``'s keys, in their order. They are used as they
                are: where a cache keeps rows in a narrower form than what they were fetched from,
                ``kernels.host.round_rows`` makes them what the cache will answer later.

        Raises:
            ValueError: an array is of another dtype or shape, ``rows`` are not T, or ``missing`` was not asked since
                the last launch.
            CacheClosedError: a cache was closed.
        """
        self._group.require_open()
        told = self._told
        if told is None:
            raise ValueError("complete: expected a call of missing() since the last launch")
        self._check_rows(told, rows)
        head = self._request.head.copy()
        head["bags"] = [of_table.bags for of_table in told]
        items = deal_items(head)
        self._told = None
        self._is_idle = False
        if not items:
            return
        self._missing.settle()
        fetched, places, on_device = self._staging.upload(rows, head, self.stream)
        with self.reading():
            self._launch(self._output.again(), min(items, _MOST_BLOCKS), on_device, (fetched, places))

    def _begin(self) -> None:
        """Wait for the request before, whose buffers the next one takes."""
        self._group.require_open()
        if not self._is_idle:
            self.stream.synchronize()
        self._told = None

    def _upload(self) -> None:
        """Queue the upload of a packed request."""
        self._is_idle = False
        self._missing.forget()
        self._staging.begin()
        used = self._request.used_bytes
        self._group.device.upload(self._request.bytes[:used], self._request_on_device[:used], self.stream)

    def _launch(self, launch: Launch, blocks: int, head: Array | None = None, fetched: tuple[Array, ...] = ()) -> None:
        request, (kernel, output) = self._request_on_device, launch
        if head is None:
            head = request[: self._request.head.nbytes]
        arguments = (self._group.descriptors, head, np.uint32(len(self._group.tables)), request)
        kernel((blocks,), (BLOCK_THREADS,), (*arguments, self._missing.descriptor, *fetched, *output), self.stream)

    def _check_rows(self, told: Sequence[MissingKeys], rows: Sequence[Any]) -> None:
        if len(rows) != len(told):
            raise ValueError(f"expected rows of {len(told)} tables, got {len(rows)}")
        for t, (of_table, dim, given) in enumerate(zip(told, self._group.dims, rows, strict=True)):
            if given.dtype != np.float32 or given.shape != (of_table.keys.size, dim):
                wanted = f"float32[{of_table.keys.size}, {dim}]"
                raise ValueError(f"table {t}: rows: expected {wanted}, got {given.dtype}{list(given.shape)}")
