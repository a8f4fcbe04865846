"""Write a file or a folder so that a reader sees all of it or none of it, even after a power cut."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; when the block ends well, sync it and rename it to ``path``.

    When the block raises, the temporary file is removed and ``path`` is as it was.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    path = Path(path)
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
    """Make a temporary folder beside ``path``; when the block ends well, sync all in it and rename it to ``path``.

    A folder that ``path`` named before is moved away first and deleted last: a reader finds the old one, none for a
    moment, or the new one, never a mixture. When the block raises, the temporary folder is removed and ``path`` is as
    it was.

    Raises:
        OSError: the parent folder does not exist or cannot be written.
    """
    path = Path(path)
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
    """Return a name that no other writer of the same path has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
