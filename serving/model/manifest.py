"""The manifest of an exported model version: the size and SHA-256 of every file next to it.

A digest identifies a version: the SHA-256 of its manifest. A version that was made by hand has no manifest. Its digest
is the SHA-256 of the list of its files and their SHA-256.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from serving.background import giving_way
from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write
from serving.model.regular_file import MOST_ONNX_BYTES, check_regular, open_regular, real_path
from serving.model.slot_sizes import SlotKeys
from serving.model.strict_json import Fields, log_newer, read_json

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_MEMBERS = ("format", "model", "version", "keys", "updates", "tables", "files")
_RECORD_MEMBERS, _UPDATES_MEMBERS, _TABLES_MEMBERS = (
    ("size_bytes", "sha256"),
    ("run", "positions"),
    ("version", "digest"),
)
_LARGEST = 2**63 - 1
_KEYS: dict[str, SlotKeys] = {"stored": "stored", "unshifted": "unshifted"}
_SHA256 = re.compile("[0-9a-f]{64}")
_IGNORED_FOLDER = "__pycache__"  # Triton imports model.py, and Python writes its bytecode next to it
_MOST_FILES = 100_000
_PART_BYTES = 1 << 20
#: Called before each part of a file is hashed. It raises an error to end the hashing, which may take minutes.
GoOn = Callable[[], None]
#: Names, sizes and times of a version's files. If it changes, a file may have changed.
Stamp = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The expected size and hash of one file. ``sha256`` has 64 lower-case hexadecimal digits."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SharedTables:
    """The version that brings the tables of a version without tables, and the digest of its files."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of one model.

    Attributes:
        model: its name.
        version: its number.
        files: the record of each file by its POSIX path relative to the folder.
        keys: ``"unshifted"`` if requests have keys that begin at 0 in each slot; see ``serving.model.slot_sizes``.
        run: the training run that publishes updates of the rows; empty if it publishes none.
        positions: for each partition of the update log, the position that the files include, or that shared tables
            must have reached.
        tables: the version whose tables it shares; None: its tables are among its files.
    """

    model: str
    version: int
    files: Mapping[str, FileRecord]
    keys: SlotKeys = "stored"
    run: str = ""
    positions: Mapping[str, str] = field(default_factory=dict)
    tables: SharedTables | None = None


def write_manifest(
    directory: str | Path,
    model: str,
    version: int,
    keys: SlotKeys = "stored",
    run: str = "",
    positions: Mapping[str, str] | None = None,
    tables: SharedTables | None = None,
) -> Manifest:
    """Hash every file in ``directory`` and write ``manifest.json`` there. Raise ModelFileError on failure."""
    directory = Path(directory)
    files = {
        name: FileRecord((directory / name).stat().st_size, sha256_of(directory / name)) for name in _listing(directory)
    }
    document = {
        "format": _FORMAT,
        "model": model,
        "version": version,
        **({"keys": keys} if keys == "unshifted" else {}),
        **({"updates": {"run": run, "positions": dict(positions or {})}} if run else {}),
        **({"tables": {"version": tables.version, "digest": tables.digest}} if tables else {}),
        "files": {name: {"size_bytes": r.size_bytes, "sha256": r.sha256} for name, r in files.items()},
    }
    path = directory / MANIFEST_NAME
    try:
        with atomic_write(path) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err
    return Manifest(model, version, files, keys, run, dict(positions or {}), tables)


def read_manifest(directory: str | Path) -> Manifest:
    """Read ``manifest.json`` without looking at the files. Raise ModelFileError if it is not one."""
    path = Path(directory) / MANIFEST_NAME
    try:
        fields = Fields(read_json(path), "", "")
        fields.choice("format", {_FORMAT: _FORMAT})
        names = fields.object("files")
        records = {name: names.object(name) for name in names}
        newer = fields.others(_MEMBERS).union(*(record.others(_RECORD_MEMBERS) for record in records.values()))
        log_newer(str(path), frozenset(newer))
        files = {name: _record(record) for name, record in records.items()}
        keys = fields.choice("keys", _KEYS, "stored")
        run, positions = "", dict[str, str]()
        if "updates" in fields:
            updates = fields.object("updates")
            of_logs = updates.object("positions")
            run, positions = updates.text("run"), {name: of_logs.text(name) for name in of_logs}
            log_newer(str(path), frozenset(updates.others(_UPDATES_MEMBERS)))
        version = fields.integer("version", maximum=_LARGEST)
        tables = _shared_tables(fields.object("tables"), path) if "tables" in fields else None
        return Manifest(fields.text("model"), version, files, keys, run, positions, tables)
    except ConfigError as err:
        raise ModelFileError(path, ": ".join(part for part in (err.path, err.reason) if part)) from err


def verify_manifest(directory: str | Path, full: bool = True, go_on: GoOn | None = None) -> Manifest:
    """Check that the folder has exactly the manifest's files, except ``__pycache__``.

    With ``full``, also check every file's SHA-256, not only its name and size. ``go_on`` may end the hashing.

    Raises:
        ModelFileError: the manifest cannot be read, or a file is missing, additional, or different.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    present = set(_listing(directory))
    for name in sorted(manifest.files.keys() | present):
        if name not in present:
            found = "a folder" if os.path.isdir(directory / name) else "missing"
            raise ModelFileError(directory / name, f"named by the manifest, but {found}")
        if name not in manifest.files:
            raise ModelFileError(directory / name, "not named by the manifest; remove it")
    for name, expected in manifest.files.items():
        size_bytes = (directory / name).stat().st_size
        if size_bytes != expected.size_bytes:
            raise ModelFileError(directory / name, f"expected {expected.size_bytes:,} bytes, found {size_bytes:,}")
    for name, expected in manifest.files.items() if full else ():
        sha256 = sha256_of(directory / name, go_on)
        if sha256 != expected.sha256:
            raise ModelFileError(directory / name, f"expected SHA-256 {expected.sha256}, found {sha256}")
    return manifest


def digest_of_files(directory: str | Path, checked: Collection[Path] = (), go_on: GoOn | None = None) -> str:
    """Return the digest of a version without a manifest: the SHA-256 of what ``sha256sum`` prints for its files.

    Args:
        directory: the version.
        checked: real paths of the files whose sizes the caller has checked. Any other file has at most 2 GiB, because
            nothing says that it is as large as it should be, and hashing it would take long.
        go_on: may end the hashing.

    Raises:
        ModelFileError: a file cannot be read, is not a regular file, or is too large.
    """
    directory = Path(directory)
    names = _listing(directory, follow_links=True)
    for name in names:
        if real_path(directory / name) not in checked:
            check_size(directory / name)
    lines = [f"{sha256_of(directory / name, go_on)}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def stamp_of(directory: str | Path) -> Stamp:
    """Return the names, sizes, times and numbers of the files in a folder. No file is opened, so none blocks."""
    found: list[tuple[object, ...]] = [(str(directory), *status_of(str(directory))[:1])]
    for folder, subfolders, names in os.walk(directory, followlinks=True):
        subfolders[:] = [name for name in subfolders if name != _IGNORED_FOLDER]
        found.append((folder, status_of(folder)[:1]))
        found += [(path, *status_of(path)) for path in (os.path.join(folder, name) for name in names)]
        if len(found) > _MOST_FILES:  # such as links in a circle
            break
    return tuple(sorted(found, key=str))


def status_of(path: str | Path) -> tuple[object, ...]:
    """Return what changes if a file changes: its kind, place, size and times, or why it cannot be found."""
    try:
        found = os.stat(path)
    except OSError as err:
        return (err.errno,)
    return found.st_mode, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_size(path: Path) -> None:
    """Refuse a file that is larger than any file whose content does not say its size: an ONNX network."""
    try:
        check_regular(path, MOST_ONNX_BYTES)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def sha256_of(path: Path, go_on: GoOn | None = None) -> str:
    """Return a file's SHA-256 as hexadecimal text. Raise ModelFileError if it cannot be read."""
    try:
        with open_regular(path) as file:
            is_long = os.fstat(file.fileno()).st_size > _PART_BYTES
            return giving_way(partial(_sha256_of, file, go_on)) if is_long else _sha256_of(file, go_on)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def _sha256_of(file: IO[bytes], go_on: GoOn | None) -> str:
    digest = hashlib.sha256()
    while part := file.read(_PART_BYTES):
        if go_on is not None:
            go_on()
        digest.update(part)
    return digest.hexdigest()


def _record(fields: Fields) -> FileRecord:
    return FileRecord(fields.integer("size_bytes", minimum=0, maximum=_LARGEST), _sha256_in(fields, "sha256"))


def _shared_tables(fields: Fields, path: Path) -> SharedTables:
    log_newer(str(path), frozenset(fields.others(_TABLES_MEMBERS)))
    return SharedTables(fields.integer("version", maximum=_LARGEST), _sha256_in(fields, "digest"))


def _sha256_in(fields: Fields, name: str) -> str:
    sha256 = fields.text(name)
    if not _SHA256.fullmatch(sha256):
        raise fields.error(f"expected 64 hexadecimal digits, got {sha256!r}", name)
    return sha256


def _listing(directory: Path, follow_links: bool = False) -> list[str]:
    """Return every file in the folder except its manifest, as sorted POSIX paths relative to it."""
    found: list[str] = []
    for folder, subfolders, names in os.walk(directory, onerror=_refuse, followlinks=follow_links):
        if len(found) > _MOST_FILES:
            raise ModelFileError(directory, f"expected at most {_MOST_FILES:,} files")
        subfolders[:] = [name for name in subfolders if name != _IGNORED_FOLDER]
        for name in names:
            path = Path(folder, name)
            try:
                is_regular = path.is_file()
            except OSError as err:  # the folder can be listed but not entered
                _refuse(err)
            if not is_regular:  # reading a pipe would block
                raise ModelFileError(path, "not a regular file")
            found.append(path.relative_to(directory).as_posix())
    return sorted(name for name in found if name != MANIFEST_NAME)


def _refuse(err: OSError) -> NoReturn:
    raise ModelFileError(err.filename, f"cannot be read: {err.strerror}") from err
