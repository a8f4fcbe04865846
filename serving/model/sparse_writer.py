"""Write sparse models in the directory format, which ``serving.model.sparse_file`` describes."""

import errno
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError, OutputError
from serving.model.atomic import atomic_directory
from serving.model.names import TABLE_NAME
from serving.model.pooling import POOLING_FILE, Pooling
from serving.model.sparse_rows import Keys, Vectors, check_rows

#: The files that the folder of a table may have.
TABLE_FILES = ("key", "emb_vector", "slot_id", "meta", POOLING_FILE)
_CHUNK_ROWS = 65_536


def write_sparse_directory(
    path: str | Path,
    keys: Keys,
    vectors: Vectors,
    slot_ids: NDArray[np.uint64] | None = None,
    pooling: Pooling | None = None,
) -> None:
    """Write a table in the directory format, and replace an existing table as a whole.

    ``pooling`` says how training read the table.

    Raises:
        ModelFileError: the arrays do not fit each other, a key is reserved or repeated, ``path`` has other files, or
            the disk refuses.
    """
    path = Path(path)
    check_rows(path, keys, vectors)
    columns: list[tuple[str, NDArray[Any], str]] = [("key", keys, "<i8"), ("emb_vector", vectors, "<f4")]
    if slot_ids is not None:
        if slot_ids.shape != keys.shape or slot_ids.dtype != np.uint64:
            raise ModelFileError(
                path, f"slot_id: expected uint64[{keys.size}], got {slot_ids.dtype} {list(slot_ids.shape)}"
            )
        columns.append(("slot_id", slot_ids, "<u8"))
    try:
        if path.is_dir():
            _require_table(path)
        with atomic_directory(path) as folder:
            for name, column, dtype in columns:
                with (folder / name).open("wb") as file:
                    for begin in range(0, keys.size, _CHUNK_ROWS):
                        file.write(np.ascontiguousarray(column[begin : begin + _CHUNK_ROWS], dtype=dtype).data)
            if pooling is not None:
                pooling.write(folder)
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


def write_table_folders(
    path: str | Path,
    tables: Mapping[str, Iterable[tuple[Keys, Vectors]]],
    pooling: Mapping[str, Pooling] | None = None,
) -> dict[str, int]:
    """Write a folder that has a folder for each table, and return the number of rows of each table.

    A table without rows gets no folder. The folder is complete or absent, and replaces an earlier one as a whole.

    Args:
        path: the folder.
        tables: batches of each table by its name. The caller has checked the keys.
        pooling: how training read a table, by its name; None: not known.

    Raises:
        OutputError: a name cannot be a table's, ``path`` has other files, or the file system refuses.
    """
    rows: dict[str, int] = {}
    for name in tables:
        if not TABLE_NAME.fullmatch(name):
            raise OutputError(f"{path}: expected a table's name to match {TABLE_NAME.pattern}, got {name!r}")
    try:
        path = Path(path)
        for table in path.iterdir() if path.is_dir() else ():
            _require_table(table)
        with atomic_directory(path) as folder:
            for name, batches in tables.items():
                write_sparse_batches(folder / name, batches)
                rows[name] = (folder / name / "key").stat().st_size // np.dtype(np.int64).itemsize
                if not rows[name]:
                    shutil.rmtree(folder / name)
                elif pooling is not None:
                    pooling[name].write(folder / name)
    except OSError as err:
        raise OutputError(f"{path}: cannot be written: {(err.strerror or str(err)).lower()}") from err
    return rows


def _require_table(folder: Path) -> None:
    """Raise OSError if a folder that will be replaced is not a table's."""
    files = folder.iterdir() if folder.is_dir() else [folder]
    strange = next((file for file in files if file.name not in TABLE_FILES or file.is_dir()), None)
    if strange is not None:
        raise OSError(errno.ENOTEMPTY, f"{strange} is no file of a table, and would be erased")
