"""One snapshot, opened for reading: what ``serving.open_snapshot`` returns."""

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kernels.errors import SnapshotError
from kernels.host import RowDtype
from kernels.snapshot import Snapshot
from serving.errors import StoreError
from serving.model.records import Combiner
from serving.storage.store import Keys, Mask, RowPtrs, Vectors, Weights


def open_snapshot(file: str | Path) -> "SnapshotReader":
    """Open a snapshot that ``hotrow snapshot`` wrote: its header is read and no row, however large it is.

    Processes that open the same file share its memory. The file may be replaced by a rename, or deleted, while it is
    open; it must not be written to.

    Args:
        file: the snapshot.

    Raises:
        StoreError: there is no such file, or it is no snapshot, damaged or cut short.
    """
    return SnapshotReader(file)


class SnapshotReader:
    """The rows of a snapshot: int64 key -> float32[D]. Every method may be called from any thread.

    Every call raises StoreError once the reader is closed, where the file was cut short or written to since it was
    opened, and where it is damaged in a page that the call needs.
    """

    def __init__(self, file: str | Path, table: str = "") -> None:
        """See ``open_snapshot``; ``table`` is the full name for messages."""
        self._table = table
        try:
            self._snapshot: Snapshot | None = Snapshot(file)
        except SnapshotError as err:
            raise self._error(err) from err
        except MemoryError as err:
            raise StoreError("snapshot", table, f"the system refused the memory to open {file}") from err

    @property
    def rows(self) -> int:
        """V."""
        return len(self._open())

    @property
    def dim(self) -> int:
        """D."""
        return self._open().dim

    @property
    def row_dtype(self) -> RowDtype:
        """The form in which rows are kept; they are given as float32."""
        return self._open().row_dtype

    @property
    def file_bytes(self) -> int:
        """The file's size."""
        return self._open().file_bytes

    @property
    def source(self) -> str:
        """The SHA-256 that names what the snapshot was made from."""
        return self._open().source.hex()

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """Read rows.

        Args:
            keys: int64[N]; duplicates are allowed, N may be 0.
            out: float32[N, D], C-contiguous; rows of absent keys become zeros.

        Returns:
            found: bool[N].

        Raises:
            ReservedKeyError: a key is one of the four reserved int64 values.
            StoreError: see the class; ``out`` then holds anything.
        """
        try:
            return self._open().fetch(keys, out)
        except SnapshotError as err:
            raise self._error(err) from err

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """Pool bags of rows in the pass that finds them.

        Args:
            keys: int64[N].
            row_ptrs: int32[R + 1] or int64[R + 1], CSR offsets of the R bags into the N keys.
            out: float32[R, D], C-contiguous; an empty bag becomes zeros.
            combiner: see ``kernels.host.pool_rows``.
            weights: float32[N], one per key; None: every key counts alike.

        Returns:
            found: bool[N], one per key; absent keys count as rows of zeros.

        Raises:
            ReservedKeyError: a key is one of the four reserved int64 values.
            StoreError: see the class; ``out`` then holds anything.
        """
        try:
            return self._open().fetch_pooled(keys, row_ptrs, out, combiner, weights)
        except SnapshotError as err:
            raise self._error(err) from err

    def items(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """All rows, int64[N] and float32[N, D], in the order in which they were written."""
        try:
            yield from self._open().items(batch_rows)
        except SnapshotError as err:
            raise self._error(err) from err

    def check(self, *, full: bool = False) -> None:
        """Read the whole index, or with ``full`` every byte, and raise StoreError where it is not what was written."""
        snapshot = self._open()
        try:
            if full:
                snapshot.check_content()
            else:
                snapshot.check_index()
        except SnapshotError as err:
            raise self._error(err) from err

    def warm_up(self) -> None:
        """Read the whole file into memory, for files that memory has room for; ends early when the reader is closed.

        The index is checked in passing, so that lookups need not check its pages as they come to them.

        Lookups that run beside it are answered meanwhile, and faster from then on: see docs/storage.md.
        """
        self._open().warm_up(lambda: self._snapshot is None)

    def warm_up_beside(self) -> threading.Thread:
        """Start a thread that warms up; it ends when the reader is closed or forgotten, or the main thread ends.

        It is no daemon: one that the interpreter's end meets inside the extension is never heard of again.
        """
        reference = weakref.ref(self)

        def is_enough() -> bool:
            reader = reference()
            return reader is None or reader._snapshot is None or not threading.main_thread().is_alive()

        thread = threading.Thread(target=self._open().warm_up, args=(is_enough,), name="hotrow-warm-up")
        thread.start()
        return thread

    def close(self) -> None:
        """Let the file go, as soon as calls that run on it have ended. Closing twice is allowed."""
        self._snapshot = None

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _open(self) -> Snapshot:
        snapshot = self._snapshot
        if snapshot is None:
            raise StoreError("snapshot", self._table, "the snapshot is closed")
        return snapshot

    def _error(self, err: SnapshotError) -> StoreError:
        return StoreError("snapshot", self._table, str(err))
