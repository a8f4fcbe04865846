"""Write the rows of trained columns to files that ``hotrow import`` reads."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.errors import OutputError
from serving.model.atomic import atomic_directory
from serving.model.sparse_writer import write_sparse_batches
from training.deeprec.feature_column import EmbeddingColumn


def write_tables(columns: Iterable[EmbeddingColumn], folder: str | Path) -> None:
    """Write the rows of columns, for ``hotrow import --checkpoint``.

    Args:
        columns: the trained columns. The rows of a column are in ``<folder>/<its name>``, in HugeCTR's format.
        folder: is complete or absent, and replaces an existing folder as a whole.

    Raises:
        OutputError: the file system refuses.
    """
    try:
        with atomic_directory(folder) as temporary:
            for column in columns:
                write_sparse_batches(temporary / column.name, _rows(column))
    except OSError as err:
        raise OutputError(f"{folder}: cannot be written: {(err.strerror or str(err)).lower()}") from err


def _rows(column: EmbeddingColumn) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield keys and vectors as a lookup reads them, because a served table has no largest norm."""
    max_norm = column.table.config.max_norm
    for part in column.table.dump():
        vectors = part.parts[:, 0]
        if max_norm is not None:
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = np.where(norms > max_norm, vectors * (max_norm / np.maximum(norms, max_norm)), vectors)
        yield part.keys, vectors
