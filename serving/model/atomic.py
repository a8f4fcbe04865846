"""Write a file or a folder so that a reader sees all of it or none, even after a power loss."""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from serving.model.regular_file import real_path

_TEMPORARY = re.compile(r"(\.(.+)\.[0-9a-f]{8})\.(?:tmp|old)", re.DOTALL)


@contextmanager
def atomic_write(path: str | Path, *, replace: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path``. After the block, sync it and rename it to ``path``. A link stays a link.

    If the block raises, the temporary file is removed and ``path`` does not change. If ``replace``, what killed writers
    of ``path`` left behind is removed first. A pipe and a device, such as /dev/stdout, are written directly.

    Raises:
        FileExistsError: ``path`` is there, and ``replace`` is False.
    """
    path = Path(path)
    if not replace and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = real_path(path)
    if replace:
        remove_killed_writes(path.parent, re.escape(path.name))
    with locked_temporary(path, Path.touch) as temporary:
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if replace:
                    temporary.replace(path)
                else:
                    os.link(temporary, path)  # unlike a rename, it fails if another writer was faster
                    temporary.unlink()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Make a temporary folder next to ``path``. After the block, sync it all and rename it to ``path``.

    An existing folder is moved away first and deleted last. A reader finds the old folder, no folder for an instant, or
    the new folder, never a mixture. If the block raises, the temporary folder is removed and ``path`` does not change.
    What killed writers of ``path`` left behind is removed first; see ``remove_killed_writes``.
    """
    path = Path(os.path.abspath(path))  # "." has a name too
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    with temporary_directory(path) as temporary:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        old = temporary.with_suffix(".old")
        try:
            if path.exists():
                path.rename(old)
            temporary.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Make a hidden folder next to ``path``, and remove it after the block.

    What killed writers of ``path`` left behind is removed first; see ``remove_killed_writes``.
    """
    remove_killed_writes(path.parent, re.escape(path.name))
    with locked_temporary(path, Path.mkdir) as temporary:
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_killed_writes(parent: Path, names: str) -> None:
    """Remove the temporary files and folders of killed writers from a folder. Those of live writers stay.

    A folder that a killed writer has moved away and not replaced gets its name back.

    Args:
        parent: the folder, which may be absent.
        names: a regular expression of the names that were to be written.
    """
    try:
        found = {match[1]: match[2] for match in map(_TEMPORARY.fullmatch, os.listdir(parent)) if match}
    except OSError:
        return
    for stem, name in sorted(found.items()):
        if re.fullmatch(names, name):
            with suppress(OSError):  # the next start tries again
                _remove_killed_write(parent / stem, parent / name)


def _remove_killed_write(stem: Path, path: Path) -> None:
    temporary, old = Path(f"{stem}.tmp"), Path(f"{stem}.old")
    with ExitStack() as stack:
        with suppress(FileNotFoundError):
            if not _lock(temporary, stack):
                return
        if old.is_dir() and not path.exists():
            old.rename(path)
        # Still locked: a writer that has only just made ``temporary`` must not lock it before it is gone.
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def locked_temporary(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make a hidden file or folder next to ``path``, and lock it until the end of the block."""
    with ExitStack() as stack:
        while True:
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            make(temporary)
            try:
                is_mine = _lock(temporary, stack) and temporary.exists()
            except FileNotFoundError:  # remove_killed_writes of another process came in between
                is_mine = False
            except OSError:  # the file system has no locks, so nobody removes it
                is_mine = True
            if is_mine:
                break
        yield temporary


def _lock(path: Path, stack: ExitStack) -> bool:
    """Lock a file or folder until ``stack`` closes. Return False if another process has locked it.

    The kernel ends the lock of a process that ends.
    """
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
