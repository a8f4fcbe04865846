"""The folder of /dev/shm through which processes share tables; see ``serving.storage.shared``.

A forked child has a copy of its parent's locks, which would outlive the parent. The child releases them at once.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from serving.errors import StoreError

STORE_NAME = "shared_memory"
SHARED_MEMORY = Path("/dev/shm")
_TABLE, _NEW = ".table", ".table.new"


class SharedFolder:
    """The folder as one process uses it. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Enter the folder, and create it if it is absent.

        Raises:
            StoreError: the folder belongs to another user, or its parent does not exist.
        """
        self.path = path
        self._users: int | None = self._enter()
        self._writer: int | None = None
        _ENTERED.add(self)

    def table_file(self, table: str) -> Path:
        """Return the file of a whole table."""
        return self.path / f"{table}{_TABLE}"

    def new_file(self, table: str) -> Path:
        """Return the file of a table that is being filled, until ``publish``."""
        return self.path / f"{table}{_NEW}"

    def publish(self, table: str) -> None:
        """Make a filled table visible to all processes; processes that have an older copy keep it."""
        self.new_file(table).rename(self.table_file(table))

    @property
    def is_left(self) -> bool:
        """Whether this process has left the folder, or is a forked child."""
        return self._users is None

    @property
    def writes(self) -> bool:
        """Whether this process is the writer."""
        return self._writer is not None

    def try_to_write(self) -> bool:
        """Become the writer if there is none; return whether this process is the writer."""
        if self._writer is None and self._users is not None:
            descriptor = os.open(self.path / "writer", os.O_RDWR | os.O_CREAT, 0o600)
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                return False
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # the memory is full; the number is for messages only
                os.write(descriptor, str(os.getpid()).encode())
            self._writer = descriptor
            for left in self.path.glob(f"*{_NEW}"):  # left by a process that was killed
                left.unlink()
        return self.writes

    def writer(self) -> str:
        """Return the writer's process, for messages."""
        with suppress(OSError):
            return f"process {(self.path / 'writer').read_text(encoding='ascii') or 'unknown'}"
        return "an unknown process"

    def leave(self, remove_if_last: bool) -> None:
        """Leave the folder; the last process removes it if ``remove_if_last``. No write may be running."""
        if self._users is None:
            return
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
        if remove_if_last and _try_lock(self._users, fcntl.LOCK_EX):
            # A process that waits for `users` then finds the file gone and starts again, so `users` goes last.
            for file in (*self.path.glob(f"*{_TABLE}*"), self.path / "writer", self.path / "users"):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # another process has entered again
                self.path.rmdir()
        os.close(self._users)
        self._users = None

    def let_go_in_child(self) -> None:
        """Close a forked child's copies of the locks; the parent keeps its own."""
        for descriptor in (self._users, self._writer):
            if descriptor is not None:
                os.close(descriptor)
        self._users = self._writer = None

    def _enter(self) -> int:
        while True:
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)
                self._check_owner()
                descriptor = os.open(self.path / "users", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                if not self.path.parent.is_dir():
                    raise StoreError(STORE_NAME, "", f"{self.path.parent}: there is no such folder") from None
                continue  # the last process removed the folder in between
            except OSError as err:
                reason = f"{self.path}: {err.strerror}; if it is another user's, choose another shared_memory_name"
                raise StoreError(STORE_NAME, "", reason) from err
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if (self.path / "users").stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def _check_owner(self) -> None:
        """Check that the folder is this user's, because every user can create folders in /dev/shm."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            reason = f"{self.path}: is not a folder of this user; choose another shared_memory_name"
            raise StoreError(STORE_NAME, "", reason)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(STORE_NAME, "", f"{self.path}: other users may write to it: chmod 700 it or remove it")


_ENTERED: WeakSet[SharedFolder] = WeakSet()


def _let_go_in_child() -> None:
    for folder in _ENTERED:
        folder.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
