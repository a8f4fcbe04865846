"""Write sparse models; the two formats are described in ``serving.model.sparse_file``."""

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
    """Write a table in the directory format; an existing directory is replaced as a whole.

    Args:
        path: the directory.
        keys: int64[V], each once.
        vectors: float32[V, D].
        slot_ids: uint64[V], for a localized embedding.
        meta: int64[V].

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
    """Write a table in the directory format as its rows come, for tables that memory may not hold.

    The caller has checked that every key may be one and comes once, and syncs the files.

    Args:
        path: the directory; made where it does not exist.
        batches: pairs of int64[n] and float32[n, D].

    Raises:
        OSError: the disk refuses.
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
    """Write a table in the single-file format; an existing file is replaced at once.

    Args:
        path: the file.
        keys: int64[V], each once; with ``"I32"`` all must be uint32 values.
        vectors: float32[V, D].
        key_type: how keys are stored.
        slot_ids: uint64[V] makes the rows of a localized embedding; None those of a distributed one.

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
