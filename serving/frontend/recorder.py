"""Records the keys of a sample of the requests, as a trace for ``hotrow plan``."""

import errno
import fcntl
import io
import logging
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.config import ModelConfig
from serving.errors import OutputError
from serving.protocol.recorded import encode_lookups
from serving.request_log.writer import SampleWriter

_log = logging.getLogger("hotrow.record")
_SUFFIX = ".jsonl"  # `hotrow plan` reads a file by its suffix
# Appends, because the program that rotates files may truncate this one.
_OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


class Recorder(SampleWriter[bytes]):
    """Writes the keys of a random share of the requests to a new file. Any thread may call ``record``.

    The records of earlier servers stay: if ``trace.jsonl`` has some, the file is ``trace.1.jsonl``, and so on. If the
    file is moved or removed, the next record begins a new file.
    """

    def __init__(self, path: Path, share: float) -> None:
        """Create the file.

        Raises:
            OutputError: the file cannot be created.
        """
        if path.suffix != _SUFFIX:
            raise OutputError(f"--record: expected a file that ends in {_SUFFIX}, got {path}")
        self._wanted = path
        try:
            self._path, self._file = _unused_file(path)
        except OSError as err:
            raise OutputError(f"--record: {path} cannot be written: {err.strerror}") from err
        if self._path != path:
            _log.info("%s has earlier records, so requests are recorded in %s", path, self._path)
        super().__init__(_log, "recorded", share)

    def record(self, config: ModelConfig, keys: Sequence[NDArray[np.int64]]) -> None:
        """Record a request's keys of each table, or leave the request out."""
        if self.is_drawn():
            line = encode_lookups(config, keys)
            self.add(line, len(line))

    @property
    def _place(self) -> Path:
        return self._path

    def _writes(self, entries: Sequence[bytes]) -> Iterable[tuple[Callable[[], None], int]]:
        return ((partial(self._append, line), 1) for line in entries)

    def _tidy(self, is_end: bool) -> None:
        """Close the file at the end. Remove an empty file, so that the next start can use its name."""
        if not is_end:
            return
        if _is_at(self._path, self._file) and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def _append(self, line: bytes) -> None:
        """Write one line with one system call, so that a kill leaves whole lines."""
        if not _is_at(self._path, self._file):
            before, closing = self._path, self._file
            self._path, self._file = _unused_file(self._wanted)
            closing.close()
            _log.info("%s was moved or removed, so requests are recorded in %s", before, self._path)
        size_bytes = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(size_bytes)
            raise OSError(errno.ENOSPC, "the disk is full")


def _unused_file(path: Path) -> tuple[Path, io.FileIO]:
    """Open the first of trace.jsonl, trace.1.jsonl, ... that is new, or empty because its server was killed."""
    for number in count():
        chosen = path.with_suffix(f".{number}{path.suffix}") if number else path
        try:
            descriptor = os.open(chosen, _OPEN_FLAGS, 0o666)
        except OSError:
            if not os.path.lexists(chosen):
                raise
            continue  # another user's, a folder, a link
        file = open(descriptor, "wb", buffering=0)  # noqa: SIM115
        if _try_lock(descriptor):
            found = os.fstat(descriptor)
            # Without a name, it was removed by the server that had it.
            if stat.S_ISREG(found.st_mode) and not found.st_size and found.st_nlink:
                return chosen, file
        file.close()
    raise AssertionError("there are more numbers than files")


def _is_at(path: Path, file: io.FileIO) -> bool:
    """Return whether an open file still has its path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int) -> bool:
    """Lock a file for as long as it is open, against other servers that look for a file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
