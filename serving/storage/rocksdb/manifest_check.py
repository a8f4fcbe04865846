"""Whether RocksDB's list of its files is whole: what RocksDB itself takes on trust.

A MANIFEST that was cut short looks to RocksDB like one whose last entry was being written. It opens the database as it
was before, and removes the files that the list does not name any more: the newest rows.
"""

import os
from pathlib import Path

from serving.errors import StoreError

# RocksDB's log format: blocks of records, each a header of checksum, length and type, and so many bytes; what is left
# of a block when no header fits is zeros.
BLOCK_BYTES, HEADER_BYTES = 32768, 7
NOTHING, FIRST, MIDDLE = 0, 2, 3


def check_manifest(store: str, path: Path) -> None:
    """Check that the database at ``path``, if there is one, has a list of its files that was not cut short.

    Raises:
        StoreError: the list ends inside an entry, or there are files of rows and no list; the message names the file.
        OSError: it cannot be read.
    """
    current = path / "CURRENT"
    if not current.exists():
        if next(path.glob("*.sst"), None) is not None:
            raise StoreError(store, "", f"{current}: missing, beside files of rows; restore a checkpoint")
        return
    manifest = path / os.fsdecode(current.read_bytes().strip())
    if not manifest.is_file():
        return  # RocksDB says so itself
    content = manifest.read_bytes()
    whole_bytes = whole_entries_bytes(content)
    if whole_bytes < len(content):
        raise StoreError(
            store,
            "",
            f"{manifest}: {len(content):,} bytes, the last whole entry ends at {whole_bytes}: cut short; restore a "
            f"checkpoint, or, if power was lost while it was written, cut it there (truncate -s {whole_bytes})",
        )


def whole_entries_bytes(log: bytes) -> int:
    """Where the last whole entry of a log ends."""
    at = whole = 0
    while at + HEADER_BYTES <= len(log):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        if kind == NOTHING and not length:
            return len(log)  # space that was set aside
        at += HEADER_BYTES + length
        if kind not in (FIRST, MIDDLE) and at <= len(log):
            whole = at
    return whole
