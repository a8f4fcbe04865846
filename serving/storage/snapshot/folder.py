"""The folder in which a parameter server makes snapshots; see ``serving.storage.snapshot``."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serving.errors import StoreError
from serving.model.snapshot_model import write_snapshot_file
from serving.model.sparse_model import SparseModel
from serving.storage.snapshot.reader import SnapshotReader
from serving.storage.store import TableSpec

logger = logging.getLogger(__name__)


class SnapshotFolder:
    """Snapshots by table and source. Every method may be called from any thread and any process."""

    def __init__(self, path: Path) -> None:
        """Take the folder's path; the folder is created with its first snapshot."""
        self._path = path

    def open(self, spec: TableSpec, model: SparseModel) -> SnapshotReader:
        """Open the snapshot of ``model`` with rows of ``spec.row_dtype``, and make it first if there is none.

        Waits while another process makes it.

        Raises:
            StoreError: the folder cannot be written.
            ModelFileError: the model is damaged, a value does not fit the row type, or the disk refuses.
        """
        file, source = self._place(spec, model)
        found = _open_if_right(file, spec, source)
        if found is not None:
            return found
        with self._locked(spec.name):
            found = _open_if_right(file, spec, source)  # another process may have made the snapshot
            if found is None:
                _remove(file.parent.glob(".*.tmp"))  # left by writers that were killed; no other process writes now
                logger.info("writing %s, %s rows", file, f"{model.rows:,}")
                write_snapshot_file(file, model, spec.row_dtype, source)
                found = SnapshotReader(file, spec.name)
            _remove(other for other in file.parent.glob("*.snapshot") if other != file)
        return found

    def check_made(self, spec: TableSpec, model: SparseModel, *, full: bool) -> None:
        """Read the index of the snapshot that ``open`` would open, if there is one; with ``full``, read every byte.

        Raises:
            StoreError: the snapshot is damaged.
            ModelFileError: a file of the model cannot be read.
        """
        file, source = self._place(spec, model)
        found = _open_if_right(file, spec, source)
        if found is None:
            return
        with found:
            try:
                found.check(full=full)
            except StoreError as err:
                raise StoreError(
                    "snapshot", spec.name, f"{err.reason}; remove the file, and Hotrow makes it again"
                ) from err

    def erase(self, table: str) -> None:
        """Remove the snapshots of a table; processes that have a snapshot open keep it."""
        if (self._path / table).is_dir():
            with self._locked(table):
                _remove((self._path / table).glob("*.snapshot"))

    def check(self) -> None:
        """Raise StoreError if the folder cannot be created; a folder created for this check is removed again."""
        missing = [folder for folder in (self._path, *self._path.parents) if not os.path.lexists(folder)]
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise StoreError("snapshot", "", f"{self._path}: cannot be created: {err.strerror}") from err
        finally:
            for folder in missing:
                with suppress(OSError):  # was not created, or another process uses it already
                    folder.rmdir()

    def _place(self, spec: TableSpec, model: SparseModel) -> tuple[Path, str]:
        """Return the file of the snapshot of ``model``, and the source that the file must name."""
        source = hashlib.sha256(f"{model.stamp()} {spec.row_dtype}".encode()).hexdigest()
        return self._path / spec.name / f"{source[:16]}.snapshot", source

    @contextmanager
    def _locked(self, table: str) -> Iterator[None]:
        """Keep other processes from writing a table's snapshots; the system releases the lock if the process ends."""
        folder = self._path / table
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as err:
            raise StoreError("snapshot", table, f"{folder}: cannot be written: {err.strerror}") from err


def _open_if_right(file: Path, spec: TableSpec, source: str) -> SnapshotReader | None:
    """Open ``file`` if it is the snapshot that its name says; return None if it must be made."""
    if not os.path.exists(file):  # ``Path.exists`` raises if the file may not be read
        return None
    try:
        reader = SnapshotReader(file, spec.name)
    except StoreError as err:
        logger.warning("%s; the snapshot is made again", err)
        return None
    return reader if (reader.source, reader.dim) == (source, spec.dim) else None


def _remove(files: Iterator[Path]) -> None:
    for file in list(files):
        file.unlink(missing_ok=True)
