"""Write the rows that several processes have, in HugeCTR's directory format."""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.errors import OutputError
from serving.model.pooling import Pooling
from serving.model.sparse_writer import write_table_folders
from training.processes import Processes

Rows = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]


def write_tables(
    processes: Processes, path: str | Path, rows: Mapping[str, Rows], pooling: Mapping[str, Pooling] | None = None
) -> dict[str, int]:
    """Write ``<path>/<table>`` of each table, and return how many rows each has; see ``write_table_folders``.

    Every process calls this with the same names and its own rows. The first process writes.

    Args:
        processes: that have the rows.
        path: the folder.
        rows: keys and vectors of each table, part by part.
        pooling: how training read each table; None: not known.

    Raises:
        OutputError: see ``write_table_folders``. It is raised in every process.
    """
    streams = {name: processes.to_first(f"the rows of {name}", parts) for name, parts in rows.items()}
    counts: dict[str, int] = {}
    refusal, cause = "", None
    if processes.is_first:
        try:
            counts = write_table_folders(path, streams, pooling)
        except OutputError as err:
            refusal, cause = str(err), err
    for parts in streams.values():  # the others send their rows, and the first process takes the rows it did not write
        deque(parts, maxlen=0)
    counts, refusal = processes.from_first("the numbers of rows", (counts, refusal))
    if refusal:
        raise OutputError(refusal) from cause
    return counts
