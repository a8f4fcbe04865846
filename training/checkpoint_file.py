"""``checkpoint.json``: it describes a checkpoint, and has checksums of itself and of the other files.

The checksum of a file of rows is the last one in the file, so that large files are not read twice. It tells whether the
file is that of another checkpoint or table. Who reads the rows finds the damages.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serving.errors import ModelFileError
from serving.model.regular_file import open_regular
from serving.model.strict_json import Fields, read_json
from training.row_file import CHECKSUM_BYTES, ROWS_SUFFIX

#: The file's name.
CHECKPOINT_FILE = "checkpoint.json"
_PART_BYTES = 1 << 20


def write_checkpoint_file(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a description of a checkpoint, after all other files.

    Args:
        folder: the checkpoint.
        document: JSON.

    Raises:
        OSError: the disk refuses.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = {**document, "files": {str(path.relative_to(folder)): _checksum_of(path) for path in files}}
    text = json.dumps({**whole, "crc32": _crc32_of_document(whole)}, indent=2)
    (folder / CHECKPOINT_FILE).write_text(text + "\n", encoding="utf-8")


def read_checkpoint_file(folder: Path, members: Iterable[str]) -> Fields:
    """Read a description, and check it and the files that it names.

    The description of an earlier version has no checksums.

    Raises:
        ConfigError: there is no description, or it is not JSON.
        ModelFileError: the description or a file is damaged, or a file is missing.
    """
    path = folder / CHECKPOINT_FILE
    document = read_json(path)
    fields = Fields(document, str(path), "", (*members, "files", "crc32"))
    if "crc32" not in document:
        return fields
    expected = document.pop("crc32")
    if (found := _crc32_of_document(document)) != expected:
        raise ModelFileError(path, f"expected CRC-32 {expected}, found {found}")
    for name, expected in document.pop("files").items():
        try:
            found = _checksum_of(folder / name)
        except OSError as err:
            raise ModelFileError(folder / name, f"cannot be read: {(err.strerror or str(err)).lower()}") from err
        if found != expected:
            raise ModelFileError(folder / name, f"expected CRC-32 {expected}, found {found}")
    return fields


def _checksum_of(path: Path) -> str:
    found = 0
    with open_regular(path) as file:
        if path.suffix == ROWS_SUFFIX:
            file.seek(max(path.stat().st_size - CHECKSUM_BYTES, 0))
            return f"{int.from_bytes(file.read(), 'little'):08x}"
        while part := file.read(_PART_BYTES):
            found = zlib.crc32(part, found)
    return f"{found:08x}"


def _crc32_of_document(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document).encode()):08x}"
