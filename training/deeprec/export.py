"""Write the rows of trained columns to files that ``hotrow import`` reads."""

from collections.abc import Iterable
from pathlib import Path

from serving.errors import OutputError
from serving.model.sparse_writer import write_table_folders
from training.deeprec.feature_column import EmbeddingColumn


def write_tables(columns: Iterable[EmbeddingColumn], folder: str | Path) -> None:
    """Write the rows of columns, for ``hotrow import --checkpoint``.

    Args:
        columns: the trained columns. The rows of a column are in ``<folder>/<its name>``, in HugeCTR's format.
        folder: is complete or absent, and replaces an earlier folder of tables. A column without rows has no table.

    Raises:
        OutputError: two columns have one name, ``folder`` has other files, or the file system refuses.
    """
    columns = list(columns)
    names = [column.name for column in columns]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise OutputError(f"{folder}: expected columns of different names, got two called {repeated!r}")
    rows = {column.name: column.table.served_rows() for column in columns}
    write_table_folders(folder, rows, {column.name: column.table.config.pooling for column in columns})
