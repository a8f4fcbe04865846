"""A snapshot opened for reading, as ``serving.open_snapshot`` returns it."""

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
    """Open a snapshot that ``hotrow snapshot`` wrote; only its header is read.

    Processes that open the same file share its memory. The file may be renamed over or deleted while it is open, but
    must not be written to.

    Args:
        file: the snapshot.

    Raises:
        StoreError: the file does not exist, is no snapshot, or is damaged or cut short.
    """
    return SnapshotReader(file)


class SnapshotReader:
    """The rows of a snapshot: int64 key -> float32[D]. Every method may be called from any thread.

    Every call raises StoreError if the reader is closed, if the file was cut short or written to since it was opened,
    or if a page that the call needs is damaged.
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

    def __repr__(self) -> str:
        """Return the shape, or whether it is closed."""
        what = f"{self.rows:,} rows of {self.dim}, {self.row_dtype}" if self._snapshot is not None else "closed"
        return f"SnapshotReader({what})"

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
        """The row type of the file; rows are returned as float32."""
        return self._open().row_dtype

    @property
    def file_bytes(self) -> int:
        """The file's size."""
        return self._open().file_bytes

    @property
    def source(self) -> str:
        """The SHA-256 of what the snapshot was made from."""
        return self._open().source.hex()

    @property
    def native(self) -> Snapshot | None:
        """The open file; None once the reader is closed."""
        return self._snapshot

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """Read rows.

        Args:
            keys: int64[N]; duplicates are allowed, N may be 0.
            out: float32[N, D], C-contiguous; rows of absent keys become zeros.

        Returns:
            found: bool[N].

        Raises:
            ReservedKeyError: a key is one of the four reserved int64 values.
            StoreError: see the class; the content of ``out`` is then undefined.
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
            weights: float32[N], one per key; None: every key counts the same.

        Returns:
            found: bool[N], one per key; absent keys count as rows of zeros.

        Raises:
            ReservedKeyError: a key is one of the four reserved int64 values.
            StoreError: see the class; the content of ``out`` is then undefined.
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
        """Read the whole index, or with ``full`` every byte, and raise StoreError if the file is damaged."""
        snapshot = self._open()
        try:
            if full:
                snapshot.check_content()
            else:
                snapshot.check_index()
        except SnapshotError as err:
            raise self._error(err) from err

    def warm_up(self) -> None:
        """Read the whole file into memory, and check its index; stops when the reader is closed.

        Use it for files that fit into memory. Lookups go on, and are faster afterwards: see docs/storage.md.
        """
        self._open().warm_up(lambda: self._snapshot is None)

    def warm_up_beside(self) -> threading.Thread:
        """Start a thread that warms up; it ends when the reader is closed or deleted, or the main thread ends.

        The thread is no daemon, because Python must not end while a thread is inside the extension.
        """
        reference = weakref.ref(self)

        def is_enough() -> bool:
            reader = reference()
            return reader is None or reader._snapshot is None or not threading.main_thread().is_alive()

        thread = threading.Thread(target=self._open().warm_up, args=(is_enough,), name="hotrow-warm-up")
        thread.start()
        return thread

    def close(self) -> None:
        """Close the file once running calls have ended. Closing twice is allowed."""
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
