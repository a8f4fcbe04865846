"""Checks of the files of a RocksDB database that RocksDB does not check.

RocksDB waits forever for the writer of a pipe, and reads an endless device until the process is out of memory. It
reads a log of any size.
RocksDB treats a MANIFEST that was cut short as one whose last entry was being written. It opens an older state and
removes the files that the shorter list does not name: the newest rows.
RocksDB treats a damaged log as one whose last write was cut short. ``tolerate_corrupted_tail_records`` limits this to
the end of the log. RocksDB then names no file, and it does not notice that a log is gone.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import StoreError

STORE_NAME = "rocksdb"

# RocksDB's log format: blocks of records. A record is a header of checksum, length and type, and its bytes. A block is
# filled up with zeros if no header fits.
BLOCK_BYTES, HEADER_BYTES = 32768, 7
NOTHING, FIRST, MIDDLE = 0, 2, 3
_CORRUPTION = "Corruption: "
#: Hotrow's logs have some 64 MiB. Another program's may be larger.
MOST_LOG_BYTES = 8 * 2**30


def check_files(path: Path) -> None:
    """Raise StoreError if the database at ``path`` has a file that nobody should read to its end.

    It is a pipe, a device or a socket, or a link to one; or it has no rows and is larger than any log.
    """
    for name in os.listdir(path) if path.is_dir() else ():
        try:
            found = (path / name).stat()
        except FileNotFoundError:  # the process that writes has just removed it, or it is a dead link
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise StoreError(STORE_NAME, "", f"{path / name}: is not a regular file")
        if found.st_size > MOST_LOG_BYTES and not name.endswith((".sst", ".blob")):
            reason = f"expected at most {MOST_LOG_BYTES:,} bytes, found {found.st_size:,} bytes"
            raise StoreError(STORE_NAME, "", f"{path / name}: {reason}; restore a checkpoint")


def check_manifest(path: Path) -> None:
    """Raise StoreError if the database at ``path`` has files of rows, but no whole list of its files."""
    current = path / "CURRENT"
    if not current.exists():
        if next(path.glob("*.sst"), None) is not None:
            raise StoreError(STORE_NAME, "", f"{current}: missing, but there are files of rows; restore a checkpoint")
        return
    manifest = path / os.fsdecode(current.read_bytes().strip())
    if not manifest.is_file():
        return  # RocksDB reports this itself
    content = manifest.read_bytes()
    whole_bytes = whole_entries_bytes(content)
    if whole_bytes < len(content):
        raise StoreError(
            STORE_NAME,
            "",
            f"{manifest}: {len(content):,} bytes, the last whole entry ends at {whole_bytes}: cut short; restore a "
            f"checkpoint, or, if power was lost while it was written, cut it there (truncate -s {whole_bytes})",
        )


def whole_entries_bytes(log: bytes) -> int:
    """Return where the last whole entry of a log ends."""
    at = whole = 0
    while at + HEADER_BYTES <= len(log):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        if kind == NOTHING and not length:
            return len(log)  # preallocated space
        at += HEADER_BYTES + length
        if kind not in (FIRST, MIDDLE) and at <= len(log):
            whole = at
    return whole


def check_logs(path: Path) -> None:
    """Raise StoreError if the database at ``path`` has files of rows, but no log."""
    if next(path.glob("*.sst"), None) is not None and next(path.glob("*.log"), None) is None:
        reason = (
            f"{path}: no log (*.log) of the newest rows, but there are files of rows; restore a checkpoint. If the "
            "database never had a log, give it an empty one (touch 000000.log)"
        )
        raise StoreError(STORE_NAME, "", reason)


@contextmanager
def damaged_logs_named(path: Path) -> Iterator[None]:
    """If a damaged log makes an opening fail, name the logs of the database at ``path`` in the error."""
    try:
        yield
    except Exception as err:  # rocksdict raises plain Exception
        reason = str(err)
        if not reason.startswith(_CORRUPTION) or "/" in reason:  # RocksDB names every other file
            raise
        logs = " or ".join(str(log) for log in sorted(path.glob("*.log")) if log.stat().st_size) or str(path)
        fault = reason.removeprefix(_CORRUPTION)
        advice = "restore a checkpoint, load the models into a new database, or, after a power loss, recover_database"
        raise StoreError(STORE_NAME, "", f"{logs}: {fault}, in the newest rows; {advice}") from err
