"""Records the keys of a sample of the requests, as a trace for ``hotrow plan``."""

import errno
import fcntl
import io
import logging
import os
import stat
import threading
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import random

import numpy as np
from numpy.typing import NDArray

from serving.background import QueueWorker
from serving.config import ModelConfig
from serving.errors import OutputError
from serving.protocol.recorded import encode_lookups

_log = logging.getLogger("hotrow.record")
_SUFFIX = ".jsonl"  # `hotrow plan` reads a file by its suffix
_MOST_WAITING_BYTES = 64 << 20
# Appends, because the program that rotates files may truncate this one.
_OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
#: How long ``close`` waits for a disk that hangs.
_CLOSE_TIMEOUT_S = 5.0


class Recorder:
    """Writes a random share of the requests to a new file. Every method except ``close`` may be called from any thread.

    The records of earlier servers stay: if ``trace.jsonl`` has some, the file is ``trace.1.jsonl``, and so on. If the
    file is moved or removed, the next record begins a new file.

    A background thread writes, so a slow disk delays no request. If too much data waits, or if the disk is full,
    requests are left out.
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
        self._share = share
        self._worker = QueueWorker("hotrow-record")
        self._lock = threading.Lock()  # guards the two numbers
        self._chosen = self._waiting_bytes = 0
        # Only the worker changes these: all records that it wrote, and those that it could not write since then.
        self._written = self._lost = 0

    def record(self, config: ModelConfig, keys: Sequence[NDArray[np.int64]]) -> None:
        """Record a request's keys of each table, or leave the request out."""
        if random() >= self._share:
            return
        line = encode_lookups(config, keys)
        with self._lock:
            self._chosen += 1
            if self._waiting_bytes + len(line) > _MOST_WAITING_BYTES:
                return
            self._waiting_bytes += len(line)
        self._worker.submit(partial(self._write, line))

    def close(self) -> None:
        """Write pending lines and close the file. Remove an empty file, so that the next start can use its name."""
        self._worker.wait(_CLOSE_TIMEOUT_S)
        self._worker.close(_CLOSE_TIMEOUT_S)
        if _is_at(self._path, self._file) and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self._file.close()
        count = self._chosen - self._written
        left_out = f"; {count:,} were left out because the disk was too slow or full" if count else ""
        _log.info("%s requests were recorded in %s%s", f"{self._written:,}", self._path, left_out)

    def _write(self, line: bytes) -> None:
        with self._lock:
            self._waiting_bytes -= len(line)
        try:
            self._append(line)
        except OSError as err:
            if not self._lost:
                _log.error("%s cannot be written, so requests are not recorded: %s", self._path, err.strerror or err)
            self._lost += 1
            return
        self._written += 1
        if self._lost:
            _log.warning("%s is written again; %s requests were left out", self._path, f"{self._lost:,}")
            self._lost = 0

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
