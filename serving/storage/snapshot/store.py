"""The store of tables in snapshots: files that are mapped read-only, with changes in RAM."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from kernels.system_memory import available_memory_bytes
from serving.errors import StoreError
from serving.model.capacity import MOST_ROWS, rows_with_headroom
from serving.model.snapshot_model import SnapshotModel
from serving.model.sparse_model import SparseModel
from serving.storage.snapshot.folder import SnapshotFolder
from serving.storage.snapshot.reader import SnapshotReader
from serving.storage.snapshot.table import SnapshotTable
from serving.storage.store import Keys, NativeTable, TableSpec, Vectors
from serving.storage.tables import TableStore

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


class SnapshotStore(TableStore[SnapshotTable]):
    """Tables in snapshots, each with a writable overlay in RAM; see ``serving.storage.snapshot`` for what lies where.

    ``fetch``, ``fetch_pooled`` and ``items`` take no lock.
    """

    reads_model_files = True

    _NAME = "snapshot"

    def __init__(
        self, folder: Path | None = None, overlay_capacity_rows: int | None = None, warm_up: bool = False
    ) -> None:
        """Open nothing yet.

        Args:
            folder: where snapshots are made; None: every model file must be a snapshot.
            overlay_capacity_rows: most rows of each table that can be changed, at least 0; None: a sixteenth of the
                table's.
            warm_up: after ``serve_file``, read files of up to half the available memory in the background.

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
        self._lock = threading.Lock()  # one open_table, serve_file, drop_table or close at a time

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; without ``serve_file`` a table has an overlay over no rows."""
        with self._lock:
            held = self._held_table(spec.name)
            if held is None:
                overlay = self._overlay_capacity_rows
                self._put(SnapshotTable(spec, None, rows_with_headroom(capacity_rows) if overlay is None else overlay))
            elif (held.spec.dim, held.spec.row_dtype) != (spec.dim, spec.row_dtype):
                reason = (
                    f"holds {held.spec.row_dtype} rows of {held.spec.dim} floats,"
                    f" asked to hold {spec.row_dtype} of {spec.dim}"
                )
                raise StoreError(self.name, spec.name, reason)

    def serve_file(self, spec: TableSpec, model: SparseModel) -> None:
        """See ``Store.serve_file``."""
        reader = self._open_snapshot(spec, model)
        with self._lock:
            overlay = self._overlay_capacity_rows
            rows = reader.rows
            self._put(SnapshotTable(spec, reader, rows_with_headroom(rows) - rows if overlay is None else overlay))
        if self._warm_up:
            _warm_up_if_it_fits(reader)

    def native_tables(self, tables: Sequence[str]) -> Sequence[NativeTable | None]:
        """See ``Store.native_tables``; None for a table with changes."""
        held = self._open_tables("")
        return [None if (table := held.get(name)) is None else table.native for name in tables]

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``: rows of the file and of the overlay."""
        held = self._held_table(table)
        return held.capacity_rows if held is not None else 0

    def file_bytes(self, table: str) -> int:
        """Return the size of the table's file; 0 for an unknown table."""
        held = self._held_table(table)
        return self._size_bytes(held) if held is not None else 0

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``."""
        held = self._held_table(table)
        if held is None:
            raise StoreError(self.name, table, "not an open table")
        self._check_dim(table, held.dim, rows.shape[1])
        held.insert(keys, rows)

    def evict(self, table: str, keys: Keys) -> None:
        """See ``Store.evict``; raises StoreFullError if the overlay cannot hold the evicted keys."""
        held = self._held_table(table)
        if held is not None:
            held.evict(keys)

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; the folder keeps its snapshot for the next ``serve_file``."""
        with self._lock:
            self._tables = {name: held for name, held in self._open_tables(table).items() if name != table}

    def erase_table(self, table: str) -> None:
        """See ``Store.erase_table``."""
        self.drop_table(table)
        if self._folder is not None:
            self._folder.erase(table)

    def close(self) -> None:
        """See ``Store.close``."""
        with self._lock:
            self._tables = None

    def _size_bytes(self, held: SnapshotTable) -> int:
        return held.file_bytes

    def _open_snapshot(self, spec: TableSpec, model: SparseModel) -> SnapshotReader:
        if is_served_as_it_is(spec, model):
            return SnapshotReader(model.path, spec.name)
        if self._folder is None:
            raise _no_folder(spec, model)
        return self._folder.open(spec, model)

    def _put(self, table: SnapshotTable) -> None:
        self._tables = {**self._open_tables(table.spec.name), table.spec.name: table}
