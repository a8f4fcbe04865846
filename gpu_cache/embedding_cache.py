"""The embedding cache: rows of one table on one device."""

from __future__ import annotations

import weakref
from secrets import randbits
from typing import Self

import numpy as np
import numpy.typing as npt

from gpu_cache.answer import CacheAnswer, CacheStats
from gpu_cache.arguments import device_of, keys_on_device, misses_on_device, readers_of, rows_on_device, whole_number
from gpu_cache.device_table import DeviceTable
from gpu_cache.errors import CacheClosedError, CacheFullError
from gpu_cache.layout import Capacity, KeyType, Kind, Layout, MemoryBytes, RowDtype
from gpu_cache.readers import Readers, defer_free, free_unused
from kernels.device import Array, Device, Stream


class EmbeddingCache:
    """Rows of one embedding table on one device: int64 key -> float32[D]. It never fetches anything.

    Shapes: N keys of a call, M missing keys, V rows held, D embedding_vec_size. Keys, rows and misses are arrays of the
    device, or host arrays, which are copied. The values of host arrays are checked: a reserved key, or a duplicate key
    where duplicates are not allowed, is an error. The values of device arrays are not checked: a reserved key is a miss
    and is never stored. A duplicate key would be stored twice, and a later ``erase`` or ``update`` would reach only one
    of its rows.

    =========  ================  =============================  ====================  ==============  ==================
    operation  stream            the host waits                 threads               duplicate keys  N = 0
    =========  ================  =============================  ====================  ==============  ==================
    query      the caller's      no                             any, in parallel      each answered   nothing is queued,
                                                                                                      M is 0
    replace    the caller's      no; static: until it has run   any, in turns         not allowed     nothing is queued
    update     the caller's      no                             any, in turns         not allowed     nothing is queued
    erase      the caller's      no                             any, in turns         allowed         nothing is queued
    dump,      the cache's own   until it is read               any, in turns         -               -
    absent_keys
    stats      the cache's own   until it is read               any, in turns         -               -
    close      -                 until all work has run         one, after all calls  -               -
    =========  ================  =============================  ====================  ==============  ==================

    The caller's stream is the argument ``stream``, or ``cache.stream`` by default: calls without the argument run in
    the order in which they are made. Arguments must be ready on that stream, and stay unchanged until the call has run.

    An answer is on the device; ``cache.device.to_host(answer.rows)`` waits and copies it to the host. The end of a
    ``with EmbeddingCache(...) as cache`` block closes the cache.

    Queries take no lock on the device and do not wait for rows to be written. Writes follow each other, whatever their
    streams. A write first locks its slots. Then its stream waits for the queries queued so far. Then the write fills
    rows and keys. Queries queued later begin when the slots are locked or the keys erased. So every row that a query
    returns is whole, and belongs to its key. Keys whose slots are being written are missed until then, also in an
    ``update``.

    Kinds:

    - ``"dynamic"``: a full line evicts rows that were not used recently, and may refuse a new key (policy.cuh).
    - ``"static"``: for tables that fit completely. Nothing is evicted, and ``replace`` raises if a key has no slot.
    - ``"uvm"``: like dynamic, with the rows in page-locked host memory, which the device reads over the bus.

    Args:
        dim: embedding_vec_size.
        capacity_rows: rows that must fit, rounded up to whole lines. See ``of_capacity`` for bytes and ratios.
        device: the device, or its name.
        row_dtype: how rows are kept: a row dtype of ``kernels.host.HostTable``, or ``"fp8"``, E4M3 with a scale per
            row. A row with a value that does not fit is left out and counted; an ``update`` with it erases its key.
        key_type: ``"U32"`` for keys from 0 to 2^32 - 3. Its lines take half the bytes.
        line_keys: keys per line: 15, or 7 for lines of half the bytes and a slightly lower hit rate.
        kind: see above.
        seed: of the hash, 0 to 2^32 - 1. It is drawn at random by default, so that nobody can choose keys that all
            belong in one line.
        readers: shared by all caches that one launch asks; by default the cache has its own.

    Attributes:
        is_closed: whether ``close`` was called.

    Raises:
        DeviceUnavailableError: the device cannot be used.
        TypeError: a number is not a whole number, ``device`` is neither a device nor a name, or ``readers`` has another
            type.
        ValueError: an argument is out of range.
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
        free_unused()  # to make room
        self._table = DeviceTable(self.device, self.capacity, self.seed, self.readers, self._own_stream)
        self._finish = weakref.finalize(self, defer_free, self.readers, self._table.memory)
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
        """Return how much device and host memory a cache with these arguments takes."""
        return Capacity.of_rows(Layout(dim, row_dtype, key_type, line_keys), kind, capacity_rows).memory_bytes

    @classmethod
    def of_capacity(
        cls,
        capacity: Capacity,
        device: str | Device = "cuda:0",
        seed: int | None = None,
        readers: Readers | None = None,
    ) -> Self:
        """Make a cache of a capacity that was chosen in rows, in bytes or as a share of a table.

        Args:
            capacity: includes the layout of rows and lines; ``capacity.memory_bytes`` is the memory that it takes.
            device: see the class.
            seed: see the class.
            readers: see the class.

        Raises:
            TypeError: ``capacity`` is not a ``Capacity``; see the class for other errors.
        """
        if not isinstance(capacity, Capacity):
            raise TypeError(f"capacity: expected a Capacity, got {capacity!r}")
        form = capacity.layout
        options = form.row_dtype, form.key_type, form.line_keys, capacity.kind, seed, readers
        return cls(form.dim, capacity.rows, device, *options)

    def query(self, keys: Array, out: CacheAnswer | None = None, stream: Stream | None = None) -> CacheAnswer:
        """Look up rows.

        Args:
            keys: int64[N].
            out: an answer from ``answer``. By default it is a new one, which costs memory and time.
            stream: see the class.

        Returns:
            ``out``, valid once the stream has run.

        Raises:
            TypeError: ``keys`` is not an array, or ``out`` is not an answer.
            ValueError: ``keys`` has another dtype or shape, or more keys than fit into ``out``.
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
        self._table.query(keys, out.arguments(), stream)
        return out

    def answer(self, max_keys: int, stream: Stream | None = None) -> CacheAnswer:
        """Return memory for the answers of queries of at most ``max_keys`` keys on that stream.

        Raises:
            TypeError: ``max_keys`` is not a whole number.
            ValueError: ``max_keys`` is less than 0.
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
        """Offer rows of missing keys. The cache chooses which of them it keeps.

        Keys that are held keep their old rows; ``update`` overwrites rows.

        Args:
            keys: int64[N], distinct; see the class.
            rows: float32[N, D].
            misses: uint32[N], how often each key was missed since the last call; 1 by default.
            stream: see the class.
            are_distinct: the caller knows that the keys are distinct. Otherwise a host array is sorted to check it.

        Raises:
            ValueError: an array has another dtype or shape, or a host array has a duplicate key.
            ReservedKeyError: see the class.
            CacheFullError: the cache is static, and some keys had no slot.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream, must_be_distinct=not are_distinct)
        rows = rows_on_device(self.device, rows, keys.size, self.layout.dim, stream)
        counts = None if misses is None else misses_on_device(self.device, misses, keys.size, stream)
        if not keys.size:
            return
        if self.capacity.kind != "static":
            self._table.replace(keys, rows, counts, stream)
            return
        left_out, held = self._table.replace_static(keys, rows, stream)
        if left_out:
            raise CacheFullError(left_out, held, self.capacity.rows)

    def update(self, keys: Array, rows: Array, stream: Stream | None = None, *, are_distinct: bool = False) -> None:
        """Overwrite the rows of keys that are held, and ignore other keys.

        Lookups miss the keys until earlier lookups have ended. To update many rows while requests run, call this for
        about 1,000 rows at a time and wait for each update.

        Args:
            keys: int64[N], distinct; see the class.
            rows: float32[N, D].
            stream: see the class.
            are_distinct: see ``replace``.

        Raises:
            ValueError: an array has another dtype or shape, or a host array has a duplicate key.
            ReservedKeyError: see the class.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream, must_be_distinct=not are_distinct)
        rows = rows_on_device(self.device, rows, keys.size, self.layout.dim, stream)
        if keys.size:
            self._table.update(keys, rows, stream)

    def note_absent(self, keys: Array, stream: Stream | None = None, *, are_distinct: bool = False) -> None:
        """Note that no tier holds these keys; see ``ABSENT`` in ``Workspace.insert``. Held keys must not be among them.

        Args:
            keys: int64[N], distinct; see the class.
            stream: see the class.
            are_distinct: see ``replace``.

        Raises:
            ValueError: ``keys`` has another dtype or shape, or a host array has a duplicate key.
            ReservedKeyError: see the class.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream, must_be_distinct=not are_distinct)
        if keys.size:
            self._table.note_absent(keys, stream)

    def erase(self, keys: Array, stream: Stream | None = None) -> None:
        """Erase keys, and ignore keys that are not held. Absent keys are missing again.

        Args:
            keys: int64[N].
            stream: see the class.

        Raises:
            ValueError: ``keys`` has another dtype or shape.
            ReservedKeyError: see the class.
            CacheClosedError: the cache was closed.
        """
        stream = self._open_stream(stream)
        keys = keys_on_device(self.device, self.layout, keys, stream)
        if keys.size:
            self._table.erase(keys, stream)

    def dump(self, with_rows: bool = False) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
        """Read out the keys of the cache, and perhaps their rows, a few lines at a time.

        A key that is added or erased during the call may be returned or not. Every other key is returned once.

        Returns:
            keys int64[V], in no particular order, and their rows float32[V, D], or None without ``with_rows``.

        Raises:
            CacheClosedError: the cache was closed.
        """
        self._open_stream(None)
        parts = list(self._table.read_lines(with_rows, self._own_stream))
        keys = np.concatenate([keys for keys, _ in parts])
        return keys, np.concatenate([rows for _, rows in parts]) if with_rows else None

    def absent_keys(self) -> npt.NDArray[np.int64]:
        """Read out the keys that are known to be in no tier (``Workspace.insert``), as ``dump`` does.

        Returns:
            int64[V], in no particular order.

        Raises:
            CacheClosedError: the cache was closed.
        """
        self._open_stream(None)
        parts = self._table.read_lines(False, self._own_stream, of_absent_keys=True)
        return np.concatenate([keys for keys, _ in parts])

    def stats(self) -> CacheStats:
        """Return the cache's figures, after all writes and after the queries that have run."""
        self._open_stream(None)
        counted = self._table.read_counters(self._own_stream)
        return CacheStats(self.capacity.rows, self.capacity.device_bytes, self.capacity.host_bytes, *counted)

    def describe(self, tables: Array, index: int, form: int, default_value: float, stream: Stream) -> None:
        """Queue a kernel that writes this cache's descriptor, for launches that ask several caches.

        Args:
            tables: uint8[T, 64] on the device. The caller keeps the cache alive while it launches with ``tables``, and
                launches inside the cache's ``readers.reading()``.
            index: of this cache in ``tables``.
            form: the number of this cache's form in the kernels' HOTROW_FORMS.
            default_value: every column of a missing key's row.
            stream: where the kernel is queued.

        Raises:
            CacheClosedError: the cache was closed.
        """
        self._open_stream(stream)
        self._table.describe(tables, index, form, default_value, stream)

    def close(self) -> None:
        """Wait until all work has run, and free the memory. Closing twice does nothing.

        Raises:
            DeviceFaultError: some of the work failed.
        """
        self.is_closed = True
        if self._finish.detach() is None:
            return
        try:
            for work in (*self.readers.latest(), *self.readers.writers.latest()):
                work.synchronize()
        finally:
            del self._table
            free_unused()

    def __repr__(self) -> str:
        """Return the capacity, the form of the rows and the device."""
        rows = f"{self.capacity.rows:,} rows of {self.layout.dim}, {self.layout.row_dtype}"
        return f"EmbeddingCache({rows}, {self.device.name})"

    def __enter__(self) -> Self:
        """Return the cache; the end of the block closes it."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close the cache."""
        self.close()

    def _open_stream(self, stream: Stream | None) -> Stream:
        if self.is_closed:
            raise CacheClosedError(f"this cache of {self.capacity.rows} rows on {self.device.name} was closed")
        return self.stream if stream is None else stream
