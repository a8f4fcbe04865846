"""The embedding cache: rows of one table on one device."""

from __future__ import annotations

import weakref
from secrets import randbits
from typing import Self

import numpy as np
import numpy.typing as npt

from gpu_cache.answer import CacheAnswer, CacheStats
from gpu_cache.arguments import device_of, keys_on_device, misses_on_device, readers_of, rows_on_device
from gpu_cache.cache_arrays import CacheArrays
from gpu_cache.cache_kernels import CacheKernels
from gpu_cache.capacity import Capacity, MemoryBytes
from gpu_cache.errors import CacheClosedError, CacheFullError
from gpu_cache.layout import KeyType, Kind, Layout, RowDtype
from gpu_cache.left_behind import keep_until_unused, release_unused
from gpu_cache.numbers import whole_number
from gpu_cache.read_out import read_counters, read_lines
from gpu_cache.readers import Readers
from gpu_cache.row_writes import RowWrites
from gpu_cache.writers import Writers
from kernels.device import Array, Device, Stream


class EmbeddingCache:
    """Rows of one embedding table on one device: int64 key -> float32[D]. It never fetches anything.

    Shapes: N keys of a call, M missing ones, V rows held, D embedding_vec_size. Keys, rows and misses are arrays of the
    device, or of the host, which are copied. Nobody looks into device arrays: a reserved key is a miss there and never
    stored; in host arrays it is an error. So is a key that comes twice where it is not allowed: of a device array it
    would be held twice, and a later ``erase`` or ``update`` would reach one of its rows and leave the other.

    =========  ================  =============================  ====================  ==============  ==================
    operation  stream            the host waits                 threads               duplicate keys  N = 0
    =========  ================  =============================  ====================  ==============  ==================
    query      the caller's      no                             any, side by side     each answered   nothing is queued,
                                                                                                      M is 0
    replace    the caller's      no; static: until it has run   any, in turns         not allowed     nothing is queued
    update     the caller's      no                             any, in turns         not allowed     nothing is queued
    erase      the caller's      no                             any, in turns         allowed         nothing is queued
    dump       the cache's own   until it is read               any, in turns         -               -
    stats      the cache's own   until it is read               any, in turns         -               -
    close      -                 until all work has run         one, after all calls  -               -
    =========  ================  =============================  ====================  ==============  ==================

    The caller's stream is the argument ``stream``, or ``cache.stream`` where there is none: calls without it run in the
    order in which they are made. Arguments must be ready on that stream, and stay as they are until it has run.

    An answer lies on the device; ``cache.device.to_host(answer.rows)`` waits and copies it to the host. At the end of
    ``with EmbeddingCache(...) as cache`` the cache is closed.

    Queries take no lock on the device and wait for no row. Writes follow each other, whatever their streams. A
    write first locks the slots it writes to; then, on its stream, it waits for the queries queued until then; then
    it writes rows and keys. Queries queued later begin when the slots are locked, or the keys erased. So each row
    that a query gives is whole, and that of its key. Keys that were in a write's slots are missed between its
    halves; those of an ``update`` too.

    Kinds:

    - ``"dynamic"``: a full line lets go of rows that were not used of late; a new key may be refused (policy.cuh).
    - ``"static"``: for tables that fit whole. Nothing is ever evicted, and ``replace`` raises where a key has no place.
    - ``"uvm"``: as dynamic, with rows in page-locked memory of the host, which the device reads over the bus.

    Args:
        dim: embedding_vec_size.
        capacity_rows: rows to have room for; rounded up to whole lines. See ``of_capacity`` for bytes and ratios.
        device: where the cache is, or its name.
        row_dtype: how rows are kept: a form of ``kernels.host.HostTable``, or ``"fp8"``, E4M3 with a scale per row.
            Rows with a value that the form cannot hold are left out and counted; an update with one erases its key.
        key_type: ``"U32"`` for keys from 0 to 2^32 - 3, whose lines take half the bytes.
        line_keys: keys per line: 15, or 7 for lines of half the bytes that lose a little hit rate.
        kind: see above.
        seed: of the hash, 0 to 2^32 - 1. It is drawn at random by default, so that nobody can choose keys that all
            belong in one line.
        readers: shared by all caches that one launch asks; one of its own by default.

    Attributes:
        is_closed: whether ``close`` was called.

    Raises:
        DeviceUnavailableError: the device cannot be used.
        TypeError: a number is none, ``device`` is neither a device nor a name, or ``readers`` are none.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        dim: int,
        capacity_rows: int,
        device: str | Device = "cuda:0",
        row_dtype: RowDtype = "fp32",
        key_type: KeyType = "I64",
        line_keys: int = 15,
        kind: Kind = "dynamic",
        seed: int | None = None,
        readers: Readers | None = None,
    ) -> None:
        """Take all memory and wait until it is ready."""
        self.seed = randbits(32) if seed is None else whole_number("seed", seed, 0, 2**32 - 1)
        self.layout = Layout(dim, row_dtype, key_type, line_keys)
        self.capacity = Capacity.of_rows(self.layout, kind, capacity_rows)
        self.device = device_of(device)
        self.readers = readers_of(readers)
        self.is_closed = False
        self.stream = self.device.stream()
        self._own_stream = self.device.stream()
        self._writers = Writers()
        self._refused = 0  # keys without a place of which the callers were told
        self._kernels = CacheKernels(self.device, self.layout)
        release_unused()  # there may be room to take
        self._arrays = CacheArrays(self._kernels, self.capacity, self.seed, self._own_stream)
        self._writes = RowWrites(self._kernels, self.capacity, self._arrays.table, self.readers, self._writers)
        self._finish = weakref.finalize(self, keep_until_unused, self.readers, self._writers, self._arrays.memory)
        self._finish.atexit = False

    @staticmethod
    def memory_bytes(
        dim: int,
        capacity_rows: int,
        row_dtype: RowDtype = "fp32",
        key_type: KeyType = "I64",
        line_keys: int = 15,
        kind: Kind = "dynamic",
    ) -> MemoryBytes:
        """Return how much memory a cache of these arguments takes, on the device and on the host."""
        return Capacity.of_rows(Layout(dim, row_dtype, key_type, line_keys), kind, capacity_rows).memory_bytes

    @classmethod
    def of_capacity(
        cls,
        capacity: Capacity,
        device: str | Device = "cuda:0",
        seed: int | None = None,
        readers: Readers | None = None,
    ) -> Self:
        """Make a cache of a capacity that was chosen before, in rows, bytes or as a part of a table.

        Args:
            capacity: which says what the rows and lines are like, too; ``capacity.memory_bytes`` is what it takes.
            device: see the class.
            seed: see the class.
            readers: see the class.

        Raises:
            TypeError: ``capacity`` is none; see the class for other arguments and errors.
        """
        if not isinstance(capacity, Capacity):
            raise TypeError(f"capacity: expected a Capacity, got {capacity!r}")
        form = capacity.layout
        options = form.row_dtype, form.key_type, form.line_keys, capacity.kind, seed, readers
        return cls(form.dim, capacity.rows, device, *options)

    def query(self, keys: Array, out: CacheAnswer | None = None, stream: Stream | None = None) -> CacheAnswer:
        """Ask for rows.

        Args:
            keys: int64[N].
            out: from ``answer``; a new one by default, which costs memory and time.
            stream: see the class.

        Returns:
            ``out``, to be read once the stream has run.

        Raises:
            TypeError: ``keys`` are no array, or ``out`` is no answer.
            ValueError: ``keys`` are of another dtype or shape, or more than ``out`` has room for.
            ReservedKeyError: see the class.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream)
        if out is None:
            out = self.answer(keys.size, stream)
        elif not isinstance(out, CacheAnswer):
            raise TypeError(f"out: expected what answer() returns, got {out!r}")
        elif keys.size > out.max_keys or out.rows.shape[1] != self.layout.dim:
            raise ValueError(
                f"out: expected room for {keys.size} rows of {self.layout.dim} columns, got {list(out.rows.shape)}"
            )
        if not keys.size:
            out.missing_count[0] = 0
            return out
        with self.readers.reading(stream):
            self._kernels.query(self._arrays.table, keys, out.arguments(), stream)
        return out

    def answer(self, max_keys: int, stream: Stream | None = None) -> CacheAnswer:
        """Return room for the answers of queries of at most ``max_keys`` on that stream.

        Raises:
            TypeError: ``max_keys`` is no whole number.
            ValueError: it is less than 0.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        return CacheAnswer(self.device, whole_number("max_keys", max_keys, 0), self.layout.dim, stream)

    def replace(
        self,
        keys: Array,
        rows: Array,
        misses: Array | None = None,
        stream: Stream | None = None,
        *,
        are_distinct: bool = False,
    ) -> None:
        """Offer rows of keys that were missed; which of them are kept is the cache's choice.

        Keys that are held keep their rows: fresh rows of these go by ``update``.

        Args:
            keys: int64[N], distinct; see the class.
            rows: float32[N, D].
            misses: uint32[N], how often each key was missed since the last call; 1 by default.
            stream: see the class.
            are_distinct: the keys are known to be distinct; else those of a host array are sorted to see that they are.

        Raises:
            ValueError: an array is of another dtype or shape, or a key of a host array comes twice.
            ReservedKeyError: see the class.
            CacheFullError: the cache is static, and some keys had no place.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream, must_be_distinct=not are_distinct)
        rows = rows_on_device(self.device, rows, keys.size, self.layout.dim, stream)
        counts = None if misses is None else misses_on_device(self.device, misses, keys.size, stream)
        if not keys.size:
            return
        self._writes.replace(keys, rows, counts, stream)
        if self.capacity.kind == "static":
            self._require_places()

    def update(self, keys: Array, rows: Array, stream: Stream | None = None, *, are_distinct: bool = False) -> None:
        """Write rows of keys that are held anew; others are left out.

        Args:
            keys: int64[N], distinct; see the class.
            rows: float32[N, D].
            stream: see the class.
            are_distinct: see ``replace``.

        Raises:
            ValueError: an array is of another dtype or shape, or a key of a host array comes twice.
            ReservedKeyError: see the class.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream, must_be_distinct=not are_distinct)
        rows = rows_on_device(self.device, rows, keys.size, self.layout.dim, stream)
        if keys.size:
            self._writes.update(keys, rows, stream)

    def erase(self, keys: Array, stream: Stream | None = None) -> None:
        """Let go of keys; those that are not held do nothing.

        Args:
            keys: int64[N].
            stream: see the class.

        Raises:
            ValueError: ``keys`` are of another dtype or shape.
            ReservedKeyError: see the class.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream)
        if keys.size:
            self._writes.erase(keys, stream)

    def dump(self, with_rows: bool = False) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
        """Read out what the cache holds, some lines at a time.

        Of keys that writers add or erase meanwhile, each may be met or not; all others are met once.

        Returns:
            keys int64[V], in no particular order, and their rows float32[V, D], or None.

        Raises:
            CacheClosedError: the cache was closed.
        """
        self._open_stream(None)
        stream = self._own_stream
        parts = list(read_lines(self._kernels, self.capacity, self._arrays.table, self._writers, stream, with_rows))
        keys = np.concatenate([keys for keys, _ in parts])
        return keys, np.concatenate([rows for _, rows in parts]) if with_rows else None

    def stats(self) -> CacheStats:
        """Return the cache's figures, after all writes and those queries that have run."""
        self._open_stream(None)
        counted = read_counters(self.device, self._arrays.counters, self._writers, self._own_stream)
        return CacheStats(self.capacity.rows, self.capacity.device_bytes, self.capacity.host_bytes, *counted)

    def describe(self, tables: Array, index: int, form: int, default_value: float, stream: Stream) -> None:
        """Queue the writing of this cache's descriptor, for launches that ask several caches.

        Args:
            tables: uint8[T, 64] on the device; whoever launches with it keeps the cache, and uses its ``readers``.
            index: in ``tables``.
            form: the number of this cache's form in the kernels' HOTROW_FORMS.
            default_value: every column of a missing key's row.
            stream: where it is queued.

        Raises:
            CacheClosedError: the cache was closed.
        """
        self._open_stream(stream)
        self._arrays.describe(tables, index, form, default_value, stream)

    def close(self) -> None:
        """Wait until all work has run and give the memory back. Closing twice does nothing.

        Raises:
            DeviceFaultError: some of that work failed.
        """
        self.is_closed = True
        if self._finish.detach() is None:
            return
        try:
            for work in (*self.readers.latest(), *self._writers.latest()):
                work.synchronize()
        finally:
            del self._arrays
            release_unused()

    def __enter__(self) -> Self:
        """The cache itself; leaving the block closes it."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """See ``close``."""
        self.close()

    def _open_stream(self, stream: Stream | None) -> Stream:
        if self.is_closed:
            raise CacheClosedError(f"this cache of {self.capacity.rows} rows on {self.device.name} was closed")
        return self.stream if stream is None else stream

    def _require_places(self) -> None:
        stats = self.stats()
        left_out, self._refused = stats.refused_without_slot - self._refused, stats.refused_without_slot
        if left_out:
            raise CacheFullError(left_out, stats.rows, stats.capacity_rows)
