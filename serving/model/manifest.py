"""The manifest of an exported model version: size and SHA-256 of every file beside it."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write
from serving.model.strict_json import Fields, read_json

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_LARGEST = 2**63 - 1
_SHA256 = re.compile("[0-9a-f]{64}")
_IGNORED_FOLDER = "__pycache__"  # Triton imports model.py, and Python leaves its bytecode beside it


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What one file must be: ``sha256`` is 64 lower-case hexadecimal digits."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of one model; ``files`` maps POSIX paths relative to the folder to what must lie there."""

    model: str
    version: int
    files: Mapping[str, FileRecord]


def write_manifest(directory: str | Path, model: str, version: int) -> Manifest:
    """Hash every file under ``directory`` and write ``manifest.json`` there.

    Raises:
        ModelFileError: a file cannot be read, is not a regular file, or the manifest cannot be written.
    """
    directory = Path(directory)
    files = {
        name: FileRecord((directory / name).stat().st_size, sha256_of(directory / name)) for name in _listing(directory)
    }
    document = {
        "format": _FORMAT,
        "model": model,
        "version": version,
        "files": {name: {"size_bytes": r.size_bytes, "sha256": r.sha256} for name, r in files.items()},
    }
    path = directory / MANIFEST_NAME
    try:
        with atomic_write(path) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err
    return Manifest(model, version, files)


def read_manifest(directory: str | Path) -> Manifest:
    """Read ``manifest.json`` without looking at the files.

    Raises:
        ModelFileError: it is missing or not a manifest of this format.
    """
    path = Path(directory) / MANIFEST_NAME
    try:
        fields = Fields(read_json(path), "", "", ("format", "model", "version", "files"))
        fields.choice("format", {_FORMAT: _FORMAT})
        names = fields.object("files")
        files = {name: _record(names.object(name, ("size_bytes", "sha256"))) for name in names}
        return Manifest(fields.text("model"), fields.integer("version", maximum=_LARGEST), files)
    except ConfigError as err:
        raise ModelFileError(path, ": ".join(part for part in (err.path, err.reason) if part)) from err


def verify_manifest(directory: str | Path, full: bool = True) -> Manifest:
    """Check that the folder holds exactly the manifest's files, ``__pycache__`` aside.

    Args:
        directory: the version's folder.
        full: hash every file too; without, only names and sizes are compared.

    Raises:
        ModelFileError: the manifest cannot be read, or a file is missing, additional, of another size or of other
            content; the message names the file, what was expected and what was found.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    present = set(_listing(directory))
    for name in sorted(manifest.files.keys() | present):
        if name not in present:
            raise ModelFileError(directory / name, "named by the manifest, but missing")
        if name not in manifest.files:
            raise ModelFileError(directory / name, "not named by the manifest")
    for name, expected in manifest.files.items():
        size_bytes = (directory / name).stat().st_size
        if size_bytes != expected.size_bytes:
            raise ModelFileError(directory / name, f"expected {expected.size_bytes:,} bytes, found {size_bytes:,}")
    for name, expected in manifest.files.items() if full else ():
        sha256 = sha256_of(directory / name)
        if sha256 != expected.sha256:
            raise ModelFileError(directory / name, f"expected SHA-256 {expected.sha256}, found {sha256}")
    return manifest


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 as hexadecimal text.

    Raises:
        ModelFileError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def _record(fields: Fields) -> FileRecord:
    sha256 = fields.text("sha256")
    if not _SHA256.fullmatch(sha256):
        raise fields.error(f"expected 64 hexadecimal digits, got {sha256!r}", "sha256")
    return FileRecord(fields.integer("size_bytes", minimum=0, maximum=_LARGEST), sha256)


def _listing(directory: Path) -> list[str]:
    """Return every file under the folder but its manifest, as sorted POSIX paths relative to it."""
    found = []
    for folder, subfolders, names in os.walk(directory, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if name != _IGNORED_FOLDER]
        for name in names:
            path = Path(folder, name)
            try:
                is_regular = path.is_file()
            except OSError as err:  # of a folder that may be listed, but not entered
                _refuse(err)
            if not is_regular:  # a pipe would block whoever reads it
                raise ModelFileError(path, "not a regular file")
            found.append(path.relative_to(directory).as_posix())
    return sorted(name for name in found if name != MANIFEST_NAME)


def _refuse(err: OSError) -> NoReturn:
    raise ModelFileError(err.filename, f"cannot be read: {err.strerror}") from err
