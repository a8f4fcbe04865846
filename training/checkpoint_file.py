"""``checkpoint.json``: it describes a checkpoint, and has checksums of itself and of the files that have none."""

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serving.errors import ModelFileError
from serving.model.regular_file import open_regular
from serving.model.strict_json import Fields, read_json

#: The file's name.
CHECKPOINT_FILE = "checkpoint.json"
_PART_BYTES = 1 << 20


def write_checkpoint_file(folder: Path, document: Mapping[str, Any], files: Iterable[str]) -> None:
    """Write a description of a checkpoint.

    Args:
        folder: the checkpoint.
        document: JSON.
        files: names of files in the folder that have no checksums of their own.

    Raises:
        OSError: the disk refuses.
    """
    sums = {name: f"{_crc32_of(folder / name):08x}" for name in sorted(files)}
    whole = {**document, "files": sums}
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
            found = f"{_crc32_of(folder / name):08x}"
        except OSError as err:
            raise ModelFileError(folder / name, f"cannot be read: {(err.strerror or str(err)).lower()}") from err
        if found != expected:
            raise ModelFileError(folder / name, f"expected CRC-32 {expected}, found {found}")
    return fields


def _crc32_of(path: Path) -> int:
    found = 0
    with open_regular(path) as file:
        while part := file.read(_PART_BYTES):
            found = zlib.crc32(part, found)
    return found


def _crc32_of_document(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document).encode()):08x}"
