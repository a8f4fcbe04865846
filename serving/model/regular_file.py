"""Opens regular files. Pipes and devices are refused, because reading them may never end.

Links are followed. A dead link is not an absent file: the file was moved or is on a disk that is not mounted.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

#: Protocol buffers hold at most 2 GiB; larger weights are in files of their own.
MOST_ONNX_BYTES = 2 << 30
_SHOWN_BYTES = 8
_OTHER_KIND = "not a regular file"


def real_path(path: str | Path) -> Path:
    """Follow links, but keep links in a circle. ``Path.resolve`` raises RuntimeError for them before Python 3.13."""
    return Path(os.path.realpath(path))


def is_absent(path: str | Path) -> bool:
    """Return whether an optional file is not there; a dead link is there."""
    return not os.path.lexists(path)


def open_regular(path: str | Path, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading, without waiting for a writer of a pipe.

    Args:
        path: the file; links are followed.
        most_bytes: refuse a larger file; None: any size.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file cannot be opened, is a dead link, not a regular file or too large; ``strerror`` says which.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError as err:
        if not os.path.islink(path):
            raise  # also if the file has appeared since: the caller may look again
        raise OSError(errno.ENODEV, "a link to a file that does not exist", str(path)) from err
    except OSError as err:
        if err.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise OSError(errno.ENODEV, _OTHER_KIND, str(path)) from err
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ENODEV, _OTHER_KIND, str(path))
        if most_bytes is not None and found.st_size > most_bytes:
            reason = f"expected at most {most_bytes:,} bytes, found {found.st_size:,}"
            raise OSError(errno.EFBIG, reason, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def wrong_kind(path: str | Path, kind: str, beginnings: tuple[bytes, ...] = ()) -> str:
    """Return why a library could not read a file, in words about the file.

    Args:
        path: the file.
        kind: what was expected, such as ``a PyTorch file``.
        beginnings: how files of this kind begin, if they all begin alike.
    """
    try:
        with open_regular(path) as file:
            size_bytes, beginning = os.fstat(file.fileno()).st_size, file.read(_SHOWN_BYTES)
    except OSError as err:
        return f"cannot be read: {err.strerror}"
    if not size_bytes:
        return f"expected {kind}, found an empty file"
    if beginnings and beginning.startswith(beginnings):
        return f"expected {kind}, found a file that is cut short or damaged"
    if size_bytes == 1:
        return f"expected {kind}, found the byte {beginning!r}"
    return f"expected {kind}, found {size_bytes:,} bytes, which begin with {beginning!r}"


def check_regular(path: str | Path, most_bytes: int | None = None) -> None:
    """Check a file that a library opens by itself; see ``open_regular``."""
    open_regular(path, most_bytes).close()


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Read a regular file of at most ``most_bytes``, to the end that it has when it is opened; see ``open_regular``."""
    with open_regular(path, most_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)
