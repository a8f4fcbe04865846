"""Changed rows that TorchEasyRec writes during training: Parquet files, one for each rank and dump.

==================  =============  =============================================
``embedding_name``  string         the table
``key_id``          int64          the key
``embedding``       list<float32>  the row
``global_step``     int64          of equal keys, the row of the last step counts
==================  =============  =============================================

Other columns are not read.

Source: ``_DELTA_DUMP_SCHEMA`` in tzrec/utils/delta_embedding_dump.py of https://github.com/alibaba/TorchEasyRec
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import MissingExtraError, ModelFileError
from serving.sources.checkpoint import without_hidden
from serving.sources.rows import TableRows, rows_of_array

_COLUMNS = _NAME, _KEY, _ROW, _STEP = ("embedding_name", "key_id", "embedding", "global_step")


class TorchEasyRecDelta:
    """The tables of a folder, or of one file. See ``Checkpoint``. The rows are kept in memory."""

    def __init__(self, path: Path) -> None:
        """Read all files. There may be no table.

        Raises:
            ModelFileError: a file cannot be read, or has other columns.
            MissingExtraError: there are files, and pyarrow is not installed.
        """
        self.path = path
        files = without_hidden(path, path.glob("**/*.parquet")) if path.is_dir() else [path]
        self._tables: dict[str, list[dict[str, NDArray[Any]]]] = {}
        for file in files:
            for name, columns in _parts_of(file):
                self._tables.setdefault(name, []).append(columns)

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return sorted(self._tables)

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``. Every name is a table."""
        return self.names()

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        source, parts = f"{self.path}#{name}", self._tables[name]
        if len(dims := sorted({part[_ROW].shape[1] for part in parts})) > 1:
            raise ModelFileError(source, f"expected rows of one dimension, found {' and '.join(map(str, dims))}")
        joined = {column: np.concatenate([part[column] for part in parts]) for column in (_KEY, _ROW, _STEP)}
        latest = np.argsort(joined[_STEP], kind="stable")[::-1]
        keys, firsts = np.unique(joined[_KEY][latest], return_index=True)
        return rows_of_array(source, joined[_ROW][latest[firsts]], keys)


def _parts_of(file: Path) -> list[tuple[str, dict[str, NDArray[Any]]]]:
    """Return the keys, rows and steps of each table in a file."""
    try:
        pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as err:
        raise MissingExtraError("pyarrow", "features", str(file)) from err
    try:
        schema = pq.read_schema(file)
        if missing := [column for column in _COLUMNS if column not in schema.names]:
            expected = f"expected the columns {', '.join(_COLUMNS)}, as TorchEasyRec writes them"
            raise ModelFileError(file, f"{expected}; {missing[0]} is missing")
        table = pq.read_table(file, columns=list(_COLUMNS)).combine_chunks()
    except OSError as err:
        raise ModelFileError(file, f"cannot be read: {err.strerror or err}") from err
    except pa.ArrowException as err:
        raise ModelFileError(file, f"is no Parquet file: {err}") from err
    if any(table.column(column).null_count for column in _COLUMNS):
        raise ModelFileError(file, "expected a value in each row, found null")
    found = []
    for name in table.column(_NAME).unique().to_pylist():
        part = table.filter(pa.compute.equal(table.column(_NAME), name)).combine_chunks()
        lengths = part.column(_ROW).combine_chunks().value_lengths().unique().to_pylist()
        if len(lengths) > 1:
            raise ModelFileError(file, f"table {name!r}: expected rows of one dimension, found {min(lengths)} and more")
        values = part.column(_ROW).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        columns = {column: part.column(column).to_numpy() for column in (_KEY, _STEP)}
        found.append((name, {**columns, _ROW: values.reshape(part.num_rows, -1)}))
    return found
