"""A snapshot as a sparse model, and how to make a snapshot of any sparse model.

``kernels/host/snapshot/snapshot_format.hpp`` and ``docs/storage.md`` describe the format. Rows are float32 as the
snapshot's row type returns them.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from kernels.errors import ReservedKeyError, RowValueError, SnapshotError, TableFullError
from kernels.host import RowDtype
from kernels.snapshot import SNAPSHOT_MAGIC, Snapshot, write_snapshot
from serving.errors import ModelFileError
from serving.model.atomic import atomic_write
from serving.model.regular_file import open_regular
from serving.model.sparse_model import SparseModel
from serving.model.sparse_rows import Keys, KeyType, Vectors, check_range

_BATCH_ROWS = 65536


def is_snapshot(path: str | Path) -> bool:
    """Return whether there is a file that begins like a snapshot."""
    try:
        with open_regular(path) as file:
            return file.read(len(SNAPSHOT_MAGIC)) == SNAPSHOT_MAGIC
    except OSError:
        return False


class SnapshotModel(SparseModel):
    """The rows of a snapshot. See ``SparseModel``. A rename may replace the file while it is open."""

    def __init__(self, path: Path, dim: int, key_type: KeyType) -> None:
        """Open ``path``. Raise ModelFileError if it cannot be opened or its rows do not have ``dim`` floats."""
        try:
            self.snapshot = Snapshot(path)
        except SnapshotError as err:
            raise ModelFileError(path, err.reason) from err
        if self.snapshot.dim != dim:
            raise ModelFileError(path, f"expected vectors of {dim} floats, but the snapshot has {self.snapshot.dim}")
        self.path = path
        self.dim = dim
        self.rows = len(self.snapshot)
        self.slot_ids = None
        self._key_type = key_type

    def batches(self, batch_rows: int, *, warns: bool = True) -> Iterator[tuple[Keys, Vectors]]:
        """See ``SparseModel.batches``. A snapshot has no repeated keys, so nothing is sorted.

        Checksums are verified while reading, because rows that are loaded elsewhere have no other checksum. Damage
        therefore raises ModelFileError during the iteration too.
        """
        if batch_rows < 1:
            raise ValueError(f"expected at least 1 row per batch, got {batch_rows}")
        if self._key_type == "I32":
            for number, keys in enumerate(self.key_batches(_BATCH_ROWS)):
                check_range(self.path, keys, self._key_type, number * _BATCH_ROWS)
        return self._read(batch_rows, warns)

    def digest(self) -> str:
        """See ``SparseModel.digest``. The header has a checksum of all rows, so nothing else is read."""
        identity = ["snapshot", self._key_type, self.dim, self.snapshot.identity.hex()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def stamp(self) -> str:
        """See ``SparseModel.stamp``."""
        return self.digest()

    def check(self, *, full: bool) -> None:
        """Read the index, or every byte with ``full``. Raise ModelFileError if the file is damaged."""
        try:
            if full:
                self.snapshot.check_content()
            else:
                self.snapshot.check_index()
        except SnapshotError as err:
            raise ModelFileError(self.path, err.reason) from err

    def _part_of_keys(self, begin: int, end: int) -> Keys:
        try:
            return self.snapshot.read_keys(begin, end - begin)
        except SnapshotError as err:
            raise ModelFileError(self.path, err.reason) from err

    def _part(self, begin: int, end: int) -> tuple[Keys, Vectors]:
        try:
            return self.snapshot.read_items(begin, end - begin)
        except SnapshotError as err:
            raise ModelFileError(self.path, err.reason) from err


def write_snapshot_file(path: str | Path, model: SparseModel, row_dtype: RowDtype, source: str) -> int:
    """Make a snapshot of ``model``, and return the number of rows. An existing file is replaced by a rename.

    Takes 34 bytes of memory per row and a few megabytes. ``source`` is a SHA-256 of the origin, kept in the header.

    Raises:
        ModelFileError: the model is damaged, a value does not fit the row type, or the disk refuses.
    """
    path = Path(path)
    batches = model.batches(_BATCH_ROWS)
    try:
        with atomic_write(path) as file:
            return write_snapshot(file.fileno(), model.dim, model.rows, row_dtype, batches, bytes.fromhex(source))
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err
    except MemoryError as err:
        raise ModelFileError(path, f"the system refused the memory for an index of {model.rows:,} rows") from err
    except (ReservedKeyError, RowValueError, TableFullError) as err:
        raise ModelFileError(model.path, str(err)) from err
