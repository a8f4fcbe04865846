"""A host table in memory that processes share: one of them writes, the others read the same copy.

The layout is described in ``kernels/host/memory/shared_area.hpp``.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels import _host
from kernels.errors import SharedMemoryError
from kernels.host import HostTable, RowDtype
from kernels.system_memory import check_memory

__all__ = ["SharedTable"]


class SharedTable(HostTable):
    """A ``HostTable`` whose memory is a file, mapped by up to 64 processes at a time.

    Callers make sure that only one process writes at a time (``writes``); the others read in parallel. A killed reader
    disturbs no other process. A reader that is stopped in the middle of a read makes writes fail that need the rows it
    holds. If the writer is killed, readers continue, and another process may attach as the writer and clears up
    half-finished writes. A row is written completely or not at all. At most 64 lookups of one process run at a time;
    further lookups wait. A forked child is not attached: its reads and writes raise RuntimeError.
    """

    @classmethod
    def create(
        cls, path: str | Path, dim: int, capacity_rows: int, row_dtype: RowDtype = "fp32", source: str = ""
    ) -> SharedTable:
        """Make a new empty table in a new file and take all its memory; this process writes.

        Args:
            path: the file, in a file system in memory: ``/dev/shm``.
            dim: see ``HostTable``.
            capacity_rows: see ``HostTable``.
            row_dtype: see ``HostTable``.
            source: names the source of its rows; at most 255 bytes.

        Raises:
            SharedMemoryError: the file exists, or there is not enough memory.
            ValueError: see ``HostTable``, or ``source`` is too long.
        """
        try:
            check_memory(cls.memory_bytes(dim, capacity_rows, row_dtype))
        except MemoryError as err:
            raise SharedMemoryError(str(path), str(err)) from err
        return cls(path, True, (dim, capacity_rows, row_dtype, source))

    @classmethod
    def attach(cls, path: str | Path, writes: bool) -> SharedTable:
        """Attach to the table of a file.

        Args:
            path: the file.
            writes: this process writes from now on, and the previous writer has ended.

        Raises:
            SharedMemoryError: there is no such file, it is not a shared table, or 64 processes are attached.
        """
        table = cls(path, writes)
        try:
            table._shared_source()
        except UnicodeDecodeError as err:
            raise SharedMemoryError(str(path), "is damaged: the name of its source is not text") from err
        return table

    def __init__(self, path: str | Path, writes: bool, new: tuple[int, int, RowDtype, str] | None = None) -> None:
        """Use ``create`` or ``attach``."""
        if new is None:
            _host.HostTable.__init__(self, os.fsencode(path), writes)
        else:
            _host.HostTable.__init__(self, os.fsencode(path), *new)
        self._path = str(path)
        self.writes = writes

    @property
    def source(self) -> str:
        """The source of the rows."""
        return self._shared_source()[0]

    @property
    def is_changed(self) -> bool:
        """Whether ``mark_changed`` was called."""
        return self._shared_source()[1]

    @property
    def inode(self) -> int:
        """Identifies the file, also after another table has replaced it."""
        inode: int = self._shared_inode()
        return inode

    def is_at(self, path: str | Path) -> bool:
        """Return whether ``path`` is this table, and not a table that has replaced it."""
        try:
            return os.stat(path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def mark_changed(self) -> None:
        """Record, before the first such write, that rows no longer match ``source``."""
        self._check_writes()
        self._mark_shared_changed()

    def insert(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> int:
        """See ``HostTable.insert``.

        Raises:
            SharedMemoryError: this process does not write; or a process that was stopped in the middle of a read has
                held rows for 5 seconds. In the second case some rows may have been written.
        """
        self._check_writes()
        return super().insert(keys, rows)

    def evict(self, keys: npt.NDArray[np.int64]) -> int:
        """See ``HostTable.evict``; raises SharedMemoryError if this process does not write."""
        self._check_writes()
        return super().evict(keys)

    def _check_writes(self) -> None:
        if not self.writes:
            raise SharedMemoryError(self._path, "this process only reads")
