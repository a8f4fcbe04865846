"""HugeCTR's sparse model: the keys and vectors of one embedding table. Everything is little-endian.

Directory (HugeCTR v3.1 to v24.06), one file per column, row i of each belongs together:

    key         int64[V]        int64 even where the model's keys are uint32
    emb_vector  float32[V, D]
    slot_id     uint64[V]       localized embeddings only; not needed for a lookup
    meta        int64[V]        optional; not needed for a lookup

Single file (HugeCTR v3.0), one packed row after the other:

    key         int64 or uint32, the model's key type
    slot_id     uint64, localized embeddings only
    vector      float32[D]

Neither has a header or a checksum, and the order of rows means nothing. HugeCTR writes a key once. Where a key comes
twice all the same, a directory is refused, for nothing says which row is right; of a single file the first row
counts, as it does in HugeCTR's own loader.
"""

import hashlib
import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np

from serving.errors import ModelFileError
from serving.model.manifest import read_manifest, sha256_of
from serving.model.sparse_rows import (
    Keys,
    KeyType,
    RowLayout,
    StoredKeys,
    Vectors,
    refuse_repeated_keys,
    repeated_keys,
    row_dtype,
)
from serving.model.sparse_writer import write_sparse_directory, write_sparse_file

__all__ = ["KeyType", "RowLayout", "SparseModel", "open_sparse", "write_sparse_directory", "write_sparse_file"]


def open_sparse(
    path: str | Path, dim: int, key_type: KeyType = "I64", row_layout: RowLayout = "distributed"
) -> "SparseModel":
    """Open a sparse model of either format and check its sizes; no row is read yet.

    Args:
        path: the directory, or the single file.
        dim: D.
        key_type: ``"I32"`` for uint32 keys.
        row_layout: of a single file's rows.

    Raises:
        ModelFileError: a file is missing or empty, or its size does not fit; the message says which would.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path, dim, key_type)
    return _open_file(path, dim, key_type, row_layout)


_log = logging.getLogger(__name__)


class SparseModel:
    """The rows of one table, read from the disk as they are asked for.

    May be used from any thread. The files must not change while it is open.

    Attributes:
        path: the directory or single file.
        dim: D.
        rows: V; rows of a single file that repeat a key are counted too.
    """

    def __init__(
        self,
        path: Path,
        form: str,
        key_type: KeyType,
        keys: StoredKeys,
        vectors: Vectors,
        content: tuple[Path, ...],
    ) -> None:
        """Take views of the stored keys and vectors, and the files that hold them; ``form`` names the format."""
        self.path = path
        self.dim = vectors.shape[1]
        self.rows = keys.size
        self._form = form
        self._key_type: KeyType = key_type
        self._keys = keys
        self._vectors = vectors
        self._content = content

    def batches(self, batch_rows: int, *, warns: bool = True) -> Iterator[tuple[Keys, Vectors]]:
        """Return the rows in file order, at most ``batch_rows`` at a time.

        All keys are checked before the first batch comes, which takes 8 bytes of memory per row. Vectors stay on the
        disk until their batch.

        Args:
            batch_rows: at least 1.
            warns: log a warning of each batch with a value that is NaN or infinite.

        Returns:
            pairs of int64[n] and float32[n, D], C-contiguous and in memory of their own.

        Raises:
            ModelFileError: a key is reserved, no uint32 though the model's keys are, or repeated in a directory.
            ValueError: ``batch_rows`` is less than 1.
        """
        if batch_rows < 1:
            raise ValueError(f"expected at least 1 row per batch, got {batch_rows}")
        if self.path.is_dir():
            refuse_repeated_keys(self.path / "key", self._keys, self._key_type)
            return self._read(batch_rows, warns)
        repeated = repeated_keys(self.path, self._keys, self._key_type)
        rows = self._read(batch_rows, warns)
        return _first_of_each(rows, repeated) if repeated.size else rows

    def key_batches(self, batch_rows: int) -> Iterator[Keys]:
        """The keys alone, in file order, unchecked: int64[n], at most ``batch_rows`` at a time, at least 1."""
        for begin in range(0, self.rows, batch_rows):
            yield np.array(self._keys[begin : begin + batch_rows], dtype=np.int64)

    def _read(self, batch_rows: int, warns: bool) -> Iterator[tuple[Keys, Vectors]]:
        for begin in range(0, self.rows, batch_rows):
            part = slice(begin, begin + batch_rows)
            keys, vectors = np.array(self._keys[part], dtype=np.int64), np.array(self._vectors[part], dtype=np.float32)
            if warns and not np.isfinite(vectors).all():
                row = int(np.argmax(~np.isfinite(vectors).all(axis=1)))
                _log.warning("%s: the row of key %d has values that are NaN or infinite", self.path, keys[row])
            yield keys, vectors

    def digest(self) -> str:
        """Return a SHA-256 that names the content: equal for equal rows in equal order of the same format.

        Read from the manifest beside the model where there is one, which takes no time; else every byte is hashed.

        Raises:
            ModelFileError: a file cannot be read.
        """
        identity = [self._form, self._key_type, self.dim, *(self._hash(path) for path in self._content)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _hash(self, path: Path) -> str:
        folder = self.path.parent
        try:
            record = read_manifest(folder).files[path.relative_to(folder).as_posix()]
        except (ModelFileError, KeyError):  # a model without a manifest is as good
            return sha256_of(path)
        return record.sha256 if record.size_bytes == path.stat().st_size else sha256_of(path)


def _first_of_each(batches: Iterator[tuple[Keys, Vectors]], repeated: Keys) -> Iterator[tuple[Keys, Vectors]]:
    """Leave out every row whose key came before; only ``repeated`` keys can."""
    seen: set[int] = set()
    for keys, vectors in batches:
        keep = np.ones(keys.size, dtype=bool)
        for row in np.flatnonzero(np.isin(keys, repeated)):
            keep[row] = int(keys[row]) not in seen
            seen.add(int(keys[row]))
        if keep.any():
            yield keys[keep], vectors[keep]


def _open_directory(path: Path, dim: int, key_type: KeyType) -> SparseModel:
    key_bytes = _size_bytes(path / "key")
    if not key_bytes or key_bytes % 8:
        raise ModelFileError(path / "key", f"expected a multiple of 8 bytes, at least 8, found {key_bytes:,}")
    rows = key_bytes // 8
    for name, row_bytes in (("emb_vector", 4 * dim), ("slot_id", 8), ("meta", 8)):
        if name != "emb_vector" and not (path / name).exists():
            continue
        found = _size_bytes(path / name)
        if found != rows * row_bytes:
            floats, rest = divmod(found, 4 * rows)
            hint = f", as if of {floats} floats each" if name == "emb_vector" and floats and not rest else ""
            raise ModelFileError(
                path / name,
                f"expected {rows * row_bytes:,} bytes for {rows:,} keys of {row_bytes} bytes, found {found:,}{hint}",
            )
    keys = np.memmap(path / "key", dtype="<i8", mode="r", shape=(rows,))
    vectors = np.memmap(path / "emb_vector", dtype="<f4", mode="r", shape=(rows, dim))
    return SparseModel(path, "directory", key_type, keys, vectors, (path / "key", path / "emb_vector"))


def _open_file(path: Path, dim: int, key_type: KeyType, row_layout: RowLayout) -> SparseModel:
    row = row_dtype(dim, key_type, row_layout)
    found = _size_bytes(path)
    if not found:
        raise ModelFileError(path, "the file is empty")
    if found % row.itemsize:
        raise ModelFileError(
            path,
            f"expected a multiple of {row.itemsize} bytes ({_describe(dim, key_type, row_layout)}), "
            f"found {found:,} bytes, {_other_layouts(found, dim)}",
        )
    rows = np.memmap(path, dtype=row, mode="r", shape=(found // row.itemsize,))
    return SparseModel(path, row_layout, key_type, rows["key"], rows["vector"], (path,))


def _describe(dim: int, key_type: KeyType, row_layout: RowLayout) -> str:
    return f"{key_type} keys, {row_layout} rows, {dim} floats"


def _other_layouts(size_bytes: int, dim: int) -> str:
    """Say which rows a file of this size could hold instead: those of the same dim first, then of likely others."""
    fits = [
        _describe(other, key_type, row_layout)
        for other in (dim, dim - 1, dim + 1, dim // 2, dim * 2)
        for key_type in get_args(KeyType)
        for row_layout in get_args(RowLayout)
        if other > 0 and size_bytes % row_dtype(other, key_type, row_layout).itemsize == 0
    ]
    if fits:
        return f"which would fit {'; or '.join(fits)}"
    return "which fits no other layout of a similar size either: the file is probably truncated"


def _size_bytes(path: Path) -> int:
    try:
        found = path.stat()
    except FileNotFoundError as err:
        raise ModelFileError(path, "no such file") from err
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
    if not stat.S_ISREG(found.st_mode):
        raise ModelFileError(path, "not a regular file")
    return found.st_size
