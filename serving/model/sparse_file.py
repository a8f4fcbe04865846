"""HugeCTR's sparse model: the keys and vectors of one embedding table. Everything is little-endian.

Directory (HugeCTR v3.1 to v24.06), one file per column. Row i of each file belongs together:

    key         int64[V]        int64 even if the model's keys are uint32
    emb_vector  float32[V, D]
    slot_id     uint64[V]       localized embeddings only; not needed for a lookup
    meta        int64[V]        optional; not needed for a lookup

Single file (HugeCTR v3.0), one packed row after the other:

    key         int64 or uint32, the model's key type
    slot_id     uint64, localized embeddings only
    vector      float32[D]

Neither format has a header or a checksum, and the order of rows has no meaning. HugeCTR writes each key once. A
directory with a repeated key is refused, because nothing says which row is right. In a single file the first row of a
repeated key counts, as in HugeCTR's own loader.
"""

import stat
from pathlib import Path
from typing import get_args

from serving.errors import ModelFileError
from serving.model.mapped_file import map_file
from serving.model.regular_file import is_absent
from serving.model.snapshot_model import SnapshotModel, is_snapshot
from serving.model.sparse_model import SparseModel
from serving.model.sparse_rows import KeyType, RowLayout, row_dtype
from serving.model.sparse_writer import write_sparse_directory

__all__ = ["COLUMNS", "KeyType", "RowLayout", "SparseModel", "open_sparse", "write_sparse_directory"]


#: The files of a table's directory.
COLUMNS = ("key", "emb_vector", "slot_id", "meta")


def open_sparse(
    path: str | Path, dim: int, key_type: KeyType = "I64", row_layout: RowLayout = "distributed"
) -> "SparseModel":
    """Open a sparse model or a snapshot and check its sizes, without reading rows.

    Raises:
        ModelFileError: a file is missing, unreadable or empty, or its size does not fit. The message says what would
            fit.
    """
    try:
        return _open(Path(path), dim, key_type, row_layout)
    except OSError as err:  # usually no permission
        raise ModelFileError(err.filename or path, f"cannot be read: {err.strerror}") from err


def _open(path: Path, dim: int, key_type: KeyType, row_layout: RowLayout) -> SparseModel:
    if path.is_dir():
        return _open_directory(path, dim, key_type)
    if is_snapshot(path):
        return SnapshotModel(path, dim, key_type)
    return _open_file(path, dim, key_type, row_layout)


def _open_directory(path: Path, dim: int, key_type: KeyType) -> SparseModel:
    key_bytes = _size_bytes(path / "key")
    if not key_bytes or key_bytes % 8:
        raise ModelFileError(path / "key", f"expected a multiple of 8 bytes, at least 8, found {key_bytes:,}")
    rows = key_bytes // 8
    for name, row_bytes in (("emb_vector", 4 * dim), ("slot_id", 8), ("meta", 8)):
        if name != "emb_vector" and is_absent(path / name):
            continue
        found = _size_bytes(path / name)
        if found != rows * row_bytes:
            floats, rest = divmod(found, 4 * rows)
            hint = f", as if of {floats} floats each" if name == "emb_vector" and floats and not rest else ""
            raise ModelFileError(
                path / name,
                f"expected {rows * row_bytes:,} bytes for {rows:,} keys of {row_bytes} bytes, found {found:,}{hint}",
            )
    keys = map_file(path / "key", "<i8", (rows,))
    vectors = map_file(path / "emb_vector", "<f4", (rows, dim))
    has_slots = not is_absent(path / "slot_id")
    slot_ids = map_file(path / "slot_id", "<u8", (rows,)) if has_slots else None
    return SparseModel(path, "directory", key_type, keys, vectors, (path / "key", path / "emb_vector"), slot_ids)


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
    rows = map_file(path, row, (found // row.itemsize,))
    slot_ids = rows["slot_id"] if row_layout == "localized" else None
    return SparseModel(path, row_layout, key_type, rows["key"], rows["vector"], (path,), slot_ids)


def _describe(dim: int, key_type: KeyType, row_layout: RowLayout) -> str:
    return f"{key_type} keys, {row_layout} rows, {dim} floats"


def _other_layouts(size_bytes: int, dim: int) -> str:
    """Return the row layouts that fit a file of this size, those with the same dim first."""
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
