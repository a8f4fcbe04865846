"""The files of the request log.

A process writes rows with the same columns to one file, an Arrow IPC stream. A large or old stream is converted to
Parquet. If a process is killed, another process converts its stream. A lock on the stream shows whether its process is
alive.
"""

import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from serving.model.atomic import atomic_write, locked_temporary, remove_killed_writes

STREAM, PARQUET = ".arrow", ".parquet"
_NAME = r"requests-\d{8}T\d{6}Z-[0-9a-f]{8}\.(?:arrow|parquet)"
_MODE, _FOLDER_MODE = 0o600, 0o700
_log = logging.getLogger("hotrow.request_log")


class LogStream:
    """An open file of rows of one schema. Only one thread may use it.

    Attributes:
        path: the file.
        size_bytes: its size.
        opened_s: when it was created, by ``time.monotonic``.
    """

    def __init__(self, folder: Path, schema: Any) -> None:
        """Create the file.

        Raises:
            OSError: the file cannot be created, or the disk is full.
        """
        folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        name = f"requests-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}{STREAM}"
        self.path, self.size_bytes, self.opened_s = folder / name, 0, time.monotonic()
        with ExitStack() as stack:
            # Named once it is locked and has a schema, so nobody takes it for the stream of a killed process.
            hidden = stack.enter_context(locked_temporary(self.path, partial(Path.touch, mode=_MODE)))
            self._file = stack.enter_context(hidden.open("wb", buffering=0))
            try:
                self.append(schema.serialize())
                hidden.rename(self.path)
            except BaseException:
                hidden.unlink(missing_ok=True)
                raise
            self._open = stack.pop_all()

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name."""
        with suppress(OSError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self._file.fileno()))
        return False

    def append(self, message: Any) -> None:
        """Write a whole message of the stream, or nothing.

        Raises:
            OSError: the disk is full.
        """
        view = memoryview(message)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._file.truncate(self.size_bytes)
            self._file.seek(self.size_bytes)
            raise
        self.size_bytes += memoryview(message).nbytes

    def close(self) -> None:
        """Close the stream. ``finish_streams`` converts it to Parquet."""
        self._open.close()


class _LogFile(NamedTuple):
    """A file of the log. Files sort by the time of their begin, which the name has, and then of their end."""

    begin_s: str
    end_ns: int
    path: Path
    size_bytes: int


def _files(root: Path, suffix: str = "") -> list[_LogFile]:
    """Return the files of all models that a log has written, the oldest first."""
    found = []
    for folder in _folders(root):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if re.fullmatch(_NAME, entry.name) and entry.name.endswith(suffix):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            begin_s, _, _ = entry.name.rpartition("-")
                            found.append(_LogFile(begin_s, status.st_mtime_ns, Path(entry.path), status.st_size))
    return sorted(found)


def _folders(root: Path) -> list[Path]:
    with suppress(OSError), os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def has_room(root: Path, max_bytes: int, needed_bytes: int) -> bool:
    """Return whether a log has room for ``needed_bytes``, after deleting its oldest Parquet files if that helps.

    A stream counts twice, because it is still there when it is converted to Parquet.

    Raises:
        OSError: a file cannot be deleted.
    """
    files = _files(root)
    finished = [file for file in files if file.path.suffix == PARQUET]
    of_finished = sum(file.size_bytes for file in finished)
    of_streams = sum(file.size_bytes for file in files) - of_finished
    too_many_bytes = of_finished + 2 * of_streams + needed_bytes - max_bytes
    if too_many_bytes > of_finished:
        return False
    for file in finished:
        if too_many_bytes <= 0:
            break
        file.path.unlink(missing_ok=True)  # another worker may have been faster
        too_many_bytes -= file.size_bytes
    return True


def finish_streams(root: Path, max_bytes: int) -> None:
    """Convert all streams that no process is writing to Parquet.

    Raises:
        OSError: a file cannot be read or written.
    """
    for folder in _folders(root):
        remove_killed_writes(folder, _NAME)
    for file in _files(root, STREAM):
        with suppress(FileNotFoundError):  # another worker was faster
            descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if file.path.exists():  # otherwise another worker has finished it since
                    _finish(root, max_bytes, file)
            except BlockingIOError:
                pass  # its process is alive
            finally:
                os.close(descriptor)


def _finish(root: Path, max_bytes: int, file: _LogFile) -> None:
    pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    target = file.path.with_suffix(PARQUET)
    batches = [] if target.exists() else list(stream_batches(file.path))  # a killed process did not reach the unlink
    if batches:
        content = pa.BufferOutputStream()  # its size must be known before room is made
        parquet.write_table(pa.Table.from_batches(batches), content, compression="zstd")
        if has_room(root, max_bytes, content.tell() - file.size_bytes):
            with atomic_write(target) as output:
                os.fchmod(output.fileno(), _MODE)
                output.write(content.getvalue())
        else:  # the bound was larger before
            _log.warning("%s does not fit into the %s bytes of the log and is removed", file.path, f"{max_bytes:,}")
    elif not target.exists():
        _log.warning("%s has no whole rows and is removed", file.path)
    file.path.unlink()


def stream_batches(path: Path) -> Iterator[Any]:
    """Yield the whole record batches of a stream. A torn end is left out.

    Raises:
        OSError: the file cannot be read.
    """
    pa = import_module("pyarrow")
    with suppress(pa.ArrowInvalid), pa.OSFile(str(path)) as source:  # not mapped: a writer may truncate it
        try:
            reader = pa.ipc.open_stream(source)
            while True:
                batch = reader.read_next_batch()
                batch.validate(full=True)
                yield batch
        except StopIteration:
            return
        except OSError as err:
            if err.errno:  # not an early end
                raise
