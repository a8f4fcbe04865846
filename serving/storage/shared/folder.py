"""The folder of /dev/shm through which processes share tables: who writes, who is there, and who removes it.

::

    <folder>/users    every process that is there holds a shared flock; whoever gets it alone is the last one
    <folder>/writer   the process that writes holds an exclusive flock; the file has its number, for messages
    <folder>/<model>.<table>.table       a table (kernels.shared); comes whole, by a rename
    <folder>/<model>.<table>.table.new   one that is being filled

The system lets go of a lock when its process ends, however it ends. A forked child has a copy of the lock, which would
outlive the process: it lets go at once, and is not there.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from serving.errors import StoreError

SHARED_MEMORY = Path("/dev/shm")
_TABLE, _NEW = ".table", ".table.new"


class SharedFolder:
    """One process's place in the folder. Not thread-safe."""

    def __init__(self, store: str, path: Path) -> None:
        """Enter the folder, making it if need be.

        Args:
            store: the tier's name, for messages.
            path: the folder.

        Raises:
            StoreError: it belongs to another user, or the system has no such place.
        """
        self._store = store
        self.path = path
        self._users: int | None = self._enter()
        self._writer: int | None = None
        _ENTERED.add(self)

    def table_file(self, table: str) -> Path:
        """The file of a table that is whole."""
        return self.path / f"{table}{_TABLE}"

    def new_file(self, table: str) -> Path:
        """The file of a table that is being filled; ``publish`` makes it the table's."""
        return self.path / f"{table}{_NEW}"

    def publish(self, table: str) -> None:
        """Let the other processes have the table that was filled; those that have an older one keep that."""
        self.new_file(table).rename(self.table_file(table))

    @property
    def is_left(self) -> bool:
        """Whether this process is not there any more: it has left, or it is a forked child."""
        return self._users is None

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self._writer is not None

    def try_to_write(self) -> bool:
        """Become the process that writes, if there is none; whether this process is it now."""
        if self._writer is None and self._users is not None:
            descriptor = os.open(self.path / "writer", os.O_RDWR | os.O_CREAT, 0o600)
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                return False
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            self._writer = descriptor
            for left in self.path.glob(f"*{_NEW}"):  # by a process that was killed
                left.unlink()
        return self.writes

    def writer(self) -> str:
        """Who writes, for messages."""
        with suppress(OSError):
            return f"process {(self.path / 'writer').read_text(encoding='ascii') or 'unknown'}"
        return "an unknown process"

    def leave(self, remove_if_last: bool) -> None:
        """Let go; the folder goes with the last process, if ``remove_if_last``. No write may be under way."""
        if self._users is None:
            return
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
        if remove_if_last and _try_lock(self._users, fcntl.LOCK_EX):
            # Whoever waits for `users` finds it gone, and begins anew: so it goes last.
            for file in (*self.path.glob(f"*{_TABLE}*"), self.path / "writer", self.path / "users"):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # somebody has begun anew
                self.path.rmdir()
        os.close(self._users)
        self._users = None

    def let_go_in_child(self) -> None:
        """Close a forked child's copies of the locks; they stay the parent's."""
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
                    raise StoreError(self._store, "", f"{self.path.parent}: there is no such folder") from None
                continue  # the last process removed it in between
            except OSError as err:
                reason = f"{self.path}: {err.strerror}; if it is another user's, choose another shared_memory_name"
                raise StoreError(self._store, "", reason) from err
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if (self.path / "users").stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def _check_owner(self) -> None:
        """Anybody can make a folder in /dev/shm, and let others write there."""
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            reason = f"{self.path}: is no folder of this user's; choose another shared_memory_name"
            raise StoreError(self._store, "", reason)


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
