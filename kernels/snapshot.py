"""One embedding table in a file that is mapped and read in place: it opens at once, and all processes share it.

``kernels/host/snapshot/snapshot_format.hpp`` and ``docs/storage.md`` describe the format. Letters for shapes: N keys,
R bags of keys, D embedding_vec_size, V rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels import _host
from kernels.host import RowDtype

__all__ = ["SNAPSHOT_MAGIC", "Snapshot", "write_snapshot"]

SNAPSHOT_MAGIC = b"HRSNAP\r\n"  # a snapshot's first bytes

_WARM_UP_BYTES = 16 * 2**20

Keys = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]


class Snapshot(_host.Snapshot):
    """An open snapshot: int64 key -> float32[D], with the reads and the row dtypes of ``HostTable``.

    Opening reads only the header and the checksums of the index. A page of the index is checked when a lookup first
    reads it. Rows that a lookup reads are not checked. Rows that are read by number (``items``, ``read_keys``,
    ``read_items``) are checked, and ``check_content`` checks everything.

    Every method may be called from any thread and, after ``os.fork()``, in the child. The file may be renamed,
    replaced by a rename or deleted while it is open. If it is truncated or written to, calls raise; they never end the
    process and never return data of such a file. A SIGBUS handler does this, which is installed when the process opens
    its first snapshot. A handler that is installed later must pass on other faults, as Python's faulthandler does. A
    lookup of many keys uses several cores: see ``kernels.host.set_lookup_threads``.

    Args:
        path: the file.

    Raises:
        SnapshotError: there is no such file, or it is not a snapshot, or it is damaged or truncated.
        MemoryError: the system is out of memory; a snapshot takes a byte per 4,096 bytes of the index.
    """

    def __init__(self, path: str | Path) -> None:
        """See the class."""
        super().__init__(os.fsencode(path))

    def warm_up(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Read the whole file into memory, in huge pages if the system has them for files (such as ext4 of Linux 6.16).

        It also checks the index: sound pages are not checked again, and damaged pages fail the lookups that read them.
        Lookups may run in parallel. The file should fit into memory; otherwise its end displaces its beginning.

        Args:
            is_enough: called every 16 MiB; True ends the warm-up.
        """
        for begin in range(0, self.file_bytes, _WARM_UP_BYTES):
            if is_enough():
                return
            self._populate(begin, _WARM_UP_BYTES)

    def items(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """Iterate over the table in the order in which it was written.

        Yields:
            keys int64[N] and their rows float32[N, D], N at most ``batch_rows`` and never 0.

        Raises:
            SnapshotError: the file changed, cannot be read, or has a damaged page.
        """
        rows = len(self)
        for first in range(0, rows, batch_rows):
            yield self.read_items(first, min(batch_rows, rows - first))


def write_snapshot(
    descriptor: int,
    dim: int,
    capacity_rows: int,
    row_dtype: RowDtype,
    batches: Iterable[tuple[Keys, Vectors]],
    source: bytes,
) -> int:
    """Write a snapshot into an open, empty file. The header comes last, so an unfinished file is not a snapshot.

    It takes 26 bytes of memory per row and a few megabytes. The caller syncs and names the file.

    Args:
        descriptor: of the file.
        dim: D, 1 to 65,536.
        capacity_rows: the most rows; unused rows stay a hole in the file.
        row_dtype: how rows are kept; see ``HostTable``.
        batches: pairs of int64[N] and float32[N, D]; a key may occur once.
        source: 32 bytes that name the source of the rows, for ``Snapshot.source``.

    Returns:
        V, the rows written.

    Raises:
        RowValueError: ``row_dtype`` cannot hold a value.
        TableFullError: there are more rows than ``capacity_rows``.
        ReservedKeyError: a key is reserved.
        ValueError: a key occurs twice, a number is out of range, or ``row_dtype`` is unknown.
        OSError: the disk reports an error.
        MemoryError: the system is out of memory.
    """
    writer = _host.SnapshotWriter(descriptor, dim, capacity_rows, row_dtype)
    for keys, rows in batches:
        writer.append(keys, rows)
    writer.finish(source)
    return len(writer)
