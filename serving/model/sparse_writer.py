"""Write sparse models. ``serving.model.sparse_file`` describes the two formats."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.atomic import atomic_directory, atomic_write
from serving.model.sparse_rows import Keys, KeyType, Vectors, check_rows, row_dtype

_CHUNK_ROWS = 65_536


def write_sparse_directory(
    path: str | Path,
    keys: Keys,
    vectors: Vectors,
    slot_ids: NDArray[np.uint64] | None = None,
    meta: NDArray[np.int64] | None = None,
) -> None:
    """Write a table in the directory format, and replace an existing directory as a whole.

    Raises:
        ModelFileError: the arrays do not fit each other, a key is reserved or repeated, or the disk refuses.
    """
    path = Path(path)
    check_rows(path, keys, vectors, "I64")
    columns: list[tuple[str, NDArray[Any], str]] = [("key", keys, "<i8"), ("emb_vector", vectors, "<f4")]
    if slot_ids is not None:
        columns.append(_checked_column(path, "slot_id", slot_ids, "<u8", keys.size))
    if meta is not None:
        columns.append(_checked_column(path, "meta", meta, "<i8", keys.size))
    try:
        with atomic_directory(path) as folder:
            for name, column, dtype in columns:
                with (folder / name).open("wb") as file:
                    for begin in range(0, keys.size, _CHUNK_ROWS):
                        file.write(np.ascontiguousarray(column[begin : begin + _CHUNK_ROWS], dtype=dtype).data)
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err


def write_sparse_batches(path: str | Path, batches: Iterable[tuple[Keys, Vectors]]) -> None:
    """Write a table in the directory format batch by batch, for tables larger than memory.

    The caller has checked the keys and syncs the files.
    """
    path = Path(path)
    path.mkdir(exist_ok=True)
    with (path / "key").open("wb") as key_file, (path / "emb_vector").open("wb") as vector_file:
        for keys, vectors in batches:
            key_file.write(np.ascontiguousarray(keys, dtype="<i8").data)
            vector_file.write(np.ascontiguousarray(vectors, dtype="<f4").data)


def write_sparse_file(
    path: str | Path,
    keys: Keys,
    vectors: Vectors,
    key_type: KeyType,
    slot_ids: NDArray[np.uint64] | None = None,
) -> None:
    """Write a table in the single-file format, and replace an existing file at once.

    With ``slot_ids``, uint64[V], the rows are those of a localized embedding.

    Raises:
        ModelFileError: the arrays do not fit each other, a key is not allowed, or the disk refuses.
    """
    path = Path(path)
    check_rows(path, keys, vectors, key_type)
    if slot_ids is not None:
        _checked_column(path, "slot_id", slot_ids, "<u8", keys.size)
    row = row_dtype(vectors.shape[1], key_type, "distributed" if slot_ids is None else "localized")
    try:
        with atomic_write(path) as file:
            for begin in range(0, keys.size, _CHUNK_ROWS):
                part = slice(begin, begin + _CHUNK_ROWS)
                rows = np.empty(keys[part].size, dtype=row)
                rows["key"], rows["vector"] = keys[part], vectors[part]
                if slot_ids is not None:
                    rows["slot_id"] = slot_ids[part]
                file.write(rows.data)
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err


def _checked_column(
    path: Path, name: str, column: NDArray[Any], dtype: str, rows: int
) -> tuple[str, NDArray[Any], str]:
    if column.shape != (rows,) or column.dtype != np.dtype(dtype):
        raise ModelFileError(
            path, f"{name}: expected {np.dtype(dtype)}[{rows}], got {column.dtype} {list(column.shape)}"
        )
    return name, column, dtype
