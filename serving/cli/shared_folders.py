"""The two folders in /dev/shm that the workers of one server share: one for tables and one for sockets.

Every user can create folders in /dev/shm under any name. So a folder is used only if no other user can access it.
"""

import fcntl
import logging
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serving.config import shared_ram_name
from serving.errors import ConfigError
from serving.storage.shared.folder import SHARED_MEMORY

_log = logging.getLogger("hotrow.workers")
_SOCKETS = "hotrow-workers-"


def tables_identity(listener: socket.socket) -> str:
    """Return the identity of the tables of the server at an address; see ``with_shared_ram``.

    The next server at the address has the same identity, so it finds the tables of a killed server. If another user has
    taken the name, the identity is random.
    """
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        path = Path(address).absolute()
        folder = path.parent.resolve()
        found = folder.stat()
        address = (str(folder / path.name), found.st_dev, found.st_ino)  # folders of two containers may have one path
    identity = f"{os.stat('/proc/self/ns/net').st_ino} {address}"
    folder = SHARED_MEMORY / shared_ram_name(identity)
    if os.path.lexists(folder) and not _is_own(folder):
        _log.warning("%s is open to other users, so the tables are shared under another name", folder)
        identity += f" {secrets.token_hex(16)}"
    return identity


@contextmanager
def sockets_folder() -> Iterator[tuple[Path, int]]:
    """Make a folder for the workers' sockets and remove it at the end.

    Yields:
        the folder, and a descriptor that locks it. The lock lasts until the last process that has inherited the
        descriptor ends, in whatever way.

    Raises:
        ConfigError: /dev/shm is absent, full or read-only.
    """
    folder = SHARED_MEMORY / f"{_SOCKETS}{secrets.token_hex(8)}"
    unlocked = SHARED_MEMORY / f".{folder.name}"
    try:
        unlocked.mkdir(mode=0o700)
        descriptor = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unlocked.rename(folder)
    except OSError as err:
        raise ConfigError("--workers", "", f"needs {SHARED_MEMORY}: {folder}: {err.strerror}") from err
    try:
        yield folder, descriptor
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned_sockets() -> None:
    """Remove the sockets' folders of this user's servers whose processes were all killed."""
    for folder in SHARED_MEMORY.glob(f"{_SOCKETS}*"):
        with suppress(OSError):
            if not _is_own(folder):
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
