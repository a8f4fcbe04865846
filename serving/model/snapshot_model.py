"""A snapshot as a sparse model: what other tools read of it, and how one is made of any sparse model.

The format is described in ``kernels/host/snapshot_format.hpp`` and ``docs/storage.md``. Rows are float32 as the
snapshot's row type gives them back; a model that keeps int8 rows is a model of those values.
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
from serving.model.sparse_model import SparseModel
from serving.model.sparse_rows import Keys, KeyType, Vectors, check_range

_BATCH_ROWS = 65536


def is_snapshot(path: str | Path) -> bool:
    """Whether there is a file that begins as snapshots do."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(SNAPSHOT_MAGIC)) == SNAPSHOT_MAGIC
    except OSError:
        return False


class SnapshotModel(SparseModel):
    """The rows of a snapshot; see ``SparseModel``. The file may be replaced by a rename while it is open.

    Attributes:
        snapshot: the file, mapped.
    """

    def __init__(self, path: Path, dim: int, key_type: KeyType) -> None:
        """Open ``path``.

        Args:
            path: the file.
            dim: D, which it must have.
            key_type: ``"I32"`` for uint32 keys, which ``batches`` then expects.

        Raises:
            ModelFileError: it cannot be opened, or has rows of another length.
        """
        try:
            self.snapshot = Snapshot(path)
        except SnapshotError as err:
            raise ModelFileError(path, err.reason) from err
        if self.snapshot.dim != dim:
            raise ModelFileError(path, f"expected vectors of {dim} floats, the snapshot has {self.snapshot.dim}")
        self.path = path
        self.dim = dim
        self.rows = len(self.snapshot)
        self._key_type = key_type

    def batches(self, batch_rows: int, *, warns: bool = True) -> Iterator[tuple[Keys, Vectors]]:
        """See ``SparseModel.batches``; no key comes twice in a snapshot, so nothing is sorted.

        The checksums of what is read are verified: what is loaded elsewhere would have no other to be found out by.

        Raises:
            ModelFileError: a key is no uint32 though the model's keys are; in the walk, too: the file is damaged or
                cannot be read.
            ValueError: ``batch_rows`` is less than 1.
        """
        if batch_rows < 1:
            raise ValueError(f"expected at least 1 row per batch, got {batch_rows}")
        if self._key_type == "I32":
            for number, keys in enumerate(self.key_batches(_BATCH_ROWS)):
                check_range(self.path, keys, self._key_type, number * _BATCH_ROWS)
        return self._read(batch_rows, warns)

    def digest(self) -> str:
        """See ``SparseModel.digest``; takes no time, for the header has the checksums of everything."""
        identity = ["snapshot", self._key_type, self.dim, self.snapshot.header.hex()]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def stamp(self) -> str:
        """See ``SparseModel.stamp``."""
        return self.digest()

    def check(self, *, full: bool) -> None:
        """Read the index, or with ``full`` every byte.

        Raises:
            ModelFileError: the file is damaged.
        """
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
    """Make a snapshot of ``model``; an existing file is replaced at once by a rename, and stays open where it was.

    Takes 34 bytes of memory per row and a few megabytes.

    Args:
        path: the file.
        model: where the rows come from.
        row_dtype: the form in which they are kept.
        source: a SHA-256, 64 hexadecimal digits, that names what they come from; kept in the header.

    Returns:
        V, the rows written.

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
