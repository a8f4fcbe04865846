"""The rows of a table of the snapshot tier: a file that never changes, and an overlay with the changes since."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernels.errors import ReservedKeyError, RowValueError, TableFullError
from kernels.host import HostTable, KeyIndex, pool_rows
from kernels.snapshot import Snapshot
from serving.errors import StoreError, StoreFullError
from serving.model.records import Combiner
from serving.storage.snapshot.reader import SnapshotReader
from serving.storage.store import Keys, Mask, RowPtrs, TableSpec, Vectors, Weights, bags_with, none_found

_FIRST_CHANGED_KEYS = 1024


@dataclass(frozen=True, slots=True)
class _Overlay:
    """The changes of a table: new rows by key, and the evicted keys of the file, which stay hidden for good.

    A reader looks up the rows, then the file, then the hidden keys. An eviction hides a key before it removes the row,
    and an insertion unhides nothing. So a reader sees a key as it was at some moment of its call, without a lock.

    For pooled lookups there is a set of the changed keys. It is small, so it stays in the processor's caches. A key is
    in it before it changes.
    """

    rows: HostTable
    hidden: HostTable  # one column: a set of keys
    changed: HostTable  # a set, too: the keys of both, and perhaps others

    def touched(self) -> KeyIndex:
        """Return the keys that were inserted or evicted until now."""
        touched = KeyIndex()
        for table in (self.rows, self.hidden):
            for keys, _ in table.items():
                touched.find_or_insert(keys)
        return touched


class OverlaidSnapshot:
    """The rows of a table of a snapshot store; see ``StoreTable`` for the calls and their errors.

    Until the first change, lookups only read the file. The first change takes the memory of the overlay. From then on a
    pooled lookup pools from the file, and then pools each bag with a changed key again, with the same bits.
    """

    def __init__(self, spec: TableSpec, reader: SnapshotReader | None, overlay_rows: int) -> None:
        """Put an empty overlay of at most ``overlay_rows`` rows over ``reader``; None: over no rows."""
        self.spec = spec
        self.overlay_rows = overlay_rows
        self._reader = reader
        self._file_rows = reader.rows if reader is not None else 0
        self._overlay: _Overlay | None = None  # made by the first writer
        self._rows = self._file_rows
        self._lock = threading.Lock()  # one writer at a time; guards the two fields above

    @property
    def native(self) -> Snapshot | None:
        """The file, while it holds all rows of the table; None after the first change."""
        return self._reader.native if self._reader is not None and self._overlay is None else None

    @property
    def file_bytes(self) -> int:
        """The size of the mapped file; 0 without a file."""
        return self._reader.file_bytes if self._reader is not None else 0

    @property
    def capacity_rows(self) -> int:
        """Rows of the file and of the overlay."""
        return self._file_rows + self.overlay_rows

    @property
    def used_ratio(self) -> float:
        """How much of the overlay is taken."""
        overlay = self._overlay
        if overlay is None:
            return 0.0
        return max(len(overlay.rows), len(overlay.hidden)) / self.overlay_rows

    def __len__(self) -> int:
        """Rows held, exactly."""
        return self._rows

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``."""
        overlay = self._overlay
        if overlay is None:
            return self._fetch_file(keys, out)
        found = overlay.rows.fetch(keys, out)
        rest = np.flatnonzero(~found)
        if rest.size and self._reader is not None:
            rest_keys = keys[rest]
            rows = np.empty((rest.size, self.spec.dim), dtype=np.float32)
            is_in_file = self._reader.fetch(rest_keys, rows)
            is_in_file &= ~overlay.hidden.holds(rest_keys)
            out[rest[is_in_file]] = rows[is_in_file]
            found[rest] = is_in_file
        return found

    def fetch_pooled(
        self, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, weights: Weights | None = None
    ) -> Mask:
        """See ``LocalTable.fetch_pooled``."""
        overlay = self._overlay
        if self._reader is None and overlay is not None:
            return overlay.rows.fetch_pooled(keys, row_ptrs, out, combiner, weights)
        if self._reader is None:
            return none_found(keys, out)
        found = self._reader.fetch_pooled(keys, row_ptrs, out, combiner, weights)
        if overlay is not None:
            changed = np.flatnonzero(overlay.changed.holds(keys))
            if changed.size:
                self._pool_again(changed, found, keys, row_ptrs, out, combiner, weights)
        return found

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``; an overwritten row also takes a row of the overlay."""
        if not keys.size:
            return
        unique = np.unique(keys)
        with self._lock:
            overlay = self._open_overlay()
            try:
                added = unique.size - int(self._holds(unique).sum())
                self._mark_changed(overlay, unique)
                overlay.rows.insert(keys, rows)
            except TableFullError as err:
                raise self._too_small("the overlay", err) from err
            except (ReservedKeyError, RowValueError) as err:
                raise StoreError("snapshot", self.spec.name, str(err)) from err
            self._rows += added

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``; raises StoreFullError if the overlay cannot hold the evicted keys of the file."""
        unique = np.unique(keys)
        with self._lock:
            is_present = self._holds(unique)
            if not is_present.any():
                return
            overlay = self._open_overlay()
            gone = unique[is_present]
            in_file = gone[self._fetch_file(gone, np.empty((gone.size, self.spec.dim), dtype=np.float32))]
            self._mark_changed(overlay, in_file)
            try:
                overlay.hidden.insert(in_file, _no_rows(in_file))
            except TableFullError as err:
                raise self._too_small("evicted keys of the file", err) from err
            overlay.rows.evict(gone)
            self._rows -= gone.size

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """Read the file's rows in its order, then the overlay's rows.

        Each key comes once: from the overlay if it was touched before the walk began, else from the file.
        """
        overlay = self._overlay
        touched = overlay.touched() if overlay is not None else KeyIndex()
        if self._reader is not None:
            for keys, rows in self._reader.items(batch_rows):
                stands = touched.find(keys) < 0
                if stands.any():
                    yield keys[stands], rows[stands]
        if overlay is not None:
            for keys, rows in overlay.rows.items(batch_rows):
                stands = (touched.find(keys) >= 0) | ~self._fetch_file(keys, np.empty_like(rows))
                if stands.any():
                    yield keys[stands], rows[stands]

    def _pool_again(
        self,
        changed: NDArray[np.int64],
        found: Mask,
        keys: Keys,
        row_ptrs: RowPtrs,
        out: Vectors,
        combiner: Combiner,
        weights: Weights | None,
    ) -> None:
        """Pool each bag with a key at one of the positions ``changed`` again; writes ``found`` and ``out``."""
        bags, bag_ptrs, positions = bags_with(row_ptrs, changed)
        rows = np.empty((positions.size, self.spec.dim), dtype=np.float32)
        found[positions] = self.fetch(keys[positions], rows)
        pooled = np.empty((bags.size, self.spec.dim), dtype=np.float32)
        pool_rows(rows, bag_ptrs, pooled, combiner, None if weights is None else weights[positions])
        out[bags] = pooled

    def _fetch_file(self, keys: Keys, out: Vectors) -> Mask:
        return none_found(keys, out) if self._reader is None else self._reader.fetch(keys, out)

    def _holds(self, keys: Keys) -> Mask:
        return self.fetch(keys, np.empty((keys.size, self.spec.dim), dtype=np.float32))

    def _mark_changed(self, overlay: _Overlay, keys: Keys) -> None:
        """Add ``keys`` to the set of changed keys; a set that is full is replaced by a larger one. The lock is held."""
        try:
            overlay.changed.insert(keys, _no_rows(keys))
        except TableFullError:
            touched = overlay.touched()
            touched.find_or_insert(keys)
            try:
                changed = HostTable(1, 2 * len(touched))
            except MemoryError as err:
                raise self._no_memory(err) from err
            changed.insert(touched.keys(), _no_rows(touched.keys()))
            # A reader that began with the old set answers as of its beginning.
            self._overlay = replace(overlay, changed=changed)

    def _too_small(self, what: str, err: TableFullError) -> StoreFullError:
        reason = f"{what}: {err}; raise volatile_db.overlay_capacity_rows"
        return StoreFullError("snapshot", self.spec.name, reason)

    def _no_memory(self, err: MemoryError) -> StoreError:
        reason = f"the overlay of {self.overlay_rows:,} rows: {err}; lower volatile_db.overlay_capacity_rows"
        return StoreError("snapshot", self.spec.name, reason)

    def _open_overlay(self) -> _Overlay:
        """Return the overlay, and make it first if there is none; the lock is held."""
        if self._overlay is None:
            if not self.overlay_rows:
                raise StoreFullError("snapshot", self.spec.name, "no row can be changed: overlay_capacity_rows is 0")
            try:
                rows = HostTable(self.spec.dim, self.overlay_rows, self.spec.row_dtype)
                hidden = HostTable(1, self.overlay_rows)
                self._overlay = _Overlay(rows, hidden, HostTable(1, _FIRST_CHANGED_KEYS))
            except MemoryError as err:
                raise self._no_memory(err) from err
        return self._overlay


def _no_rows(keys: Keys) -> Vectors:
    """Return rows for a table that is a set of keys."""
    return np.zeros((keys.size, 1), dtype=np.float32)
