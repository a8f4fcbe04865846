"""Write a file or a folder so that a reader sees all of it or none, even after a power loss."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from serving.model.regular_file import real_path


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path``. After the block, sync it and rename it to ``path``. A link stays a link.

    If the block raises, the temporary file is removed and ``path`` does not change. A pipe and a device, such as
    /dev/stdout, are written directly.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = real_path(path)
    temporary = _beside(path, "tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Make a temporary folder next to ``path``. After the block, sync it all and rename it to ``path``.

    An existing folder is moved away first and deleted last. A reader finds the old folder, no folder for an instant, or
    the new folder, never a mixture. If the block raises, the temporary folder is removed and ``path`` does not change.
    """
    path = Path(os.path.abspath(path))  # "." has a name too
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    temporary, old = _beside(path, "tmp"), _beside(path, "old")
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, suffix: str) -> Path:
    """Return a hidden name that no other writer of the same path uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
