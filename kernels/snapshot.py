"""One embedding table in a file that is mapped and read as it lies: opens at once, shared by all processes.

The format is described in ``kernels/host/snapshot_format.hpp`` and ``docs/storage.md``. Letters: N keys, R bags of
keys, D the table's embedding_vec_size, V rows.
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
    """A snapshot, opened: int64 key -> float32[D], with the reads of ``HostTable``.

    Opening reads the header and the checksums of the index, whatever the size of the table. A page of the index is
    checked when a lookup first comes to it. The rows that a lookup reads are not checked; those that are read by
    number (``items``, ``read_keys``, ``read_items``) are, and ``check_content`` checks all. Row types are those of
    ``HostTable``.

    Every method may be called from any thread and, after ``os.fork()``, in the child. The file may be renamed,
    replaced by a rename or deleted while it is open. If it is cut short or written to, calls raise; they never end
    the process and never return what was read of such a file. A handler of SIGBUS, installed when the first snapshot
    of the process is opened, sees to that; one that is installed later must pass on what is not its own, as Python's
    faulthandler does when it has written where it was. A lookup of many keys uses several cores: see
    ``kernels.host.set_lookup_threads``.

    Args:
        path: the file.

    Raises:
        SnapshotError: there is no such file, or it is no snapshot, damaged or cut short.
        MemoryError: the system does not give the memory, a byte per 4,096 of the index.
    """

    def __init__(self, path: str | Path) -> None:
        """See the class."""
        super().__init__(os.fsencode(path))

    def warm_up(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Read the whole file into memory, in huge pages where the system has them for files (ext4 of Linux 6.16, say).

        The index is checked in passing: what is found sound is not checked again, what is damaged fails the lookups
        that come to it. Lookups run beside it. Meant for files that memory has room for: others push out what was read
        first.

        Args:
            is_enough: asked every 16 MiB; true ends it.
        """
        for begin in range(0, self.file_bytes, _WARM_UP_BYTES):
            if is_enough():
                return
            self._populate(begin, _WARM_UP_BYTES)

    def items(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """Walk over the table in the order in which it was written.

        Yields:
            keys int64[N] and their rows float32[N, D], N at most ``batch_rows`` and never 0.

        Raises:
            SnapshotError: the file changed, cannot be read, or is damaged in a page that the walk comes to.
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
    """Write a snapshot into an open, empty file. The header comes last: what is left half-way is no snapshot.

    Takes 26 bytes of memory per row and a few megabytes. The caller syncs the file and gives it its name.

    Args:
        descriptor: the file's.
        dim: D, 1 to 65,536.
        capacity_rows: most rows that come; what is not used stays as a hole in the file.
        row_dtype: the form in which rows are kept, see ``HostTable``.
        batches: pairs of int64[N] and float32[N, D]; a key may come once.
        source: 32 bytes that name what the rows come from, returned by ``Snapshot.source``.

    Returns:
        V, the rows written.

    Raises:
        RowValueError: a value is none that ``row_dtype`` can hold.
        TableFullError: more rows came than ``capacity_rows``.
        ReservedKeyError: a key is reserved.
        ValueError: a key came twice, a number is out of its range, or ``row_dtype`` is unknown.
        OSError: the disk refuses.
        MemoryError: the system does not give the memory.
    """
    writer = _host.SnapshotWriter(descriptor, dim, capacity_rows, row_dtype)
    for keys, rows in batches:
        writer.append(keys, rows)
    writer.finish(source)
    return len(writer)
