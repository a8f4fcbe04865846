"""The store of tables in snapshots: files that are mapped read-only, with changes in RAM."""

import logging
import threading
from pathlib import Path

from kernels.system_memory import available_memory_bytes
from serving.errors import StoreError
from serving.model.capacity import HEADROOM_RATIO, MOST_ROWS, rows_with_headroom
from serving.model.snapshot_model import SnapshotModel
from serving.model.sparse_model import SparseModel
from serving.storage.snapshot.folder import SnapshotFolder
from serving.storage.snapshot.overlay import OverlaidSnapshot
from serving.storage.snapshot.reader import SnapshotReader
from serving.storage.store import Keys, NativeTable, Store, TableSpec, Vectors
from serving.storage.tables import LocalTable

logger = logging.getLogger(__name__)


def is_served_as_it_is(spec: TableSpec, model: SparseModel) -> bool:
    """Whether the model's own file is served; any other model gets a snapshot.

    A given snapshot is served as it is, whatever its row type. If ``spec`` asks for a narrow row type, its rows are
    rounded as those of any other file.
    """
    return isinstance(model, SnapshotModel) and spec.row_dtype == "fp32"


def require_snapshot(spec: TableSpec, model: SparseModel) -> None:
    """Raise StoreError if a store without a folder cannot serve ``model``."""
    if not is_served_as_it_is(spec, model):
        raise _no_folder(spec, model)


def _no_folder(spec: TableSpec, model: SparseModel) -> StoreError:
    what = "its rows are to be " + spec.row_dtype if isinstance(model, SnapshotModel) else "it is not a snapshot"
    reason = f"{model.path}: {what}, and there is no folder to make a snapshot in: set volatile_db.path"
    return StoreError("snapshot", spec.name, reason)


def _warm_up_if_it_fits(reader: SnapshotReader) -> None:
    available = available_memory_bytes()
    if reader.file_bytes <= available // 2:
        reader.warm_up_beside()
    else:
        logger.info(
            "a snapshot of %s bytes is not read ahead: %s bytes of memory are available", reader.file_bytes, available
        )


class SnapshotStore(Store):
    """Tables in snapshots, each with a writable overlay in RAM; see ``serving.storage.snapshot`` for what lies where.

    Reads take no lock.
    """

    name = "snapshot"
    keeps_row_dtype = True

    def __init__(
        self,
        folder: Path | None = None,
        overlay_capacity_rows: int | None = None,
        warm_up: bool = False,
        headroom_ratio: float = HEADROOM_RATIO,
    ) -> None:
        """Open nothing yet.

        Args:
            folder: where snapshots are made; None: every model file must be a snapshot.
            overlay_capacity_rows: maximum changed rows of each table, at least 0; None: ``headroom_ratio`` says it.
            warm_up: after ``serve_file``, read files of up to half the available memory in the background.
            headroom_ratio: maximum changed rows of a table as a share of its rows.

        Raises:
            ValueError: the capacity is less than 0, or more than a host table can hold.
            StoreError: the folder does not exist and cannot be created.
        """
        super().__init__()
        if overlay_capacity_rows is not None and not 0 <= overlay_capacity_rows <= MOST_ROWS:
            raise ValueError(f"overlay_capacity_rows: expected 0 to {MOST_ROWS}, got {overlay_capacity_rows}")
        self._folder = SnapshotFolder(folder) if folder is not None else None
        if self._folder is not None:
            self._folder.check()
        self._overlay_capacity_rows = overlay_capacity_rows
        self._warm_up = warm_up
        self._headroom_ratio = headroom_ratio
        self._lock = threading.Lock()  # one change of the tables at a time

    def _new_table(self, spec: TableSpec) -> "SnapshotTable":
        return SnapshotTable(self, spec)

    def erase(self, table: str) -> None:
        """See ``Store.erase``."""
        self._check_open(table)
        open_table = self._tables.get(table)
        if open_table is not None:
            open_table.close()
        if self._folder is not None:
            self._folder.erase(table)

    def _open_snapshot(self, spec: TableSpec, model: SparseModel) -> SnapshotReader:
        if is_served_as_it_is(spec, model):
            return SnapshotReader(model.path, spec.name)
        if self._folder is None:
            raise _no_folder(spec, model)
        return self._folder.open(spec, model)


class SnapshotTable(LocalTable[OverlaidSnapshot]):
    """A table of a ``SnapshotStore``."""

    store: SnapshotStore

    @property
    def native(self) -> NativeTable | None:
        """See ``StoreTable.native``; None for a table with changes."""
        snapshot = self._rows
        return None if snapshot is None else snapshot.native

    @property
    def capacity_rows(self) -> int | None:
        """See ``StoreTable.capacity_rows``: rows of the file and of the overlay."""
        return self._open_rows().capacity_rows

    @property
    def used_ratio(self) -> float | None:
        """See ``StoreTable.used_ratio``: of the overlay."""
        return self._open_rows().used_ratio

    @property
    def size_bytes(self) -> int:
        """The size of the mapped file."""
        snapshot = self._rows
        return 0 if snapshot is None else snapshot.file_bytes

    def open(self, rows: int) -> None:
        """See ``StoreTable.open``; without ``serve_file`` a table has an overlay over no rows."""
        if self._rows is None:
            self._hold(None, rows_with_headroom(rows, self.store._headroom_ratio))

    def serve_file(self, model: SparseModel) -> None:
        """Open the table with all rows of ``model`` in place of what it held.

        Raises:
            StoreError: the store cannot hold them.
            ModelFileError: the model is damaged, or a value does not fit ``spec.row_dtype``.
        """
        self.store.check_name(self)
        reader = self.store._open_snapshot(self.spec, model)
        self._hold(reader, rows_with_headroom(reader.rows, self.store._headroom_ratio) - reader.rows)
        if self.store._warm_up:
            _warm_up_if_it_fits(reader)

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``."""
        snapshot = self._open_rows()
        self._check_dim(rows.shape[1])
        snapshot.insert(keys, rows)

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``; raises StoreFullError if the overlay cannot hold the evicted keys."""
        self._open_rows().evict(keys)

    def close(self) -> None:
        """See ``StoreTable.close``; the folder keeps the snapshot for the next ``serve_file``."""
        with self.store._lock:
            self.store.remove(self)
            self._rows = None

    def _hold(self, reader: SnapshotReader | None, overlay_rows: int) -> None:
        given = self.store._overlay_capacity_rows
        with self.store._lock:
            self.store.add(self)
            self._rows = OverlaidSnapshot(self.spec, reader, overlay_rows if given is None else given)
